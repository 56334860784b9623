"""``TrainerMon``: what users of MindSpore attach."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from mindspore import nn

from monitor.capture import trainer_mon
from monitor.capture.backend import Backend
from monitor.mindspore import backend


class TrainerMon(trainer_mon.TrainerMon):
    __doc__ = trainer_mon.TrainerMon.__doc__

    _backend: ClassVar[Backend] = backend
    _wrapped_optimizer: Any = None

    def __init__(
        self,
        config_file_path: str | os.PathLike[str],
        process_group: Any = None,
        params_have_main_grad: bool = True,
        opt_ty: Any = None,
    ) -> None:
        """Make a monitor, which is to be attached.

        Args:
            opt_ty: Accepted from older scripts, and ignored.
        """
        if opt_ty is not None:
            warnings.warn("opt_ty is ignored: the optimizer is recognised by itself.", DeprecationWarning, stacklevel=2)
        super().__init__(config_file_path, process_group, params_have_main_grad)

    def set_wrapped_optimizer(self, optimizer: Any) -> None:
        """Deprecated: pass the optimizer to ``set_monitor``."""
        warnings.warn("set_wrapped_optimizer will go: pass the optimizer to set_monitor.", DeprecationWarning, stacklevel=2)
        self._wrapped_optimizer = optimizer

    def monitor_gnorm_with_ad(
        self,
        model: nn.Cell | Sequence[nn.Cell],
        grad_acc_steps: int = 1,
        optimizer: Any = None,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Deprecated: ``set_monitor``. Without an optimizer, that of ``set_wrapped_optimizer`` is taken."""
        warnings.warn("monitor_gnorm_with_ad is now set_monitor.", DeprecationWarning, stacklevel=2)
        chosen = self._wrapped_optimizer if optimizer is None else optimizer
        self.set_monitor(model, grad_acc_steps, chosen, dp_group, tp_group, start_iteration)
