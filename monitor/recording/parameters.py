"""Collectors around an optimizer's step: weights, optimizer moments, and the relative size of the update."""

from __future__ import annotations

from math import prod
from typing import Any, Protocol, final

from monitor.recording.attachment_spec import Attached
from monitor.recording.parameter_series import ComputedRow, NamedParameter
from monitor.recording.phases import Collector, OptimizerTurn
from monitor.series import MOMENT_KINDS
from monitor.stats.partials import COUNT, SUM, SUMSQ


@final
class WeightCollector(Collector):
    """``param_origin`` and ``param_updated``: weights before and after the step; master weights if the optimizer has them."""

    def __init__(self, attached: Attached) -> None:
        self._origin = attached.series("param_origin")
        self._updated = attached.series("param_updated")
        self._framework = attached.framework

    def before_step(self, turn: OptimizerTurn) -> None:
        self._origin.record_all(self._framework.weight, turn.held)

    def after_step(self, turn: OptimizerTurn) -> None:
        self._updated.record_all(self._framework.weight, turn.held)


@final
class MomentCollector(Collector):
    """``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq``, read before the step: a new optimizer has none in its first step."""

    def __init__(self, attached: Attached) -> None:
        self._series = {kind: attached.series(kind) for kind in MOMENT_KINDS}
        self._framework = attached.framework
        self._note = attached.note
        self._noted = 0

    def before_step(self, turn: OptimizerTurn) -> None:
        """Record the moments of the optimizer that is about to step."""
        stepped = self._framework.held(turn.optimizer)
        for kind, series in self._series.items():

            def moment(parameter: NamedParameter, kind: str = kind) -> Any:
                if stepped is not None and id(parameter.tensor) not in stepped:
                    return None  # frozen: its state is from earlier steps
                return self._framework.moment(kind, parameter, turn.optimizer)

            series.record_all(moment, turn.held)
        self._note_absences()

    def _note_absences(self) -> None:
        """Note in the manifest which optimizer state has no rows, because it is not a moment of one parameter."""
        absent = self._framework.unusable_state
        if len(absent) > self._noted:
            self._noted = len(absent)
            self._note("optimizer_state", "; ".join(absent))


# --- ``update_ratio``: the change of a weight in a step, relative to the weight.
#
# Rounding may leave a weight unchanged although its update is large. So the weights themselves are compared: a copy of the
# recorded weights is kept from before the step until after it.


class WeightCopies(Protocol):
    """Copies weights of a framework, and compares them."""

    def usable(self, weight: Any) -> Any:
        """The part of a weight that can be compared on this rank; None if there is none."""

    def copy(self, usable: Any) -> Any:
        """A copy for the comparison."""

    def squares(self, after: Any, before: Any) -> tuple[Any, Any] | None:
        """The squares of the norms of the update and of the weight before it; None if the copy does not fit the weight."""


@final
class RatioCollector(Collector):
    """Norm of the update over norm of the weight before it, for each parameter."""

    def __init__(self, attached: Attached, copies: WeightCopies) -> None:
        self._series = attached.series("update_ratio")
        self._framework = attached.framework
        self._copies = copies
        self._before: dict[NamedParameter, Any] = {}

    def before_step(self, turn: OptimizerTurn) -> None:
        self._before.clear()
        self._series.each(self._keep, turn.held)

    def after_step(self, turn: OptimizerTurn) -> None:
        try:
            self._series.record_computed(self._compared, turn.held)
        finally:
            self._before.clear()

    def end_turn(self, turn: OptimizerTurn | None) -> None:
        del turn
        self._before.clear()

    def _keep(self, parameter: NamedParameter) -> None:
        usable = self._weight(parameter)
        if usable is not None:
            self._before[parameter] = self._copies.copy(usable)

    def _compared(self, parameter: NamedParameter) -> ComputedRow | None:
        before, weight = self._before.pop(parameter, None), self._weight(parameter)
        squares = None if before is None or weight is None else self._copies.squares(weight, before)
        if squares is None:
            return None
        return ComputedRow({COUNT: float(prod(weight.shape)), SUM: squares[0], SUMSQ: squares[1]}, weight)

    def _weight(self, parameter: NamedParameter) -> Any:
        weight = self._framework.weight(parameter)
        return None if weight is None else self._copies.usable(weight)
