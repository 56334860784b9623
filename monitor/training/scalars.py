"""From what is known of a step to the scalars that are shown of it, and where."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from monitor.training.facts import StepFacts, StepNorms
from monitor.training.model import DESTINATIONS, LOG, TrainingConfig
from monitor.training.numbers import Number, read
from monitor.training.rates import Rates


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number.

    Attributes:
        tag: The metric's name, and behind a slash what it is of, if it has several.
        x: The step that it is of, counted from 1.
        where: Its destinations.
        samples: How many had been seen by then, where it is shown against those as well.
    """

    tag: str
    value: float
    x: int
    where: frozenset[str]
    samples: int | None = None

    @property
    def metric(self) -> str:
        return self.tag.partition("/")[0]


class RunScalars:
    """The metrics of the run as a whole, ``MFLossMonitor``'s. Those that have no value are left out."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        board = config.tensorboard
        self._everywhere = config.shown(DESTINATIONS)
        self._scale = self._everywhere if board and board.log_loss_scale_to_tensorboard else frozenset({LOG})
        self._timers = self._everywhere if board and board.log_timers_to_tensorboard else frozenset({LOG})

    def of(self, facts: StepFacts, norms: StepNorms | None, rates: Rates) -> list[Scalar]:
        """Those of one step."""
        read_from_rows = norms or StepNorms(facts.step)
        grad_norm = read_from_rows.gradient if facts.grad_norm is None else facts.grad_norm
        loss_scale = read_from_rows.loss_scale if facts.loss_scale is None else facts.loss_scale
        both: tuple[tuple[str, Number | None, frozenset[str]], ...] = (
            ("loss", facts.loss, self._everywhere),
            ("learning-rate", facts.learning_rate, self._everywhere),
            ("batch-size", facts.batch_size, self._everywhere),
            ("loss-scale", loss_scale, self._scale),
            ("grad-norm", grad_norm, self._everywhere),
            ("iteration-time", rates.iteration_time, self._timers),
            ("throughput", rates.throughput, self._timers),
        )
        alone = (
            ("model-flops-throughput-per-npu", rates.model_tflops, self._everywhere),
            ("B-samples-per-day", rates.samples_per_day, self._timers),
        )
        against = [
            Scalar(tag, read(value), facts.step, where, facts.samples) for tag, value, where in both if value is not None
        ]
        return against + [Scalar(tag, value, facts.step, where) for tag, value, where in alone if value is not None]


class StateScalars:
    """The metrics of ``monitor_config``, ``TrainingStateMonitor``'s. Those that have no value are left out."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        section = config.monitor_config
        self._patterns = [re.compile(pattern) for pattern in section.target]
        self._invert = section.invert
        self._chosen_names: dict[str, bool] = {}

    def chooses(self, name: str) -> bool:
        """Whether ``target`` asks for a parameter."""
        chosen = self._chosen_names.get(name)
        if chosen is None:
            chosen = self._chosen_names[name] = any(pattern.search(name) for pattern in self._patterns) != self._invert
        return chosen

    def of(self, facts: StepFacts, norms: StepNorms | None, throughput: float | None) -> list[Scalar]:
        """Those of one step."""
        found = [*self._losses(facts), *self._linearity(facts, throughput)]
        return found if norms is None else [*found, *self._norms(facts.step, norms)]

    def _losses(self, facts: StepFacts) -> Iterator[Scalar]:
        local, total = self._config.wants("local_loss_format"), self._config.wants("device_local_loss_format")
        if not (local or total) or not facts.local_losses:
            return
        losses = [read(loss) for loss in facts.local_losses]
        several = len(losses) > 1
        for micro_step, loss in enumerate(losses if local else ()):
            yield Scalar(f"local_loss/micro_step_{micro_step}" if several else "local_loss", loss, facts.step, local)
        if total:
            yield Scalar("device_accum_local_loss", sum(losses), facts.step, total)

    def _linearity(self, facts: StepFacts, throughput: float | None) -> Iterator[Scalar]:
        baseline = self._config.baseline
        if throughput is not None and baseline == baseline:
            yield Scalar("throughput_linearity", throughput / baseline, facts.step, self._config.shown(DESTINATIONS))

    def _norms(self, step: int, norms: StepNorms) -> Iterator[Scalar]:
        state = self._config.wants("optimizer_state_format")
        yield from self._chosen("local_norm", norms.local, step, self._config.wants("local_norm_format"))
        yield from _one("device_local_norm", norms.device_local, step, self._config.wants("device_local_norm_format"))
        # They are read before the optimizer steps: what they are is what the step before has left.
        yield from self._chosen("adam_m_norm", norms.first_moments, step - 1, state)
        yield from self._chosen("adam_v_norm", norms.second_moments, step - 1, state)
        yield from _one("weight_norm", norms.weight, step, self._config.wants("weight_state_format"))

    def _chosen(self, metric: str, values: Mapping[str, float], x: int, where: frozenset[str]) -> Iterator[Scalar]:
        for name, value in values.items() if where else ():
            if self.chooses(name):
                yield Scalar(f"{metric}/{name}", value, x, where)


def _one(metric: str, value: float | None, x: int, where: frozenset[str]) -> Iterator[Scalar]:
    if where and value is not None:
        yield Scalar(metric, value, x, where)
