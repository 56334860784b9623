"""``update_ratio``: how much a step changes a weight, measured against the weight.

A rounded weight may not change at all, however large the update that was asked for. So the weights themselves are compared,
and for that a copy of those that are watched is kept from before the step until after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monitor.capture.parameter_series import Computed, NamedParameter
from monitor.capture.updates import UpdateCollector
from monitor.capture.watched_parameters import WatchedParameters
from monitor.stats.partials import COUNT, SUM, SUMSQ
from monitor.stats.torch_tensors import local_shard
from monitor.stats.torch_updates import squares_of_update


class RatioCollector(UpdateCollector):
    """Norm of the update over norm of the weight before it, for each parameter."""

    def __init__(self, watched: WatchedParameters) -> None:
        self._series = watched.series("update_ratio")
        self._framework = watched.framework
        self._before: dict[NamedParameter, Tensor] = {}

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
        weight = self._weight(parameter)
        if weight is not None:
            self._before[parameter] = torch.clone(weight)

    def _compared(self, parameter: NamedParameter) -> Computed | None:
        before, weight = self._before.pop(parameter, None), self._weight(parameter)
        if before is None or weight is None or weight.shape != before.shape or weight.device != before.device:
            return None
        update, squares = squares_of_update(weight, before)
        return Computed({COUNT: float(weight.numel()), SUM: update, SUMSQ: squares}, weight)

    def _weight(self, parameter: NamedParameter) -> Tensor | None:
        weight = self._framework.weight(parameter)
        held = None if weight is None else local_shard(weight)
        usable = held is not None and held.layout is torch.strided and held.is_floating_point() and held.numel()
        return held.detach() if usable and held is not None else None
