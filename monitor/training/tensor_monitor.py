"""Connects training metrics to the tensor monitor whose rows hold their norms: the user's own, or a new one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from monitor.config import MonitorConfig
from monitor.failures import LOGGER, Failures
from monitor.recording.trainer_mon import ModelMonitor
from monitor.training.config import TrainingConfig
from monitor.training.norms import GradNormSource, NormReader, norms_of_state, recorded
from monitor.training.reporting import MetricsWriter

LISTENER: Final = "the training metrics"
FLUSH_SECONDS: Final = 30.0

NO_OPTIMIZER: Final = "Norms that training metrics ask for are not shown: they need the model and its optimizer."
NOT_RECORDED: Final = (
    "No gradient is recorded, since monitor_config.monitor_on is false: "
    "grad-norm is shown only for steps whose grad_norm is set."
)
NOT_SET: Final = "Norms that training metrics ask for are not shown: the monitor that was passed has not set"

FIELDS: Final = ("wg_distribution", "mv_distribution", "param_distribution")


class NormRecording:
    """Records what the norms need, and tells which recorded step belongs to a training step.

    Args:
        monitor: The user's monitor, which is not changed; None to create one.
        micro_steps: Micro-batches a step.
    """

    def __init__(
        self, config: TrainingConfig, monitor: ModelMonitor | None, micro_steps: int, source: GradNormSource, failures: Failures
    ) -> None:
        self._config = config
        self._monitor, self._owns_monitor = monitor, monitor is None
        self._micro_steps = micro_steps
        self._source = source
        self._failures = failures
        self._measured: int | None = None

    def attach(
        self,
        model: Any,
        optimizer: Any,
        begun: int,
        make: Callable[[MonitorConfig], ModelMonitor],
        writing: MetricsWriter,
        world_size: int,
    ) -> None:
        """Send norms to ``writing`` from now on.

        Args:
            begun: The number of steps that have begun before.
            make: Creates a monitor from a configuration.
        """
        wanted = recorded(self._config, grad_norm_is_told=self._source.grad_norm_is_told)
        if self._monitor is None:
            if wanted is None or optimizer is None:
                self._warn_of_no_norms(optimizer)
                return
            self._monitor = make(wanted)
        source, failures = self._source, self._failures
        writing.expect_norms()
        of_all = partial(_of_all, weakref.ref(self._monitor))  # the writer must not keep the monitor, and the model with it
        self._monitor.listen(LISTENER, lambda series: NormReader(series, world_size, writing, failures, source, of_all))
        if self._owns_monitor:
            self._monitor.set_monitor(model, self._micro_steps, optimizer, start_iteration=begun)
        elif wanted is not None:
            self._warn_of_missing_fields(wanted, self._monitor.config)

    def _warn_of_no_norms(self, optimizer: Any) -> None:
        if norms_of_state(self._config):
            self._failures.warn("no optimizer", NO_OPTIMIZER)
        elif optimizer is not None and self._config.callbacks.MFLossMonitor is not None and not self._source.grad_norm_is_told:
            LOGGER.info(NOT_RECORDED)

    def _warn_of_missing_fields(self, wanted: MonitorConfig, there: MonitorConfig) -> None:
        """Warn of fields that the user's monitor does not record and the norms need."""
        if missing := [field for field in FIELDS if getattr(wanted, field) and not getattr(there, field)]:
            self._failures.warn("not recorded", f"{NOT_SET} {', '.join(missing)}.")

    def log_loss(self, terms: Sequence[Any]) -> None:
        """Log the sum of ``terms`` in the user's monitor, if there is one."""
        if self._monitor is not None and not self._owns_monitor and terms:
            self._monitor.log(loss=sum(terms))

    def realign(self, ended: int) -> None:
        """Advance the recording by a step in which the optimizer was not called, so that both keep counting alike.

        Args:
            ended: The number of training steps that have ended.
        """
        if self._monitor is None or not self._owns_monitor:
            return
        for _ in range(self._micro_steps):
            if self._monitor.step < ended:
                self._monitor.batch_ended()

    def measured(self) -> int | None:
        """The step that was recorded since the last call; None if no step was recorded."""
        last = None if self._monitor is None else self._monitor.last_collected
        if last == self._measured:
            return None
        self._measured = last
        return last

    @property
    def local_gradients_note(self) -> str | None:
        """Why the recorded local gradients do not cover all micro-batches of a step; None if they do."""
        return None if self._monitor is None else self._monitor.local_gradients_note

    def close(self) -> None:
        """Close the monitor that was created here; flush the user's, whose last norms may still be on their way."""
        if self._monitor is None:
            return
        if self._owns_monitor:
            self._monitor.close()
        else:
            self._monitor.flush(FLUSH_SECONDS)


def _of_all(monitor: weakref.ref[ModelMonitor]) -> bool:
    """Whether the passed optimizers step every trained parameter, as far as the steps so far have shown."""
    alive = monitor()
    return alive is None or alive.knows_every_optimizer
