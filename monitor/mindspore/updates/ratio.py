"""``update_ratio`` of weights of MindSpore."""

from __future__ import annotations

from mindspore import Tensor

from monitor.mindspore.features.reading import is_floating_point
from monitor.recording import updates
from monitor.stats.mindspore.arithmetic import Number
from monitor.stats.mindspore.tensors import has_data
from monitor.stats.mindspore.updates import Kept, kept, squares_of_update


class RatioCollector(updates.RatioCollector):
    """On the host the copy is an array, on a device a tensor."""

    def _usable(self, weight: Tensor) -> Tensor | None:
        return weight if is_floating_point(weight) and has_data(weight) and weight.size else None

    def _copy(self, usable: Tensor) -> Kept:
        return kept(usable)

    def _squares(self, after: Tensor, before: Kept) -> tuple[Number, Number] | None:
        return squares_of_update(after, before) if tuple(before.shape) == tuple(after.shape) else None
