"""``mg_direction``: how much of a gradient points where the momentum does."""

from __future__ import annotations

from typing import Any

from monitor.mindspore.features.reading import is_floating_point
from monitor.recording.optimizer_turns import Stepping
from monitor.recording.parameter_series import Computed, NamedParameter
from monitor.recording.parameters import WatchedParameters
from monitor.recording.updates import UpdateCollector
from monitor.series import DIRECTION_KIND
from monitor.stats.mindspore.tensors import has_data
from monitor.stats.mindspore.updates import agreement
from monitor.stats.partials import COUNT, SUM


class DirectionCollector(UpdateCollector):
    """Compares the gradient that the optimizer is given with the momentum before the step.

    In the first step of an optimizer there is none before, and after it the momentum is a multiple of the gradient: they agree.
    """

    def __init__(self, watched: WatchedParameters) -> None:
        self._series = watched.series(DIRECTION_KIND)
        self._framework = watched.framework
        self._is_reduced = watched.is_reduced

    def gradients_ready(self, stepping: Stepping) -> None:
        self._series.record_computed(lambda parameter: self._compared(parameter, stepping.optimizer), stepping.held)

    def _compared(self, parameter: NamedParameter, optimizer: Any) -> Computed | None:
        gradient = self._framework.reduced(parameter)
        if not self._is_reduced(parameter, gradient):
            return None
        if not is_floating_point(gradient) or not has_data(gradient) or not gradient.size:
            return None
        if not self._framework.keeps("exp_avg", parameter):
            return None
        momentum = self._framework.moment("exp_avg", parameter, optimizer)
        if momentum is None:
            momentum = gradient
        if tuple(momentum.shape) != tuple(gradient.shape):
            return None
        uphill = self._framework.maximizes(parameter)
        agreeing = agreement(gradient, momentum, uphill=uphill and momentum is not gradient)
        return Computed({COUNT: float(gradient.size), SUM: agreeing}, gradient)
