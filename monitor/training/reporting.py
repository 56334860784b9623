"""What is shown of a step, put together on the writer's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from monitor.failures import EarlierFailure, Failures
from monitor.training.events import EventWriter
from monitor.training.expert_load import ExpertCounts, load_scalars
from monitor.training.facts import StepFacts, StepNorms
from monitor.training.log import LogWriter
from monitor.training.model import LOG, TENSORBOARD, TrainingConfig
from monitor.training.rates import Pace
from monitor.training.scalars import RunScalars, Scalar, StateScalars

T = TypeVar("T")
R = TypeVar("R")


class Reporting:
    """Shows each step in the places that the configuration asks for. What fails is said once and counted; the rest goes on.

    Args:
        devices: Of the job.
        begun: When the first step began, in the seconds in which facts tell of ends.
        events: None where nothing goes to TensorBoard.
        counts: Keeps what went to each expert; None where that is not caught.
    """

    def __init__(
        self,
        config: TrainingConfig,
        devices: int,
        begun: float,
        log: LogWriter,
        events: EventWriter | None,
        counts: ExpertCounts | None,
        failures: Failures,
    ) -> None:
        run = config.callbacks.MFLossMonitor
        self._every = run.per_print_times if run is not None else 0
        self._state_every = config.monitor_config.step_interval if config.monitor_config.monitor_on else 0
        self._run, self._state = RunScalars(config), StateScalars(config)
        self._run_pace, self._state_pace = Pace(devices, begun), Pace(devices, begun)
        self._last = begun
        self._log, self._events, self._counts = log, events, counts
        self._failures = failures

    def texts(self, texts: Mapping[str, str]) -> None:
        """The configuration of the run."""
        if self._events is not None:
            self._guarded("writing the configuration to TensorBoard", lambda events: events.texts(texts), self._events)

    def step(self, facts: StepFacts, norms: StepNorms | None) -> None:
        """One step, with its norms if there are any."""
        for pace in (self._run_pace, self._state_pace):
            pace.add(facts.batch_size, facts.flops)
        run, state = self._run_scalars(facts, norms), self._state_scalars(facts, norms)
        self._show(facts, norms, run, state)
        self._last = facts.ended
        if self._counts is not None and facts.tokens:
            self._guarded("counting what went to each expert", lambda counts: self._show_load(counts, facts), self._counts)

    def _run_scalars(self, facts: StepFacts, norms: StepNorms | None) -> list[Scalar]:
        if not self._every or facts.step % self._every:
            return []
        rates = self._run_pace.rates(facts.ended)
        return self._guarded("reading what training reports", lambda run: run.of(facts, norms, rates), self._run) or []

    def _state_scalars(self, facts: StepFacts, norms: StepNorms | None) -> list[Scalar]:
        if not self._state_every or facts.step % self._state_every:
            return []
        throughput = self._state_pace.rates(facts.ended).throughput
        return self._guarded("reading the state of training", lambda it: it.of(facts, norms, throughput), self._state) or []

    def _show(self, facts: StepFacts, norms: StepNorms | None, run: list[Scalar], state: list[Scalar]) -> None:
        local, skipped = (norms.local, norms.skipped) if norms is not None else ({}, False)
        reasons = self._log.reasons(facts.step, [*run, *state], local, skipped=skipped)
        if run or reasons:
            self._log.run(facts.step, _to(LOG, run), facts.ended - self._last, reasons)
        self._log.state(_to(LOG, state))
        if self._events is not None:
            self._guarded("writing to TensorBoard", lambda events: events.scalars(_to(TENSORBOARD, run + state)), self._events)

    def _show_load(self, counts: ExpertCounts, facts: StepFacts) -> None:
        tokens = counts.read(facts)
        if self._events is not None:
            self._events.scalars(load_scalars(facts.step, tokens))

    def flush(self) -> None:
        """Write what is held."""
        if self._events is not None:
            self._guarded("writing to TensorBoard", EventWriter.flush, self._events)

    def close(self) -> None:
        """Write what is held and let go of every file."""
        if self._events is not None:
            self._guarded("closing the file for TensorBoard", EventWriter.close, self._events)
        if self._counts is not None:
            self._guarded("closing the counts of experts", ExpertCounts.close, self._counts)

    def _guarded(self, where: str, call: Callable[[T], R], on: T) -> R | None:
        try:
            return call(on)
        except EarlierFailure as failure:
            self._failures.owe(failure)
        except Exception as error:
            self._failures.report(where, error)
        return None


def _to(destination: str, scalars: Sequence[Scalar]) -> list[Scalar]:
    return [one for one in scalars if destination in one.where]
