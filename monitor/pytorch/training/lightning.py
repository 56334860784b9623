"""Training metrics where Lightning's Trainer trains."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from monitor.pytorch.training.calls import GradNorm
from monitor.pytorch.training.metrics import TrainingMetrics
from monitor.training import TrainingConfig, load_training_config
from monitor.training.metrics import Step


class TrainingMetricsCallback(Callback):
    """Shows the metrics of a run in TensorBoard and in the log.

    >>> Trainer(callbacks=[TrainingMetricsCallback("train.yaml")])  # doctest: +SKIP

    A step is one of the optimizer. ``loss`` is this rank's, added up over micro-batches: where Lightning optimizes by itself it
    has divided each by their number, elsewhere it is what ``training_step`` returns.

    Args:
        config: The training YAML: its path, or what ``load_training_config`` made of it.
        batch_size: Samples of all ranks in a step. Otherwise what the data loader says.
        options: See ``TrainingMetrics``.

    Attributes:
        metrics: None before training begins.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(self, config: TrainingConfig | str | os.PathLike[str], batch_size: int | None = None, **options: Any) -> None:
        super().__init__()
        self._config = config if isinstance(config, TrainingConfig) else load_training_config(config)
        self._batch_size = batch_size
        self._options = options
        self._step: Step | None = None
        self.metrics: TrainingMetrics | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model as the strategy has wrapped it, and to its first optimizer."""
        del pl_module
        self._micro_steps = int(trainer.accumulate_grad_batches)
        if self._batch_size is None and (rows := getattr(trainer.train_dataloader, "batch_size", None)) is not None:
            self._batch_size = rows * self._micro_steps * trainer.world_size
        self._steps = trainer.global_step
        self.metrics = TrainingMetrics(
            self._config,
            trainer.strategy.model,
            trainer.optimizers[0],
            **{
                "grad_acc_steps": self._micro_steps,
                "start_step": self._steps,
                "samples": self._steps * (self._batch_size or 0),
                "total_steps": max(trainer.max_steps, 0),
                "grad_norm_is_told": bool(trainer.gradient_clip_val),
                **self._options,
            },
        )
        self._grad_norm = GradNorm()

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        if self._step is None and self.metrics is not None:
            self._step = self.metrics.begin_step(self._batch_size)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
        """The optimizer has stepped, or a micro-batch was added to those of its next step."""
        del pl_module
        step = self._step
        if step is None or self.metrics is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            step.local_loss(loss.detach())
        if trainer.global_step > self._steps:
            self._steps, self._step = trainer.global_step, None
            step.loss = sum(step.local_losses) if step.local_losses else None
            step.grad_norm = self._grad_norm.take()
            self.metrics.end_step(step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write what is left."""
        if self.metrics is not None:
            self._grad_norm.remove()
            self.metrics.close()
