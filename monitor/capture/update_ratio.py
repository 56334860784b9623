"""``update_ratio``: how much a step changes a weight, measured against the weight.

A rounded weight may not change at all, however large the update that was asked for. So the weights themselves are compared,
and for that a copy of those that are watched is kept from before the step until after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any

from monitor.capture.optimizer_turns import Stepping
from monitor.capture.parameter_series import Computed, NamedParameter
from monitor.capture.updates import UpdateCollector
from monitor.capture.watched_parameters import WatchedParameters
from monitor.stats.partials import COUNT, SUM, SUMSQ


class RatioCollector(UpdateCollector, ABC):
    """Norm of the update over norm of the weight before it, for each parameter."""

    def __init__(self, watched: WatchedParameters) -> None:
        self._series = watched.series("update_ratio")
        self._framework = watched.framework
        self._before: dict[NamedParameter, Any] = {}

    def before_step(self, stepping: Stepping) -> None:
        self._before.clear()
        self._series.each(self._keep, stepping.held)

    def after_step(self, stepping: Stepping) -> None:
        try:
            self._series.record_computed(self._compared, stepping.held)
        finally:
            self._before.clear()

    def forget_step(self) -> None:
        self._before.clear()

    @abstractmethod
    def _usable(self, weight: Any) -> Any:
        """What can be compared of a weight, on this rank; None if nothing."""

    @abstractmethod
    def _copy(self, usable: Any) -> Any:
        """A copy to compare with."""

    @abstractmethod
    def _squares(self, after: Any, before: Any) -> tuple[Any, Any] | None:
        """The squares of the norms of the update and of the weight before it; None where the copy is of something else."""

    def _keep(self, parameter: NamedParameter) -> None:
        usable = self._weight(parameter)
        if usable is not None:
            self._before[parameter] = self._copy(usable)

    def _compared(self, parameter: NamedParameter) -> Computed | None:
        before, weight = self._before.pop(parameter, None), self._weight(parameter)
        squares = None if before is None or weight is None else self._squares(weight, before)
        if squares is None:
            return None
        return Computed({COUNT: float(prod(weight.shape)), SUM: squares[0], SUMSQ: squares[1]}, weight)

    def _weight(self, parameter: NamedParameter) -> Any:
        weight = self._framework.weight(parameter)
        return None if weight is None else self._usable(weight)
