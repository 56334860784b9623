"""``TrainerMon`` for PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from monitor.pytorch.backend import BACKEND
from monitor.pytorch.modules import chunks_of
from monitor.recording.arguments import count
from monitor.recording.backend import RecordingBackend
from monitor.recording.trainer_mon import ModelMonitor


class TrainerMon(ModelMonitor):
    __doc__ = ModelMonitor.__doc__

    _backend: ClassVar[RecordingBackend] = BACKEND

    def monitor_gnorm_with_ad(
        self,
        model: nn.Module | Sequence[nn.Module],
        grad_acc_steps: int = 1,
        optimizer: Any = None,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Deprecated: ``set_monitor``. Without an optimizer, the first one that steps a parameter of the model is taken."""
        warnings.warn("monitor_gnorm_with_ad is deprecated: call set_monitor.", DeprecationWarning, stacklevel=2)
        micro_steps, start = count("grad_acc_steps", grad_acc_steps, 1), count("start_iteration", start_iteration, 0)
        chunks = chunks_of(model)
        framework = self._framework(chunks, self._wrapped_optimizer if optimizer is None else optimizer)
        self._attach(framework, micro_steps, (dp_group, tp_group), start)

    def _main_grad_of(self, chunks: Sequence[nn.Module]) -> bool:
        if not self._main_grad:
            return False
        if not any(hasattr(parameter, "main_grad") for chunk in chunks for parameter in chunk.parameters()):
            said = "params_have_main_grad is true, but no parameter has a main_grad: the monitor reads .grad."
            self._failures.advise("no main_grad", f"{said} Pass params_have_main_grad=False to silence this.")
        return True
