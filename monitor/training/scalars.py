"""Computes the scalars of a step and their destinations from its facts and norms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Final, Literal

from monitor.failures import Failures
from monitor.training.config import DESTINATIONS, LOG, TrainingConfig
from monitor.training.step import Number, StepFacts, StepNorms, read

# --- Throughput, in the units that users know.

SECONDS_PER_DAY: Final = 86_400
BILLION: Final = 1e9
TERA: Final = 1e12


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates over the steps since the last call of ``rates``.

    Attributes:
        iteration_time: Seconds a step, including the time between steps.
        throughput: Samples a second and device; None if the number of samples is unknown.
        model_tflops: 10^12 floating point operations of the model a second, on this device; None if they are unknown.
        samples_per_day: 10^9 samples a day, on all devices.
    """

    iteration_time: float
    throughput: float | None = None
    model_tflops: float | None = None
    samples_per_day: float | None = None


class ThroughputMeter:
    """Accumulates steps and computes their rates on request.

    Args:
        devices: The number of devices that share the samples.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._last: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._steps, self._samples, self._flops, self._unknown = 0, 0, 0.0, False

    def begin(self, at: float) -> None:
        """The first step began, on the same clock as the ends of steps. Later calls have no effect."""
        self._last = at if self._last is None else self._last

    def add(self, samples: int | None, flops: float | None) -> None:
        """Add a step that has ended."""
        self._steps += 1
        self._unknown |= samples is None
        self._samples += samples or 0
        self._flops += flops or 0.0

    def rates(self, now: float) -> Rates:
        """Rates of the steps added since the last call. The latest of them ended at ``now``."""
        seconds, self._last = now - (now if self._last is None else self._last), now
        steps, samples, flops, unknown = self._steps, self._samples, self._flops, self._unknown
        self._forget()
        known = seconds > 0 and not unknown and samples
        throughput = samples / seconds / self._devices if known else None
        return Rates(
            seconds / max(steps, 1),
            throughput,
            flops / seconds / TERA if flops and seconds > 0 else None,
            None if throughput is None else throughput * self._devices * SECONDS_PER_DAY / BILLION,
        )


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number.

    Attributes:
        tag: The metric's name, followed by a slash and its object if it has several.
        x: The step, counted from 1.
        where: Its destinations.
        samples: The number of samples seen so far, if the scalar is shown against samples too.
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
    """The metrics of the run as a whole (``MFLossMonitor``). Metrics without a value are left out."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        board = config.tensorboard
        self._everywhere = config.shown(DESTINATIONS)
        self._scale = self._everywhere if board and board.log_loss_scale_to_tensorboard else frozenset({LOG})
        self._timers = self._everywhere if board and board.log_timers_to_tensorboard else frozenset({LOG})

    def of(self, facts: StepFacts, norms: StepNorms | None, rates: Rates) -> list[Scalar]:
        """The scalars of one step."""
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
    """The metrics of ``monitor_config`` (``TrainingStateMonitor``). Metrics without a value are left out."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        section = config.monitor_config
        self._patterns = [re.compile(pattern) for pattern in section.target]
        self._invert = section.invert
        self._chosen_names: dict[str, bool] = {}

    def chooses(self, name: str) -> bool:
        """Whether ``target`` selects a parameter."""
        chosen = self._chosen_names.get(name)
        if chosen is None:
            chosen = self._chosen_names[name] = any(pattern.search(name) for pattern in self._patterns) != self._invert
        return chosen

    def of(self, facts: StepFacts, norms: StepNorms | None, throughput: float | None) -> list[Scalar]:
        """The scalars of one step."""
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
        # They are read before the optimizer steps, so they belong to the previous step.
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


# --- Floating point operations that a step of this rank's model takes: given, or counted once.

MEASURED: Final = "measure"
Given = float | Literal["measure"] | None

NOTHING_COUNTED: Final = "No floating point operations were counted in the first step: pass model_flops as a number."


class NoCounterError(Exception):
    """The floating point operations of this model cannot be counted. The message says why, and what to do."""


Counter = Callable[[Any], AbstractContextManager[Callable[[], float]]]


class FlopCount:
    """Counts the operations of the first step, if the number was not given.

    Attributes:
        per_step: None while the number is not known.

    Args:
        given: The number; ``"measure"`` to count; None for neither.
        counter: Creates, for a model, a context that counts while it is entered.

    Raises:
        NoCounterError: From ``counter``, if the framework cannot count.
    """

    def __init__(self, given: Given, counter: Counter, failures: Failures) -> None:
        self.per_step = None if isinstance(given, str) else given
        self._wanted = given == MEASURED
        self._counter = counter
        self._failures = failures
        self._entered = ExitStack()
        self._counted: Callable[[], float] | None = None
        self._so_far = 0.0

    def begin(self, model: Any) -> None:
        """Start counting: at the beginning of the first step, or of a part of it."""
        if not self._wanted or self._counted is not None:
            return
        try:
            self._counted = self._entered.enter_context(self._counter(model))
        except NoCounterError as error:
            self._wanted = False
            self._failures.warn("flops", str(error))

    def pause(self) -> None:
        """Stop counting, after the computation has returned or raised. May be repeated."""
        counted, self._counted = self._counted, None
        self._entered.close()
        if counted is not None:
            self._so_far += counted()

    def discard(self) -> None:
        """The computation has raised: discard its count, and count the next step."""
        self.pause()
        self._so_far = 0.0

    def end(self) -> None:
        """The step has ended: keep its count. May be repeated."""
        self.pause()
        if not self._wanted:
            return
        self._wanted = False
        self.per_step = self._so_far or None
        if self.per_step is None:
            self._failures.warn("flops", NOTHING_COUNTED)
