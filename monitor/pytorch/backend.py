"""PyTorch's implementation of the adapter interface in ``monitor.recording.backend``."""

from typing import Final

from monitor.pytorch import autograd, modules, process_group, tensors
from monitor.pytorch.collectives.recording import communication
from monitor.pytorch.features import reading
from monitor.pytorch.frameworks.framework import framework_of
from monitor.pytorch.gradients import TorchGradients
from monitor.pytorch.plans import new_plans
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.pytorch.updates import new_updates
from monitor.recording.backend import RecordingBackend


class TorchFactories:
    """Creates the objects of PyTorch (``Factories``)."""

    optimizer_expected: str = "a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`"
    framework_of = staticmethod(framework_of)
    new_reader = TorchTensorReader
    new_plans = staticmethod(new_plans)
    new_gradients = TorchGradients
    new_updates = staticmethod(new_updates)
    communication = staticmethod(communication)


BACKEND: Final = RecordingBackend(tensors, autograd, modules, process_group, reading, TorchFactories())
