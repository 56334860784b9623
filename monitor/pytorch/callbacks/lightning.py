"""The monitor as a callback for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from monitor.attaching import HEALTH, configured
from monitor.pytorch.trainer_mon import TrainerMon


class MonitorCallback(Callback):
    """Attaches the monitor when training starts, and closes it when training ends or fails.

    >>> Trainer(callbacks=[MonitorCallback()])  # doctest: +SKIP

    Steps have the Trainer's numbers, also after a checkpoint. If the module optimizes by hand, the first step shows the number
    of its micro-batches, and has no rows. The arguments are those of ``monitor.watch``.

    Attributes:
        monitor: The monitor of the training in progress or of the last one; None before.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(self, preset: str | None = HEALTH, **fields: Any) -> None:
        super().__init__()
        self._config = configured(preset, fields)
        self.monitor: TrainerMon | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model as the strategy has wrapped it, and to its optimizers."""
        self._close()  # of an earlier training that failed
        micro_batches = int(trainer.accumulate_grad_batches) if pl_module.automatic_optimization else None
        self.monitor = TrainerMon(self._config, params_have_main_grad=False)
        model, start = trainer.strategy.model, trainer.global_step
        self.monitor.watch(model, trainer.optimizers, micro_batches=micro_batches, start_iteration=start)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write what is queued, and close."""
        self._close()

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Write what is queued, and the step in progress as incomplete."""
        self._close()

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
