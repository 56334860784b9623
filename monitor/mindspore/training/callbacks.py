"""``TrainingMetrics``, and callbacks of ``mindspore.train.Model`` with the names that MindSpore Transformers uses."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Final

from mindspore import Tensor
from mindspore.train import Callback, RunContext

from monitor.failures import Failures
from monitor.mindspore.callbacks import trained_by
from monitor.mindspore.process_group import place
from monitor.mindspore.training import backend
from monitor.training import TrainingConfig, load_training_config
from monitor.training.config import BiasBalance, Callbacks, LossMonitor, MonitorSection, TensorBoardSection
from monitor.training.metrics import MetricsBackend, RunMetrics
from monitor.training.step import Number, Step


class TrainingMetrics(RunMetrics):
    __doc__ = RunMetrics.__doc__

    _backend: ClassVar[MetricsBackend] = backend


class TrainingMetricsCallback(Callback):  # type: ignore[misc]
    """Shows all metrics that a training YAML asks for.

    >>> model.train(epochs, dataset, callbacks=[TrainingMetricsCallback("train.yaml")])  # doctest: +SKIP

    ``loss`` is this rank's loss, as the network returns it, or the first of several results. A cell that trains by itself may
    replace network and optimizer, which are then taken from it. The cells of MindSpore Transformers also return the norm of the
    gradients before they clip them; it is ``grad-norm``.

    Args:
        config: The training YAML: its path, or the result of ``load_training_config``.
        batch_size: Samples of all ranks in a step. Default: the rows of a batch times the ranks. Unknown if the tensors of a
            batch differ in their first dimension.
        options: See ``TrainingMetrics``.

    Attributes:
        metrics: None before training begins.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(self, config: TrainingConfig | str | os.PathLike[str], batch_size: int | None = None, **options: Any) -> None:
        super().__init__()
        whole = config if isinstance(config, TrainingConfig) else load_training_config(config)
        self._config = self._part_of(whole)
        self._batch_size = batch_size
        self._options = options
        self._step: Step | None = None
        self._begun, self._sinking = 0, False
        self._failures = Failures()
        self.metrics: TrainingMetrics | None = None

    def _part_of(self, config: TrainingConfig) -> TrainingConfig:
        """The part of the configuration that this callback shows."""
        return config

    def on_train_begin(self, run_context: RunContext) -> None:
        """Close the metrics of an earlier training, which failed."""
        self.on_train_end(run_context)
        self.metrics = self._step = None

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Attach to the network and the optimizer of ``Model``. The epoch number is first known here."""
        training = run_context.original_args()
        self._begun = int(getattr(training, "cur_step_num", 0))
        if self.metrics is not None:
            return
        metrics = TrainingMetrics(self._config, **{**self._known_of(training), **self._options})
        metrics.attach(*trained_by(training))
        self.metrics = metrics

    def _known_of(self, training: Any) -> dict[str, Any]:
        steps, epochs = int(getattr(training, "batch_num", 0) or 0), int(getattr(training, "epoch_num", 0) or 0)
        earlier = steps * (int(getattr(training, "cur_epoch_num", 1)) - 1)
        return {
            "start_step": earlier,
            "samples": earlier * (self._batch_size or self._nominal(training) or 0),
            "total_steps": earlier + steps * epochs,
            # The training cell has a reducer, whose results are the same on all ranks.
            "gradients_are_global": bool(getattr(training.train_network, "reducer_flag", False)),
            "grad_norm_is_told": _returns_grad_norm(training.train_network),
        }

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Begin a step. Its loss scale is read now, since at its end it is already that of the next step."""
        training = run_context.original_args()
        if self.metrics is not None and not self._sinks(training):
            self._step = self.metrics.begin_step(self._samples(training))
            self._step.loss_scale = _scale_of(training)

    def _sinks(self, training: Any) -> bool:
        """Whether the device runs several steps in a call, which returns the numbers of the last one only."""
        before, self._begun = self._begun, int(getattr(training, "cur_step_num", self._begun + 1))
        if (steps := self._begun - before) > 1:
            self._sinking = True
            said = f"The device runs {steps} steps in one call, so their numbers and times are not known"
            self._failures.warn("sinking", f"{said}: no training metrics are shown. Pass sink_size=1 to Model.train.")
        return self._sinking

    def on_train_step_end(self, run_context: RunContext) -> None:
        """End the step."""
        step, self._step = self._step, None
        if step is None or self.metrics is None:
            return
        training = run_context.original_args()
        found = training.net_outputs
        outputs = found if isinstance(found, tuple | list) else (found,)
        step.loss = outputs[0]
        if _returns_grad_norm(training.train_network) and outputs[_GRAD_NORM] is not None:
            step.grad_norm = outputs[_GRAD_NORM]
        self.metrics.end_step(step)

    def _samples(self, training: Any) -> int | None:
        if self._batch_size is not None:
            return self._batch_size
        element = getattr(training, "train_dataset_element", None)
        if element is None:  # the device fetches batches by itself
            return self._nominal(training)
        rows = {int(one.shape[0]) for one in element if isinstance(one, Tensor) and one.ndim}
        return rows.pop() * place().world_size if len(rows) == 1 else None

    def _nominal(self, training: Any) -> int | None:
        """The samples of a full batch."""
        rows = training.train_dataset.get_batch_size()
        return None if rows is None else int(rows) * place().world_size

    def on_train_end(self, run_context: RunContext) -> None:
        """Write what is left."""
        del run_context
        if self.metrics is not None:
            self.metrics.close()


class MFLossMonitor(TrainingMetricsCallback):
    """Shows only the metrics of the whole run: for callback lists that have ``TrainingStateMonitor`` as well."""

    def _part_of(self, config: TrainingConfig) -> TrainingConfig:
        section = MonitorSection(dump_path=config.monitor_config.dump_path)
        run = Callbacks(MFLossMonitor=config.callbacks.MFLossMonitor or LossMonitor())
        return config.model_copy(update={"monitor_config": section, "callbacks": run, "tensorboard": _without_experts(config)})


class TrainingStateMonitor(TrainingMetricsCallback):
    """Shows only the metrics of ``monitor_config``."""

    def _part_of(self, config: TrainingConfig) -> TrainingConfig:
        return config.model_copy(update={"callbacks": Callbacks(), "tensorboard": _without_experts(config), "document": {}})


class TopkBiasBalanceCallback(TrainingMetricsCallback):
    """Shows only the load of experts. It does not balance them: a monitor changes nothing.

    Args:
        options: Among them ``routers``, the names of the cells that choose experts.
    """

    def _part_of(self, config: TrainingConfig) -> TrainingConfig:
        section = MonitorSection(dump_path=config.monitor_config.dump_path)
        balance = Callbacks(TopkBiasBalanceCallback=BiasBalance())
        return config.model_copy(update={"monitor_config": section, "callbacks": balance, "document": {}})


_CLIPPING: Final = {"MFTrainOneStepCell", "MFPipelineWithLossScaleCell"}
_GRAD_NORM: Final = 4
"""Where the training cells of MindSpore Transformers return the norm: after loss, overflow, loss scale and learning rate."""


def _returns_grad_norm(cell: Any) -> bool:
    """Whether a cell is one of MindSpore Transformers' that clips. It computes the norm only then."""
    theirs = any(kind.__name__ in _CLIPPING for kind in type(cell).__mro__)
    return theirs and bool(getattr(cell, "use_clip_grad", False))


def _scale_of(training: Any) -> Number | None:
    """The scale of the next step's loss. A fixed scale is known to the optimizer."""
    if (changing := getattr(training.train_network, "scale_sense", None)) is not None:
        return backend.kept(changing)
    scale = float(getattr(trained_by(training)[1], "loss_scale", 1.0))
    return None if scale == 1.0 else scale


def _without_experts(config: TrainingConfig) -> TensorBoardSection | None:
    board = config.tensorboard
    return None if board is None else board.model_copy(update={"log_expert_load_to_tensorboard": False})
