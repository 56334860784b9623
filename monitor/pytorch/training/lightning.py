"""Training metrics as a callback for Lightning's Trainer."""

from __future__ import annotations

import os
from typing import Any, Final

from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from monitor.pytorch.hooks import TorchCallPatch
from monitor.pytorch.training import TrainingMetrics
from monitor.pytorch.training.backend import NormOfOptimizer, is_spread, rows_of
from monitor.recording.arguments import only
from monitor.training import TrainingConfig, load_training_config
from monitor.training.step import Step

OF_PARTS: Final = "grad-norm is not shown: under FSDP2 its value needs a collective, which Lightning does not issue."
CLIPS_ALL: Final = TorchCallPatch(Precision, "clip_gradients", ("self", "optimizer"))


class TrainingMetricsCallback(Callback):
    """Shows the metrics of a run in TensorBoard and in the log.

    >>> Trainer(callbacks=[TrainingMetricsCallback("train.yaml")])  # doctest: +SKIP

    A step is an optimizer step. ``loss`` is this rank's, summed over micro-batches. With automatic optimization Lightning has
    divided each by their number; otherwise it is the result of ``training_step``.

    Args:
        config: The training YAML: its path, or the result of ``load_training_config``.
        batch_size: Samples of all ranks in a step. By default the rows of the step's batches times the number of ranks, since
            Lightning's samplers give each rank as many. Unknown if the tensors of a batch differ in their first dimension.
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
        """Attach to the model as the strategy has wrapped it, and to its optimizers."""
        self._close()  # of an earlier training that failed
        micro_steps = int(trainer.accumulate_grad_batches)
        rows = getattr(trainer.train_dataloader, "batch_size", None) or 0
        self._steps = trainer.global_step
        self._rows: list[int | None] = []
        self._backwards: list[Tensor] = []
        self.metrics = TrainingMetrics(
            self._config,
            trainer.strategy.model,
            only(trainer.optimizers),
            **{
                "grad_acc_steps": micro_steps,
                "start_step": self._steps,
                "samples": self._steps * (self._batch_size or rows * micro_steps * trainer.world_size),
                "total_steps": max(trainer.max_steps, 0),
                "grad_norm_is_told": _clips_all(trainer, pl_module),
                **self._options,
            },
        )
        self._grad_norm = NormOfOptimizer(CLIPS_ALL)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any, **__: Any) -> None:
        del trainer, pl_module
        if self.metrics is None:
            return
        if self._step is None:
            self._step = self.metrics.begin_step(self._batch_size)
            self._rows.clear()
        self._rows.append(rows_of(batch))
        self.metrics.count_flops()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Keep the loss of a micro-batch until the optimizer steps."""
        del trainer, pl_module
        if self.metrics is not None and isinstance(loss, Tensor):
            self._backwards.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Log the sum of the losses that backward began from. With several optimizers it is no loss of the step."""
        del pl_module, optimizer
        if self.metrics is not None and self._backwards:
            losses, self._backwards = self._backwards, []
            if len(trainer.optimizers) == 1:
                self.metrics.log_loss(losses)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
        """The optimizer has stepped, or its next step has one more micro-batch."""
        del pl_module
        step = self._step
        if step is None or self.metrics is None:
            return
        self.metrics.stop_counting()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            step.local_loss(loss.detach())
        if trainer.global_step > self._steps:
            self._steps, self._step = trainer.global_step, None
            step.loss = sum(step.local_losses) if step.local_losses else None
            norm = self._grad_norm.take()
            if is_spread(norm):
                self.metrics.warn_once(OF_PARTS)
            elif len(trainer.optimizers) == 1:
                step.grad_norm = norm
            if self._batch_size is None and None not in self._rows:
                step.batch_size = sum(rows for rows in self._rows if rows is not None) * trainer.world_size
            self.metrics.end_step(step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write pending steps and close."""
        self._close()

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Training has failed: remove all hooks and patches."""
        self._close()

    def _close(self) -> None:
        self._step = None
        if self.metrics is not None:
            self._grad_norm.remove()
            self.metrics.stop_counting(failed=True)
            self.metrics.close()


def _clips_all(trainer: Any, pl_module: Any) -> bool:
    """Whether Lightning clips all gradients by their norm, and so computes the norm in every step."""
    by_norm = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")
    return by_norm and len(trainer.optimizers) == 1 and not is_overridden("configure_gradient_clipping", pl_module)
