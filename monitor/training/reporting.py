"""Puts together what is shown of a step, and the thread that shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from monitor.failures import EarlierFailure, Failures
from monitor.pipeline.process import PROCESS, Ticket
from monitor.training.config import LOG, TENSORBOARD, TrainingConfig
from monitor.training.expert_load import ExpertCounts, load_scalars
from monitor.training.norms import norms_of_state, unscaled
from monitor.training.outputs import EventWriter, LogWriter
from monitor.training.step import RunScalars, Scalar, StateScalars, StepFacts, StepJoiner, StepNorms, ThroughputMeter, value_of

NOT_RECORDED: Final = (
    "the tensor monitor has not recorded this step. Either it records other steps than training metrics show, or the optimizer "
    "was not called."
)
NOT_HERE: Final = (
    "grad-norm is not shown: it was not set, and this rank is not known to have the whole gradient. Set grad_norm of each "
    "step, or pass gradients_are_global=True if every rank's optimizer is given the same gradients."
)
NO_LOCAL_NORMS: Final = "local_norm and device_local_norm are not shown:"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the metrics of a rank are shown.

    Attributes:
        events: None if nothing is written to TensorBoard.
        counts: Stores the token counts of experts; None if they are not recorded.
    """

    log: LogWriter
    events: EventWriter | None = None
    counts: ExpertCounts | None = None


class Reporting:
    """Shows each step at the configured destinations. A failure is logged once and counted; the other outputs continue.

    Args:
        devices: The number of devices of the job.
    """

    def __init__(
        self,
        config: TrainingConfig,
        devices: int,
        outputs: Outputs,
        failures: Failures,
        *,
        grad_norm_is_told: bool = False,
    ) -> None:
        run = config.callbacks.MFLossMonitor
        self._every = run.per_print_times if run is not None else 0
        self._state_every = config.monitor_config.step_interval if config.monitor_config.monitor_on else 0
        self._run, self._state = RunScalars(config), StateScalars(config)
        self._run_meter, self._state_meter = ThroughputMeter(devices), ThroughputMeter(devices)
        self._last: float | None = None
        self._norms_of_state, self._grad_norm_is_told = norms_of_state(config), grad_norm_is_told
        self._local_norms = bool(config.wants("local_norm_format") or config.wants("device_local_norm_format"))
        self.expects_norms = False
        self._log, self._events, self._counts = outputs.log, outputs.events, outputs.counts
        self._failures = failures

    def texts(self, texts: Mapping[str, str]) -> None:
        """Show the configuration of the run."""
        if self._events is not None:
            self._guarded("writing the configuration to TensorBoard", lambda events: events.texts(texts), self._events)

    def step(self, facts: StepFacts, norms: StepNorms | None) -> None:
        """Show one step, with its norms if there are any."""
        began = facts.ended if facts.began is None else facts.began
        self._last = began if self._last is None else self._last
        for meter in (self._run_meter, self._state_meter):
            meter.begin(began)
            meter.add(facts.batch_size, facts.flops)
        norms = self._of_the_step(facts, self._unscaled(facts, norms))
        self._warn_of_missing_norms(facts, norms)
        run, state = self._run_scalars(facts, norms), self._state_scalars(facts, norms)
        self._show(facts, norms, run, state, self._last)
        self._last = facts.ended
        if self._counts is not None and facts.tokens:
            self._guarded("counting what went to each expert", lambda counts: self._show_load(counts, facts), self._counts)

    def _unscaled(self, facts: StepFacts, norms: StepNorms | None) -> StepNorms | None:
        """Divide norms by their scales. None if a scale was set and cannot be read."""
        if norms is None:
            return None
        scales = facts.loss_scale, facts.gradient_scale
        return self._guarded("reading the loss scale", lambda it: unscaled(it, *map(value_of, scales)), norms)

    def _of_the_step(self, facts: StepFacts, norms: StepNorms | None) -> StepNorms | None:
        """Drop norms of gradients that cover only the last micro-batch."""
        if norms is None or facts.local_gradients_note is None:
            return norms
        if self._local_norms:
            self._failures.warn("no local norms", f"{NO_LOCAL_NORMS} {facts.local_gradients_note}.")
        return replace(norms, local={}, device_local=None)

    def _warn_of_missing_norms(self, facts: StepFacts, norms: StepNorms | None) -> None:
        run = self._shows_run(facts) and facts.grad_norm is None and not self._grad_norm_is_told
        state = self._shows_state(facts) and self._norms_of_state
        if self.expects_norms and norms is None and facts.measured is None and (run or state):
            self._failures.warn("no norms", f"Step {facts.step} has no norms: {NOT_RECORDED}")
        if run and norms is not None and not norms.gradient_is_here:
            self._failures.warn("no grad-norm", NOT_HERE)

    def _shows_run(self, facts: StepFacts) -> bool:
        return self._every > 0 and facts.step % self._every == 0

    def _shows_state(self, facts: StepFacts) -> bool:
        return self._state_every > 0 and facts.step % self._state_every == 0

    def _run_scalars(self, facts: StepFacts, norms: StepNorms | None) -> list[Scalar]:
        if not self._shows_run(facts):
            return []
        rates = self._run_meter.rates(facts.ended)
        return self._guarded("reading what training reports", lambda run: run.of(facts, norms, rates), self._run) or []

    def _state_scalars(self, facts: StepFacts, norms: StepNorms | None) -> list[Scalar]:
        if not self._shows_state(facts):
            return []
        throughput = self._state_meter.rates(facts.ended).throughput
        return self._guarded("reading the state of training", lambda it: it.of(facts, norms, throughput), self._state) or []

    def _show(self, facts: StepFacts, norms: StepNorms | None, run: list[Scalar], state: list[Scalar], last: float) -> None:
        local, skipped = (norms.local, norms.skipped) if norms is not None else ({}, False)
        reasons = self._log.reasons(facts.step, [*run, *state], local, skipped=skipped)
        if run or reasons:
            self._log.run(facts.step, _to(LOG, run), facts.ended - last, reasons)
        self._log.state(_to(LOG, state))
        if self._events is not None:
            self._guarded("writing to TensorBoard", lambda events: events.scalars(_to(TENSORBOARD, run + state)), self._events)

    def _show_load(self, counts: ExpertCounts, facts: StepFacts) -> None:
        tokens = counts.read(facts)
        self._log.load(facts.step, tokens)
        if self._events is not None:
            self._events.scalars(load_scalars(facts.step, tokens))

    def flush(self) -> None:
        """Write buffered events."""
        if self._events is not None:
            self._guarded("writing to TensorBoard", EventWriter.flush, self._events)

    def close(self) -> None:
        """Write buffered events and close every file."""
        if self._events is not None:
            self._guarded("closing the file for TensorBoard", EventWriter.close, self._events)
        if self._counts is not None:
            self._guarded("closing the counts of experts", ExpertCounts.close, self._counts)

    def _guarded(self, where: str, call: Callable[[T], R], on: T) -> R | None:
        try:
            return call(on)
        except EarlierFailure as failure:
            self._failures.defer_error(failure)
        except Exception as error:
            self._failures.report(where, error)
        return None


def _to(destination: str, scalars: Sequence[Scalar]) -> list[Scalar]:
    return [one for one in scalars if destination in one.where]


# --- The thread that shows metrics: training passes the facts of a step to it and continues.

MOST_QUEUED: Final = 4096
"""Steps that may wait to be shown; further steps are dropped and counted."""

FLUSH_SECONDS: Final = 10.0
"""Buffered events are written when nothing has arrived for this long."""

CLOSE_SECONDS: Final = 30.0

Task = Callable[[], object]


class MetricsWriter:
    """Takes facts from training and norms from a recording, joins them and shows them on its own thread.

    The queue has no lock that a forked process or a signal handler could find held. The thread is a daemon: call ``close`` to
    make sure that everything is written.
    """

    signal_seconds = 2.0

    def __init__(self, reporting: Reporting, failures: Failures) -> None:
        self._reporting = reporting
        self._failures = failures
        self._joiner = StepJoiner(reporting.step)
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"monitor-training-rank{failures.rank}", daemon=True)
        self._started = threading.Lock()
        self._closing = threading.Lock()
        self._adopted = self._expects_norms = self._abandoned = False
        self._born = PROCESS.forks

    @property
    def inert(self) -> bool:
        """Whether this is a copy in a forked process, which has no thread and writes nothing."""
        return self._born != PROCESS.forks

    def texts(self, texts: Mapping[str, str]) -> None:
        """Show the configuration of the run."""
        self._put(lambda: self._reporting.texts(texts))

    def facts(self, facts: StepFacts) -> None:
        """Add the facts of a step from the training loop. Does not wait."""
        if not self._adopted:
            # Adopted here and not earlier: at exit the recording that norms come from is closed first, and it exists by now.
            self._adopted = True
            PROCESS.adopt(self)
            PROCESS.watch_signals(self._failures)
        if self._queue.qsize() > MOST_QUEUED:
            said = "Training metrics are written too slowly: some steps are not shown."
            self._failures.warn("training metrics dropped", said)
        else:
            self._put(lambda: self._joiner.facts(facts))

    def norms(self, step: int, norms: StepNorms | None) -> None:
        """Add the norms of a recorded step; None if the step is lost. May be called from any thread."""
        self._put(lambda: self._joiner.norms(step, norms))

    def flush(self, seconds: float) -> bool:
        """Write everything that was queued, as far as its norms have arrived. Whether that was done within ``seconds``."""
        return self.ask_flush().wait(seconds)

    def ask_flush(self) -> Ticket:
        """``flush`` without waiting. Reentrant."""
        ticket = Ticket()
        if not self._started.locked() or self.inert:
            ticket.settle(True)
        else:
            self._queue.put(lambda: self._flush(ticket))
        return ticket

    def _flush(self, ticket: Ticket) -> None:
        self._reporting.flush()
        ticket.settle(True)

    def flush_without_writer(self) -> Ticket:
        """Refuse: without its thread nothing can be written."""
        ticket = Ticket()
        ticket.settle(False)
        return ticket

    def begin_close(self) -> None:
        """Nothing to do: norms may still arrive."""

    def close(self) -> bool:
        """Show what is left, and return whether that was done within ``CLOSE_SECONDS``. May be called repeatedly."""
        if self.inert or not self._started.locked():
            return True
        self._retire()
        self._thread.join(CLOSE_SECONDS)
        PROCESS.forget(self)
        return not self._thread.is_alive()

    def expect_norms(self) -> None:
        """Expect norms from a recording, until ``no_more_norms``."""
        self._expects_norms = self._reporting.expects_norms = True

    def no_more_norms(self) -> None:
        """The recording has ended."""
        self._expects_norms = False
        if self._abandoned:
            self._retire()

    def abandon(self) -> None:
        """The ``TrainingMetrics`` object is gone, so no more facts will come. Norms of the last steps may still arrive."""
        self._abandoned = True
        if not self._expects_norms:
            self._retire()

    def _retire(self) -> None:
        if not self.inert and self._closing.acquire(blocking=False):
            self._queue.put(None)

    def _put(self, task: Task) -> None:
        if self.inert or self._closing.locked():
            return
        self._queue.put(task)
        if self._started.acquire(blocking=False):
            self._thread.start()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._failures.guarded("showing training metrics", task)()
        self._joiner.pass_on_all()
        self._reporting.close()

    def _next(self) -> Task | None:
        try:
            return self._queue.get(timeout=FLUSH_SECONDS)
        except Empty:
            return self._reporting.flush
