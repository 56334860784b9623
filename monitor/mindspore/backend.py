"""MindSpore's implementation of the adapter interface in ``monitor.recording.backend``."""

from typing import Final

from monitor.mindspore import autograd, features_reading, modules, process_group, tensors
from monitor.mindspore.collectives import communication
from monitor.mindspore.frameworks import framework_of
from monitor.mindspore.gradients import MindSporeGradients
from monitor.mindspore.tensor_reader import MindSporeTensorReader
from monitor.mindspore.updates import new_updates
from monitor.recording.backend import RecordingBackend


class MindSporeFactories:
    """Creates the objects of MindSpore (``Factories``)."""

    optimizer_expected: str = "an optimizer of mindspore.nn or mindspore.experimental.optim"
    framework_of = staticmethod(framework_of)
    new_reader = MindSporeTensorReader
    new_gradients = MindSporeGradients
    new_updates = staticmethod(new_updates)
    communication = staticmethod(communication)


BACKEND: Final = RecordingBackend(tensors, autograd, modules, process_group, features_reading, MindSporeFactories())
