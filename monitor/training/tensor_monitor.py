"""The tensor monitor whose rows norms are read from: the user's own, or one that is made for training metrics."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from monitor.config import MonitorConfig
from monitor.failures import LOGGER, Failures
from monitor.recording.trainer_mon import TrainerMon
from monitor.training.config import TrainingConfig
from monitor.training.norms import NormReader, Whose, norms_of_state, recorded
from monitor.training.reporting import Writing

LISTENER: Final = "the training metrics"
FLUSH_SECONDS: Final = 30.0

NO_OPTIMIZER: Final = "Norms that training metrics ask for are not shown: they need the model and its optimizer."
NOT_RECORDED: Final = (
    "No gradient is recorded, since monitor_config.monitor_on is false: grad-norm is shown of steps whose grad_norm is set."
)
NOT_SET: Final = "Norms that training metrics ask for are not shown: the monitor that was passed has not set"

FIELDS: Final = ("wg_distribution", "mv_distribution", "param_distribution")


class NormRecording:
    """Records what norms need, and tells which step of the recording belongs to a step of training.

    Args:
        monitor: The user's own, which is left as it is; None to have one made.
        micro_steps: Of a step.
    """

    def __init__(
        self, config: TrainingConfig, monitor: TrainerMon | None, micro_steps: int, whose: Whose, failures: Failures
    ) -> None:
        self._config = config
        self._monitor, self._is_ours = monitor, monitor is None
        self._micro_steps = micro_steps
        self._whose = whose
        self._failures = failures
        self._measured: int | None = None

    def attach(
        self,
        model: Any,
        optimizer: Any,
        begun: int,
        make: Callable[[MonitorConfig], TrainerMon],
        writing: Writing,
        world_size: int,
    ) -> None:
        """Have norms handed over to ``writing`` from now on.

        Args:
            begun: How many steps there have been.
            make: Makes a monitor that records what a configuration says.
        """
        wanted = recorded(self._config, grad_norm_is_told=self._whose.grad_norm_is_told)
        if self._monitor is None:
            if wanted is None or optimizer is None:
                self._say_that_there_are_none(optimizer)
                return
            self._monitor = make(wanted)
        whose, failures = self._whose, self._failures
        writing.expect_norms()
        of_all = partial(_of_all, weakref.ref(self._monitor))  # the writer must not keep the monitor, and the model with it
        self._monitor.listen(LISTENER, lambda series: NormReader(series, world_size, writing, failures, whose, of_all))
        if self._is_ours:
            self._monitor.set_monitor(model, self._micro_steps, optimizer, start_iteration=begun)
        elif wanted is not None:
            self._say_what_is_missing(wanted, self._monitor.config)

    def _say_that_there_are_none(self, optimizer: Any) -> None:
        if norms_of_state(self._config):
            self._failures.warn("no optimizer", NO_OPTIMIZER)
        elif optimizer is not None and self._config.callbacks.MFLossMonitor is not None and not self._whose.grad_norm_is_told:
            LOGGER.info(NOT_RECORDED)

    def _say_what_is_missing(self, wanted: MonitorConfig, there: MonitorConfig) -> None:
        """Of a monitor that records what its own configuration asks for."""
        if missing := [field for field in FIELDS if getattr(wanted, field) and not getattr(there, field)]:
            self._failures.warn("not recorded", f"{NOT_SET} {', '.join(missing)}.")

    def realign(self, ended: int) -> None:
        """A step in which the optimizer was left out is one of training, too: the recording is to go on with the next.

        Args:
            ended: How many steps of training have.
        """
        if self._monitor is None or not self._is_ours:
            return
        for _ in range(self._micro_steps):
            if self._monitor.step < ended:
                self._monitor.batch_ended()

    def measured(self) -> int | None:
        """The step that was recorded since this was last asked; None if none was."""
        last = None if self._monitor is None else self._monitor.last_collected
        if last == self._measured:
            return None
        self._measured = last
        return last

    @property
    def local_gradients_note(self) -> str | None:
        """Why local gradients are not those of all micro-batches of a step; None where they are."""
        return None if self._monitor is None else self._monitor.local_gradients_note

    def close(self) -> None:
        """End what is ours. Of another's monitor, norms of the last steps are still on their way."""
        if self._monitor is None:
            return
        if self._is_ours:
            self._monitor.close()
        else:
            self._monitor.flush(FLUSH_SECONDS)


def _of_all(monitor: weakref.ref[TrainerMon]) -> bool:
    """Whether every parameter that is trained is stepped by an optimizer that was passed, as far as a step has shown."""
    alive = monitor()
    return alive is None or alive.knows_every_optimizer
