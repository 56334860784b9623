"""Collectors that measure the update of an optimizer's step: the common parts, and ``update_ratio``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import prod
from typing import Any

from monitor.config import MonitorConfig
from monitor.recording.optimizer_turns import OptimizerTurn
from monitor.recording.parameter_series import ComputedRow, NamedParameter
from monitor.recording.parameters import ParameterContext
from monitor.stats.partials import COUNT, SUM, SUMSQ


class UpdateCollector:
    """Base of collectors of updates. Subclasses override the phases of a step that they need, in this order."""

    def before_step(self, stepping: OptimizerTurn) -> None:
        """An optimizer is about to step."""

    def gradients_ready(self, stepping: OptimizerTurn) -> None:
        """The gradients are complete, before the step; called after every backward of a closure."""

    def after_step(self, stepping: OptimizerTurn) -> None:
        """The optimizer has stepped."""

    def forget_step(self) -> None:
        """The step was skipped or has ended."""


class Updates:
    """The configured collectors of updates."""

    def __init__(self, *collectors: UpdateCollector) -> None:
        self._collectors = collectors

    def before_step(self, stepping: OptimizerTurn) -> None:
        for one in self._collectors:
            one.before_step(stepping)

    def gradients_ready(self, stepping: OptimizerTurn) -> None:
        for one in self._collectors if stepping.optimizer is not None else ():
            one.gradients_ready(stepping)

    def after_step(self, stepping: OptimizerTurn) -> None:
        for one in self._collectors:
            one.after_step(stepping)

    def forget_step(self) -> None:
        """Drop the data of the step that has ended."""
        for one in self._collectors:
            one.forget_step()


Collecting = Callable[[ParameterContext], UpdateCollector]


def wanted(
    config: MonitorConfig,
    watched: ParameterContext,
    *,
    ratio: Collecting,
    direction: Collecting,
    adam: Callable[[ParameterContext, float], UpdateCollector],
) -> Updates:
    """Create the configured collectors, from a framework's own classes."""
    collectors: list[UpdateCollector] = []
    if config.update_ratio:
        collectors.append(ratio(watched))
    if config.mg_direction:
        collectors.append(direction(watched))
    if config.ur_distribution:
        collectors.append(adam(watched, config.eps))
    return Updates(*collectors)


# --- ``update_ratio``: the change of a weight in a step, relative to the weight.
#
# Rounding may leave a weight unchanged although its update is large. So the weights themselves are compared: a copy of the
# recorded weights is kept from before the step until after it.


class RatioCollector(UpdateCollector, ABC):
    """Norm of the update over norm of the weight before it, for each parameter."""

    def __init__(self, watched: ParameterContext) -> None:
        self._series = watched.series("update_ratio")
        self._framework = watched.framework
        self._before: dict[NamedParameter, Any] = {}

    def before_step(self, stepping: OptimizerTurn) -> None:
        self._before.clear()
        self._series.each(self._keep, stepping.held)

    def after_step(self, stepping: OptimizerTurn) -> None:
        try:
            self._series.record_computed(self._compared, stepping.held)
        finally:
            self._before.clear()

    def forget_step(self) -> None:
        self._before.clear()

    @abstractmethod
    def _usable(self, weight: Any) -> Any:
        """The part of a weight that can be compared on this rank; None if there is none."""

    @abstractmethod
    def _copy(self, usable: Any) -> Any:
        """A copy for the comparison."""

    @abstractmethod
    def _squares(self, after: Any, before: Any) -> tuple[Any, Any] | None:
        """The squares of the norms of the update and of the weight before it; None if the copy does not fit the weight."""

    def _keep(self, parameter: NamedParameter) -> None:
        usable = self._weight(parameter)
        if usable is not None:
            self._before[parameter] = self._copy(usable)

    def _compared(self, parameter: NamedParameter) -> ComputedRow | None:
        before, weight = self._before.pop(parameter, None), self._weight(parameter)
        squares = None if before is None or weight is None else self._squares(weight, before)
        if squares is None:
            return None
        return ComputedRow({COUNT: float(prod(weight.shape)), SUM: squares[0], SUMSQ: squares[1]}, weight)

    def _weight(self, parameter: NamedParameter) -> Any:
        weight = self._framework.weight(parameter)
        return None if weight is None else self._usable(weight)
