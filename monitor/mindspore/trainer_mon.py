"""``TrainerMon`` for MindSpore."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from mindspore import nn

from monitor.mindspore import autograd, modules, process_group, tensor_reader
from monitor.mindspore.collectives import communication
from monitor.mindspore.compiled.replay import flush, program_of
from monitor.mindspore.features import reading as features
from monitor.mindspore.frameworks.framework import framework_of
from monitor.mindspore.frameworks.optimizer_state import EXPECTED
from monitor.mindspore.gradients import MindSporeGradients
from monitor.mindspore.tensor_reader import MindSporeTensorReader
from monitor.mindspore.updates import new_updates
from monitor.recording.backend import FrameworkAdapter, RecordingBackend
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

    def _framework_of(self, model: Any, optimizer: Any) -> FrameworkAdapter:
        """See ``ModelMonitor``.

        Raises:
            ValueError: The mode is GRAPH_MODE, and nothing that is configured can be recorded there.
        """
        config = self._config
        modules.refuse_graph_mode(outside=self._dynamic or any(getattr(config, field) for field in modules.fields_outside()))
        return super()._framework_of(model, optimizer)

    def log(self, **numbers: Any) -> None:
        self._take_compiled_steps()
        super().log(**numbers)

    log.__doc__ = ModelMonitor.log.__doc__

    def batch_ended(self) -> None:
        self._take_compiled_steps()
        super().batch_ended()

    batch_ended.__doc__ = ModelMonitor.batch_ended.__doc__

    def _take_compiled_steps(self) -> None:
        """Take what compiled code has measured. A step that ended there ends here."""
        for recording in self._recordings:
            root = recording.attachment.watch.chunks[0]
            program = program_of(root)
            if program is not None and program.is_compiled:
                self._failures.guarded("following compiled code", flush)(program)
                self._failures.guarded("calling back", self._deliver_alerts)(recording)

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
