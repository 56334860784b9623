"""Training metrics as a callback for the Trainer of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from accelerate import Accelerator
from torch import Tensor
from transformers import Trainer, TrainerCallback

from monitor.pytorch.hooks import TorchCallPatch
from monitor.pytorch.training import TrainingMetrics
from monitor.pytorch.training.backend import GradNorm, is_spread, rows_of
from monitor.recording.patches import CallListener
from monitor.training import TrainingConfig, load_training_config
from monitor.training.step import Step

TRAINING_STEP: Final = TorchCallPatch(Trainer, "training_step", ("self", "model", "inputs"))
UNPADDED: Final = ("position_ids", "cu_seq_lens_q")
"""Keys of a batch whose samples may be packed into one row."""

OF_LOGGED_STEPS: Final = (
    "grad-norm is shown only in steps that the Trainer logs: under FSDP2 its value needs a collective. "
    "Set logging_steps=1 to log every step."
)

BACKWARD: Final = TorchCallPatch(Accelerator, "backward", ("self", "loss"))
CLIPPING: Final = TorchCallPatch(Accelerator, "clip_grad_norm_", ("self", "parameters"))


class TrainingMetricsCallback(TrainerCallback):
    """Shows the metrics of a run in TensorBoard and in the log.

    >>> Trainer(model, arguments, callbacks=[TrainingMetricsCallback("train.yaml")])  # doctest: +SKIP

    ``loss`` is the Trainer's own: the mean over all ranks and over the steps since it logged last. It is shown when the Trainer
    logs, with ``logging_steps=1`` in every step; so is ``grad-norm`` under FSDP2. ``local_loss`` is the loss that each backward
    began from. Samples are the rows of the batches passed to ``Trainer.training_step``, times the number of ranks, since its
    samplers give each rank as many.

    Args:
        config: The training YAML: its path, or the result of ``load_training_config``.
        options: See ``TrainingMetrics``.

    Attributes:
        metrics: None before training begins.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(self, config: TrainingConfig | str | os.PathLike[str], **options: Any) -> None:
        self._config = config if isinstance(config, TrainingConfig) else load_training_config(config)
        self._options = options
        self._step: Step | None = None
        self.metrics: TrainingMetrics | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach to the model and its optimizer."""
        del control
        self._close()  # of an earlier training that failed
        batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.metrics = TrainingMetrics(
            self._config,
            given["model"],
            given["optimizer"],
            **{
                "grad_acc_steps": args.gradient_accumulation_steps,
                "start_step": state.global_step,
                "samples": state.global_step * batch_size,
                "total_steps": max(state.max_steps, 0),
                "grad_norm_is_told": True,  # the Trainer computes it in every step, clipped or not
                **self._options,
            },
        )
        self._losses, self._grad_norm = Losses(), GradNorm(CLIPPING)
        self._training_steps = TrainingSteps(self.metrics)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """End the previous step: the Trainer will not log it any more."""
        self._end()
        if self.metrics is not None:
            self._losses.take()
            self._training_steps.take()
            self._step = self.metrics.begin_step()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Log the sum of the losses that backward began from, which is the loss of the step on this rank."""
        if self.metrics is not None:
            self.metrics.log_loss(self._losses.seen)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer logs after this, with its loss."""
        del state
        if self._step is not None:
            rows = self._training_steps.take()
            self._step.batch_size = None if rows is None else rows * args.world_size
            self._step.local_losses = self._losses.take()
            norm = self._grad_norm.take()
            self._step.grad_norm = None if is_spread(norm) else norm
            if is_spread(norm) and not control.should_log and self.metrics is not None:
                self.metrics.warn_once(OF_LOGGED_STEPS)
        if not control.should_log:
            self._end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Take the loss and the norm that the Trainer logs."""
        del args, state, control
        if self._step is not None and logs is not None and "loss" in logs:
            self._step.loss = float(logs["loss"])
            if (norm := logs.get("grad_norm")) is not None:
                self._step.grad_norm = norm
            self._end()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write pending steps and close."""
        self._end()
        self._close()

    def _close(self) -> None:
        self._step = None
        if self.metrics is not None:
            self._losses.remove()
            self._grad_norm.remove()
            self._training_steps.remove()
            self.metrics.close()

    def _end(self) -> None:
        step, self._step = self._step, None
        if step is not None and self.metrics is not None:
            self.metrics.end_step(step)


class TrainingSteps(CallListener):
    """Counts samples and floating point operations of calls of ``Trainer.training_step``, one per micro-batch."""

    def __init__(self, metrics: TrainingMetrics) -> None:
        self._metrics = metrics
        self._rows: list[int | None] = []
        TRAINING_STEP.add(self)

    def call_begins(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        inputs = args[2] if len(args) > 2 else kwargs.get("inputs")
        unpadded = isinstance(inputs, Mapping) and any(name in inputs for name in UNPADDED)
        self._rows.append(None if unpadded else rows_of(inputs))
        self._metrics.count_flops()

    def call_ended(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del args, kwargs, result
        self._metrics.stop_counting()

    def call_raised(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        self._metrics.stop_counting(failed=True)

    def take(self) -> int | None:
        """The samples of this rank since the last ``take``; None if unknown."""
        rows, self._rows = self._rows, []
        return sum(one for one in rows if one is not None) if rows and None not in rows else None

    def remove(self) -> None:
        TRAINING_STEP.remove(self)


class Losses(CallListener):
    """The losses that accelerate's backward calls begin from.

    Attributes:
        seen: The losses since the last ``take``.
    """

    def __init__(self) -> None:
        self.seen: list[Any] = []
        BACKWARD.add(self)

    def call_begins(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        loss = args[1] if len(args) > 1 else kwargs.get("loss")
        if isinstance(loss, Tensor):
            self.seen.append(loss.detach())

    def take(self) -> list[Any]:
        """The losses since the last ``take``."""
        seen, self.seen = self.seen, []
        return seen

    def remove(self) -> None:
        BACKWARD.remove(self)
