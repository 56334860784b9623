"""Callbacks for ``mindspore.train.Model``: the monitor in one line, and the precision dump."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from mindspore import Tensor, nn
from mindspore.train import Callback, RunContext

from monitor.attaching import Configuration, named
from monitor.failures import Failures
from monitor.mindspore.dump import PrecisionDebugger
from monitor.mindspore.hooks import after_forward, takes_hooks
from monitor.mindspore.modules import trains
from monitor.mindspore.trainer_mon import TrainerMon
from monitor.recording.backend import HookSet

NO_LOSS: Final = (
    "The training cell is compiled and returns no loss of one element, so the loss has no rows. Log it where your code has it: "
    "callback.monitor.log(loss=...)."
)
LOSS_SCALE: Final = "the training cell scales the loss: grad_unreduced and actv_grad are multiplied by the scale"


class MonitorCallback(Callback):  # type: ignore[misc]
    """Attaches a ``TrainerMon`` when training begins, and closes it when training ends.

    A step that ends without a call of the optimizer counts as skipped, as with loss scaling. Training that begins again is
    recorded by a new ``TrainerMon``, which continues the step count.

    >>> model.train(epochs, dataset, callbacks=[MonitorCallback("monitor_config.json")])  # doctest: +SKIP

    Args:
        config_file_path: A JSON file, a dictionary with the fields of one, or a ``MonitorConfig``, as of ``TrainerMon``; or the
            name of a preset, such as ``health``.
        grad_acc_steps: Forwards a step.
        process_group: The pipeline-parallel group of this rank.
        dp_group: Data-parallel group.
        tp_group: Tensor-parallel group.
        start_iteration: Number of the first step.

    Attributes:
        monitor: The latest monitor. The first is created at once, so that an invalid configuration is reported before training.

    Raises:
        ConfigError: The configuration cannot be used. The message names the field, the value and what is allowed.
        OutputError: The output directory cannot be created or written.
    """

    def __init__(
        self,
        config_file_path: Configuration,
        grad_acc_steps: int = 1,
        process_group: Any = None,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        super().__init__()
        self._new_monitor = partial(TrainerMon, named(config_file_path), process_group)
        self.monitor = self._new_monitor()
        self._hooks, self._failures = HookSet(), Failures()
        self._has_ended, self._misses_loss, self._scales_loss = False, False, False
        self._grad_acc_steps = grad_acc_steps
        self._groups = dp_group, tp_group
        self._start_iteration = start_iteration

    def on_train_begin(self, run_context: RunContext) -> None:
        """Attach to the network and the optimizer of ``Model``, or to those of its training cell."""
        if self._has_ended:
            self.monitor, self._has_ended = self._new_monitor(), False
        training = run_context.original_args()
        network, optimizer = trained_by(training)
        self.monitor.set_monitor(network, self._grad_acc_steps, optimizer, *self._groups, self._start_iteration)
        training_cell = getattr(training, "train_network", None)
        self._scales_loss = isinstance(training_cell, nn.Cell) and any(
            isinstance(cell, nn.TrainOneStepWithLossScaleCell) for _, cell in training_cell.cells_and_names()
        )
        computes_loss = getattr(training_cell, "network", None)
        if isinstance(computes_loss, nn.Cell) and takes_hooks(computes_loss):
            self._hooks.add(after_forward(computes_loss, self._failures.guarded("logging the loss", self._log_loss)))
            self._misses_loss = self.monitor._config.run_numbers is not False

    def _log_loss(self, cell: nn.Cell, _args: Any, _kwargs: Any, result: Any) -> None:
        """Log the loss that training differentiates: a training cell also calls its network once without."""
        self._misses_loss = False
        if isinstance(result, Tensor) and result.size == 1 and trains(cell):
            self.monitor.log(loss=result)

    def _log_result(self, training: Any) -> None:
        """Log the loss that a compiled training cell returns, alone or first. With data sinking it is that of the last step."""
        result = getattr(training, "net_outputs", None)
        loss = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(loss, Tensor) and loss.size == 1:
            self.monitor.log(loss=loss)
        else:
            self._failures.nothing_of("compiled loss", NO_LOSS)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """End the step. Its call of the optimizer, if any, is over."""
        if self._misses_loss:
            self._failures.guarded("logging the loss", self._log_result)(run_context.original_args())
        self.monitor.batch_ended()
        if self._scales_loss:
            self._note_loss_scale()

    def _note_loss_scale(self) -> None:
        runs = [run for recording in self.monitor._recordings if (run := recording.run) is not None]
        for run in runs:
            run.manifest.note("loss_scale", LOSS_SCALE)
        self._scales_loss = not runs

    def on_train_end(self, run_context: RunContext) -> None:
        """Write what is left."""
        del run_context
        self._start_iteration = self.monitor.step
        self._hooks.remove()
        self.monitor.close()
        self._has_ended = True


def trained_by(training: Any) -> tuple[Any, Any]:
    """The network and the optimizer. A ``Model`` without an optimizer has a training cell that holds both."""
    network, optimizer = training.network, training.optimizer
    if optimizer is None:
        network, optimizer = getattr(network, "network", network), getattr(network, "optimizer", None)
    else:
        network = _trained(network, training)
    return _innermost(network), optimizer


def _trained(network: Any, training: Any) -> Any:
    """The network of ``Model``, or the cell that is called in its place: with ``amp_level="O1"``, MindSpore rewrites the
    network as a new cell with the same cells inside.
    """
    called = getattr(getattr(training, "train_network", None), "network", None)
    if not isinstance(called, nn.Cell) or any(cell is network for _, cell in called.cells_and_names()):
        return network
    return _innermost(called)


def _innermost(network: Any) -> Any:
    while (inner := _inside(network)) is not None:
        network = inner
    return network


def _inside(cell: Any) -> nn.Cell | None:
    """The network in a cell that only passes on its inputs. Names of parameters do not contain such a cell."""
    if isinstance(cell, nn.WithLossCell):
        inner: nn.Cell = cell.backbone_network
        return inner
    only_passes_on = isinstance(cell, nn.Cell) and not cell._auto_prefix and list(cell.name_cells()) == ["network"]
    return cell.network if only_passes_on else None


# --- The precision dump for ``mindspore.train.Model``.


class MsprobeStep(Callback):  # type: ignore[misc]
    """Dumps each training step from its beginning to its end.

    >>> model.train(epochs, dataset, callbacks=[MsprobeStep(debugger)])  # doctest: +SKIP

    Args:
        debugger: If its ``start`` was called with a model before, that model is dumped. Otherwise the network of ``Model`` is.
    """

    def __init__(self, debugger: PrecisionDebugger) -> None:
        super().__init__()
        self._debugger = debugger

    def on_train_step_begin(self, run_context: RunContext) -> None:
        passed, training = self._debugger.model, run_context.original_args()
        self._debugger.start(_trained(training.network, training) if passed is None else passed)

    def on_train_step_end(self, run_context: RunContext) -> None:
        del run_context
        self._debugger.stop()
        self._debugger.step()


class MsprobeInitStep(Callback):  # type: ignore[misc]
    """Sets the number of the first dumped step when training resumes.

    Args:
        debugger: The debugger whose steps are numbered; None for the latest debugger.
    """

    def __init__(self, debugger: PrecisionDebugger | None = None) -> None:
        super().__init__()
        self._debugger = debugger

    def on_train_begin(self, run_context: RunContext) -> None:
        done = getattr(run_context.original_args(), "cur_step_num", 0) or 0
        debugger = PrecisionDebugger.made_last() if self._debugger is None else self._debugger
        if debugger is not None:
            debugger.set_init_step(int(done))
