"""``TrainerMon`` for MindSpore."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from mindspore import nn

from monitor.mindspore import autograd, features, modules, process_group, tensor_reader
from monitor.mindspore.collectives import communication
from monitor.mindspore.frameworks import EXPECTED, framework_of
from monitor.mindspore.gradients import MindSporeGradients
from monitor.mindspore.tensor_reader import MindSporeTensorReader
from monitor.mindspore.updates import new_updates
from monitor.recording.backend import RecordingBackend
from monitor.recording.trainer_mon import ModelMonitor

# --- MindSpore's implementation of the adapter interface in ``monitor.recording.backend``.


class MindSporeFactories:
    """Creates the objects of MindSpore (``Factories``)."""

    optimizer_expected: str = EXPECTED
    framework_of = staticmethod(framework_of)
    new_reader = MindSporeTensorReader
    new_plans = staticmethod(lambda _watcher: None)
    new_gradients = MindSporeGradients
    new_updates = staticmethod(new_updates)
    communication = staticmethod(communication)


BACKEND: Final = RecordingBackend(tensor_reader, autograd, modules, process_group, features, MindSporeFactories())


class TrainerMon(ModelMonitor):
    __doc__ = ModelMonitor.__doc__

    _backend: ClassVar[RecordingBackend] = BACKEND

    def monitor_gnorm_with_ad(
        self,
        model: nn.Cell | Sequence[nn.Cell],
        grad_acc_steps: int = 1,
        optimizer: Any = None,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Deprecated alias of ``set_monitor``. The default optimizer is that of ``set_wrapped_optimizer``."""
        warnings.warn("monitor_gnorm_with_ad is now set_monitor.", DeprecationWarning, stacklevel=2)
        chosen = self._wrapped_optimizer if optimizer is None else optimizer
        self.set_monitor(model, grad_acc_steps, chosen, dp_group, tp_group, start_iteration)
