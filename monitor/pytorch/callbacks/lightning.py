"""The monitor as a callback for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from monitor.pytorch.callbacks import HEALTH, AttachingCallback


class MonitorCallback(AttachingCallback, Callback):
    """Attaches the monitor when training starts, and closes it when training ends or fails.

    >>> Trainer(callbacks=[MonitorCallback()])  # doctest: +SKIP

    Steps have the Trainer's numbers, also after a checkpoint; with several optimizers, whose steps Lightning adds up, the sum
    divided by their number. If the module optimizes by hand, the first step shows the number of its micro-batches, and has no
    rows if there are several. The arguments are those of ``monitor.watch``.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(self, preset: str | None = HEALTH, **fields: Any) -> None:
        super().__init__()
        self._configure(preset, fields)
        self._open = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model as the strategy has wrapped it, and to its optimizers."""
        micro_batches = int(trainer.accumulate_grad_batches) if pl_module.automatic_optimization else None
        model, start = trainer.strategy.model, trainer.global_step // max(1, len(trainer.optimizers))
        self._open = False
        self._new_monitor().watch(model, trainer.optimizers, micro_batches=micro_batches, start_iteration=start)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """A module that the strategy does not wrap is not called: ``training_step`` is, and may call parts of it."""
        if self.monitor is not None and trainer.strategy.model is pl_module:
            self._open = True
            self.monitor.micro_batch_begins()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The forward of the micro-batch has ended; with several losses, that of the first."""
        del trainer, pl_module
        self._end(loss)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """A batch without a loss has no backward."""
        self._end(None)

    def _end(self, loss: Any) -> None:
        if self.monitor is not None and self._open:
            self._open = False
            self.monitor.micro_batch_ends(loss)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write what is queued, and close."""
        self._close()

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Write what is queued, and the step in progress as incomplete."""
        self._close()
