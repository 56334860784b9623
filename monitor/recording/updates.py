"""Collectors that compare weights around an optimizer's step: ``update_ratio`` and ``optimizer_health``.

Rounding may leave a weight unchanged although its update is large. So the weights themselves are compared: a copy of the
recorded weights is kept from before the step until after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar, Final, Protocol, final

from monitor.recording.attached_model import Attached, ComputedRow, NamedParameter
from monitor.recording.phases import Collector, OptimizerTurn
from monitor.series import HEALTH_KIND
from monitor.stats.partials import COUNT, SUM, SUMSQ

WITHIN_ANOTHER: Final = (
    "An optimizer began its step before another one had ended its own, on another thread or in a hook. The first parameter of "
    "the other one is {name}: its update_ratio and optimizer_health have no rows in such steps. Step one after the other."
)


class WeightCopies(Protocol):
    """Copies weights of a framework, and compares them."""

    def usable(self, weight: Any) -> Any:
        """The part of a weight that can be compared on this rank; None if there is none."""

    def copy(self, usable: Any) -> Any:
        """A copy for the comparison."""

    def squares(self, after: Any, before: Any) -> tuple[Any, Any] | None:
        """The squares of the norms of the update and of the weight before it; None if the copy does not fit the weight."""


@final
class WeightsBefore:
    """The weights before the step of an optimizer: one copy of each for all collectors that compare it."""

    def __init__(self, attached: Attached, copies: WeightCopies) -> None:
        self.copies = copies
        self._framework, self._failures = attached.framework, attached.failures
        self._turn: OptimizerTurn | None = None
        self._users: set[str] = set()
        self._kept: dict[NamedParameter, Any] = {}

    def begin(self, turn: OptimizerTurn, user: str) -> None:
        """An optimizer is about to step. Copies of an earlier turn are dropped."""
        if turn is not self._turn:
            if first := next(iter(self._kept), None):
                self._failures.warn("steps within steps", WITHIN_ANOTHER.format(name=first.name))
            self.drop()
            self._turn = turn
        self._users.add(user)

    def keep(self, parameter: NamedParameter) -> None:
        """Copy a weight, unless another user has."""
        if parameter not in self._kept and (usable := self._usable(parameter)) is not None:
            self._kept[parameter] = self.copies.copy(usable)

    def of(self, parameter: NamedParameter) -> tuple[Any, Any] | None:
        """The weight now and its copy; None if there is none. The last user takes the copy away."""
        before = self._kept.get(parameter) if len(self._users) > 1 else self._kept.pop(parameter, None)
        weight = self._usable(parameter)
        return None if before is None or weight is None else (weight, before)

    def end(self, user: str) -> None:
        """A user has compared what it wants."""
        self._users.discard(user)
        if not self._users:
            self.drop()

    def drop(self) -> None:
        """Drop all copies."""
        self._turn = None
        self._users.clear()
        self._kept.clear()

    def _usable(self, parameter: NamedParameter) -> Any:
        weight = self._framework.weight(parameter)
        return None if weight is None else self.copies.usable(weight)


class _Comparing(Collector):
    """Compares each weight after the step with the weight before it."""

    kind: ClassVar[str]

    def __init__(self, attached: Attached, weights: WeightsBefore) -> None:
        self._series = attached.series(self.kind)
        self._weights = weights

    def before_step(self, turn: OptimizerTurn) -> None:
        self._weights.begin(turn, self.kind)
        self._series.each(lambda parameter: self._keep(parameter, turn), turn.held)

    def after_step(self, turn: OptimizerTurn) -> None:
        def compared(parameter: NamedParameter) -> ComputedRow | None:
            found = self._weights.of(parameter)
            return None if found is None else self._compared(parameter, turn, *found)

        try:
            self._series.record_computed(compared, turn.held)
        finally:
            self._weights.end(self.kind)

    def end_turn(self, turn: OptimizerTurn | None) -> None:
        del turn
        self._weights.drop()

    def _keep(self, parameter: NamedParameter, turn: OptimizerTurn) -> None:
        del turn
        self._weights.keep(parameter)

    def _compared(self, parameter: NamedParameter, turn: OptimizerTurn, weight: Any, before: Any) -> ComputedRow | None:
        raise NotImplementedError


@final
class RatioCollector(_Comparing):
    """Norm of the update over norm of the weight before it, for each parameter."""

    kind = "update_ratio"

    def _compared(self, parameter: NamedParameter, turn: OptimizerTurn, weight: Any, before: Any) -> ComputedRow | None:
        del parameter, turn
        squares = self._weights.copies.squares(weight, before)
        if squares is None:
            return None
        return ComputedRow({COUNT: float(prod(weight.shape)), SUM: squares[0], SUMSQ: squares[1]}, weight)


class StepReading(Protocol):
    """Reads from which gradient and moments an optimizer has computed its step."""

    def begin_step(self, turn: OptimizerTurn) -> None:
        """An optimizer is about to step."""

    def remember(self, parameter: NamedParameter, turn: OptimizerTurn) -> None:
        """Note what only shows before the step."""

    def gradient_ready(self, parameter: NamedParameter) -> None:
        """The gradient is complete, before the step."""

    def end_step(self) -> None:
        """The step has ended: drop what was noted in it."""

    def health(self, parameter: NamedParameter, turn: OptimizerTurn, weight: Any, before: Any) -> Mapping[int, Any] | None:
        """Numbers by column of partials, as ``monitor/series.py`` says; None if the parameter was not stepped or that is not
        known.
        """


@final
class HealthCollector(_Comparing):
    """``optimizer_health``: elements that rounding leaves as they are, and Adam's second moment beside the gradient."""

    kind = HEALTH_KIND

    def __init__(self, attached: Attached, weights: WeightsBefore, reading: StepReading) -> None:
        super().__init__(attached, weights)
        self._reading = reading

    def before_step(self, turn: OptimizerTurn) -> None:
        self._reading.begin_step(turn)
        super().before_step(turn)

    def gradients_ready(self, turn: OptimizerTurn) -> None:
        self._series.each(self._reading.gradient_ready, turn.held)

    def end_turn(self, turn: OptimizerTurn | None) -> None:
        super().end_turn(turn)
        self._reading.end_step()

    def _keep(self, parameter: NamedParameter, turn: OptimizerTurn) -> None:
        if parameter.tensor.requires_grad:
            self._reading.remember(parameter, turn)
            super()._keep(parameter, turn)

    def _compared(self, parameter: NamedParameter, turn: OptimizerTurn, weight: Any, before: Any) -> ComputedRow | None:
        if not parameter.tensor.requires_grad:
            return None  # its copy is that of ``update_ratio``
        numbers = self._reading.health(parameter, turn, weight, before)
        return None if numbers is None else ComputedRow({COUNT: float(prod(weight.shape)), **numbers}, weight)
