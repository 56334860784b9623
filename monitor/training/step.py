"""One training step: what the loop reports, what was read from its tensors, how both are joined, and its scalars."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from monitor.failures import Failures
from monitor.training.config import DESTINATIONS, LOG, TrainingConfig

# --- Numbers that a step reports. A device may still have to compute them.

Number = float | Callable[[], float]
"""A number, or a function that waits for it: called once, by the writer's thread, never by the training thread."""


def read(number: Number) -> float:
    """The number; waits for it if a device still computes it."""
    return number if isinstance(number, int | float) else number()


def value_of(number: Number | None) -> float | None:
    """``read`` of a number that a step may not have."""
    return None if number is None else read(number)


ATTRIBUTES: Final = ("loss", "grad_norm", "loss_scale", "learning_rate", "batch_size")
"""The attributes that a loop may set."""


class Step:
    """One step, as a training loop reports it. Its tensors have one element and may be on a device; nothing here waits for
    them.

    Its values are dropped when the step has ended, so that no tensor stays alive.

    Attributes:
        loss: As training reports it.
        grad_norm: The result of ``clip_grad_norm_``, or the norm of the whole gradient from elsewhere.
        loss_scale: The factor that the loss was multiplied by.
        learning_rate: Defaults to the learning rate of the optimizer's first group when the step began.
        batch_size: Samples of all ranks together.
    """

    def __init__(self, batch_size: int | None = None, kept: Callable[[Any], Number | None] | None = None) -> None:
        self._kept = kept
        self.loss: Any = None
        self.grad_norm: Any = None
        self.loss_scale: Any = None
        self.learning_rate: Any = None
        self.batch_size = batch_size
        self.local_losses: list[Any] = []

    @property
    def unknown(self) -> list[str]:
        """Attributes that were set on the step and that a step does not have."""
        return sorted(vars(self).keys() - {*ATTRIBUTES, "local_losses", "_kept"})

    def local_loss(self, loss: Any) -> None:
        """Add the loss of one micro-batch of this rank, from which its backward starts. Without any, ``loss`` is used."""
        self.local_losses.append(loss if self._kept is None else self._kept(loss))

    def forget(self) -> None:
        """The step has ended: drop the tensors, so that their graph is freed."""
        self.loss = self.grad_norm = self.loss_scale = self.learning_rate = None
        self.local_losses = []


# --- The facts of a step: what the training loop reports, and what was read from the recording.

Tokens = Callable[[], Sequence[int]]
"""The number of tokens that went to each expert; the call waits for the device."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts that the training thread reports when a step ends.

    Attributes:
        step: The number of steps that have ended, this one included.
        samples: Of all ranks together, in all steps so far; None if a batch size is unknown.
        batch_size: Of all ranks together, in this step.
        ended: In seconds of a monotonic clock.
        loss: As training reports it for the step.
        grad_norm: Norm of the whole gradient over all ranks, before clipping, if the loop has set it.
        local_losses: The losses of this rank, one a micro-step.
        measured: The recorded step that belongs to it; None if no step was recorded.
        flops: Floating point operations of this rank's model in the step.
        tokens: By router: the tokens of this rank that went to each expert.
        began: When the first step began, in the seconds of ``ended``.
        local_gradients_note: Why the recorded local gradients do not cover all micro-batches of the step; None if they do.
        gradient_scale: The factor on the gradients that the optimizer was given, if the optimizer divides by it.
    """

    step: int
    ended: float
    samples: int | None = None
    batch_size: int | None = None
    loss: Number | None = None
    grad_norm: Number | None = None
    loss_scale: Number | None = None
    learning_rate: Number | None = None
    local_losses: tuple[Number, ...] = ()
    measured: int | None = None
    flops: float | None = None
    tokens: Mapping[str, Tokens] = field(default_factory=dict)
    began: float | None = None
    gradient_scale: Number | None = None
    local_gradients_note: str | None = None


@dataclass(frozen=True, slots=True)
class StepNorms:
    """Norms that were read from the recording of a step. A norm that could not be read correctly is absent.

    Attributes:
        step: The number of the recorded step, counted from 0.
        local: Norm of each parameter's gradient on this rank, before ranks aggregate them.
        device_local: Norm of all of these gradients as one vector.
        first_moments: Norm of each parameter's first moment, after the previous step.
        second_moments: The same for the second.
        weight: Norm of all weights as one vector, after this step.
        gradient: Norm of all gradients as one vector, over all ranks, as the optimizer was given them.
        gradient_is_here: Whether this rank is known to have the whole gradient.
        loss_scale: The factor that the loss was multiplied by, if any.
        skipped: Whether the optimizer skipped the step.
    """

    step: int
    local: Mapping[str, float] = field(default_factory=dict)
    device_local: float | None = None
    first_moments: Mapping[str, float] = field(default_factory=dict)
    second_moments: Mapping[str, float] = field(default_factory=dict)
    weight: float | None = None
    gradient: float | None = None
    gradient_is_here: bool = True
    loss_scale: float | None = None
    skipped: bool = False


# --- Join the two halves of a step, which come from two threads: the loop's facts and the recording's norms.

MOST_WAITING: Final = 64
"""Steps that may wait for their norms. If more are waiting, the recording's writer has dropped some."""

Whole = Callable[[StepFacts, StepNorms | None], None]


class StepJoiner:
    """Passes on the facts of each step in order, together with its norms as soon as these are there.

    Norms arrive in the order of their steps. So norms of a later step show that those of an earlier step are lost.

    Args:
        whole: Called with the facts of a step, and its norms if it has any.
    """

    def __init__(self, whole: Whole) -> None:
        self._whole = whole
        self._waiting: deque[StepFacts] = deque()
        self._norms: dict[int, StepNorms | None] = {}
        self._newest = -1

    def facts(self, facts: StepFacts) -> None:
        """Add the facts of a step."""
        self._waiting.append(facts)
        self._settle()

    def norms(self, step: int, norms: StepNorms | None) -> None:
        """Add the norms of a recorded step; None if the step is lost."""
        self._norms[step] = norms
        self._newest = max(self._newest, step)
        while len(self._norms) > MOST_WAITING:  # the loop reports no facts
            del self._norms[next(iter(self._norms))]
        self._settle()

    def pass_on_all(self) -> None:
        """Pass on all waiting steps: no more norms will come."""
        while self._waiting:
            self._pass_on(self._waiting.popleft())

    def _settle(self) -> None:
        while self._waiting and (len(self._waiting) > MOST_WAITING or self._is_whole(self._waiting[0])):
            self._pass_on(self._waiting.popleft())

    def _is_whole(self, facts: StepFacts) -> bool:
        return facts.measured is None or facts.measured in self._norms or facts.measured < self._newest

    def _pass_on(self, facts: StepFacts) -> None:
        norms = None if facts.measured is None else self._norms.get(facts.measured)
        if facts.measured is not None:
            self._norms = {step: one for step, one in self._norms.items() if step > facts.measured}
        self._whole(facts, norms)


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


# --- The scalars of a step and their destinations, from its facts and norms.


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


PER_PARAMETER: Final = {"local_norm_format": "local_norm", "optimizer_state_format": "adam_m_norm and adam_v_norm"}
"""Fields of ``monitor_config``, and their metrics of the parameters that ``target`` selects."""


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
