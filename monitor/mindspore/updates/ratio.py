"""``update_ratio``: how much a step changes a weight, measured against the weight, of which a copy is kept for the step."""

from __future__ import annotations

from typing import Any

from monitor.capture.parameter_series import Computed, NamedParameter
from monitor.capture.updates import UpdateCollector
from monitor.capture.watched_parameters import WatchedParameters
from monitor.mindspore.features.reading import is_floating_point
from monitor.stats.mindspore_tensors import has_data
from monitor.stats.mindspore_updates import Kept, kept, squares_of_update
from monitor.stats.partials import COUNT, SUM, SUMSQ


class RatioCollector(UpdateCollector):
    """Norm of the update over norm of the weight before it, for each parameter."""

    def __init__(self, watched: WatchedParameters) -> None:
        self._series = watched.series("update_ratio")
        self._framework = watched.framework
        self._before: dict[NamedParameter, Kept] = {}

    def before_step(self, optimizer: Any) -> None:
        del optimizer
        self._before.clear()
        self._series.each(self._keep)

    def after_step(self, optimizer: Any) -> None:
        del optimizer
        try:
            self._series.record_computed(self._compared)
        finally:
            self._before.clear()

    def forget_step(self) -> None:
        self._before.clear()

    def _keep(self, parameter: NamedParameter) -> None:
        weight = self._framework.weight(parameter)
        if is_floating_point(weight) and has_data(weight) and weight.size:
            self._before[parameter] = kept(weight)

    def _compared(self, parameter: NamedParameter) -> Computed | None:
        before, weight = self._before.pop(parameter, None), self._framework.weight(parameter)
        if before is None or tuple(before.shape) != tuple(weight.shape):
            return None
        update, squares = squares_of_update(weight, before)
        return Computed({COUNT: float(weight.size), SUM: update, SUMSQ: squares}, weight)
