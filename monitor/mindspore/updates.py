"""Collectors of weight updates for MindSpore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore import Tensor

from monitor.mindspore.features import is_floating_point
from monitor.mindspore.frameworks import MindSporeMoments
from monitor.recording.attached_model import Attached, ComputedRow, NamedParameter
from monitor.recording.parameters import RatioCollector
from monitor.recording.phases import Collector, OptimizerTurn
from monitor.series import DIRECTION_KIND
from monitor.stats.mindspore import updates as kernels
from monitor.stats.mindspore.tensors import Number, has_data
from monitor.stats.partials import COUNT, SUM

# --- ``ur_distribution``: Adam's updates and moment ratios, as histograms.
#
# The update is taken as the optimizer applies it, before the learning rate. The ratio is that of the moments, with bias
# correction if the optimizer applies it. See ``monitor.mindspore.frameworks`` for the rules of MindSpore's Adams.


class MindSporeAdamCollector(Collector):
    """``adam_update`` and ``adam_ratio``."""

    def __init__(self, attached: Attached) -> None:
        self._update = attached.series("adam_update")
        self._ratio = attached.series("adam_ratio")
        self._framework = attached.framework
        self._failures = attached.failures
        self._eps = attached.config.eps
        self._reader = attached.recorder.reader

    def after_step(self, turn: OptimizerTurn) -> None:
        if not self._framework.is_adam(turn.optimizer):
            name = type(turn.optimizer).__name__
            said = f"ur_distribution records the updates of Adam, and {name} is no known Adam"
            self._failures.warn("ur_distribution", f"{said}: there are no rows.")
            return
        counted: dict[NamedParameter, ComputedRow] = {}

        def update(parameter: NamedParameter) -> ComputedRow | None:
            moments = self._framework.adam_of(parameter)
            given = self._framework.reduced(parameter)
            if moments is None or given is None or not is_floating_point(moments.mean):
                return None
            updates, ratios = self._vectors(moments)
            counted[parameter] = _computed(ratios, moments)
            return _computed(updates, moments)

        self._update.record_computed(update, turn.held)
        self._ratio.record_computed(lambda parameter: counted.pop(parameter, None), turn.held)

    def _vectors(self, moments: MindSporeMoments) -> tuple[kernels.MindSporeSigned, kernels.MindSporeSigned]:
        return kernels.adam_vectors(
            moments.mean,
            moments.square,
            moments.mean_correction,
            moments.square_correction,
            moments.eps,
            self._eps,
            eps_on_root=moments.eps_on_root,
            higher=self._reader.higher,
        )


def _computed(vector: kernels.MindSporeSigned, moments: MindSporeMoments) -> ComputedRow:
    return ComputedRow(vector.numbers(), moments.mean, vector.histogram())


# --- ``mg_direction``: the fraction of gradient elements whose sign equals the momentum's.


class MindSporeDirectionCollector(Collector):
    """Compares the gradient that the optimizer is given with the momentum before the step.

    The first step of an optimizer has no momentum before it. Afterwards the momentum is a multiple of the gradient, so they
    agree.
    """

    def __init__(self, attached: Attached) -> None:
        self._series = attached.series(DIRECTION_KIND)
        self._framework = attached.framework
        self._is_reduced = attached.is_reduced

    def gradients_ready(self, turn: OptimizerTurn) -> None:
        if turn.optimizer is not None:
            self._series.record_computed(lambda parameter: self._compared(parameter, turn.optimizer), turn.held)

    def _compared(self, parameter: NamedParameter, optimizer: Any) -> ComputedRow | None:
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
        agreeing = kernels.agreement(gradient, momentum, uphill=uphill and momentum is not gradient)
        return ComputedRow({COUNT: float(gradient.size), SUM: agreeing}, gradient)


# --- ``update_ratio`` of weights.


class MindSporeWeightCopies:
    """Copies a weight as an array on the host, and as a tensor on a device (``WeightCopies``)."""

    def usable(self, weight: Tensor) -> Tensor | None:
        return weight if is_floating_point(weight) and has_data(weight) and weight.size else None

    def copy(self, usable: Tensor) -> kernels.TensorSnapshot:
        return kernels.snapshot(usable)

    def squares(self, after: Tensor, before: kernels.TensorSnapshot) -> tuple[Number, Number] | None:
        return kernels.squares_of_update(after, before) if tuple(before.shape) == tuple(after.shape) else None


def new_updates(attached: Attached) -> Iterator[tuple[str, Collector]]:
    """Create the configured collectors of updates."""
    config = attached.config
    if config.update_ratio:
        yield "update_ratio", RatioCollector(attached, MindSporeWeightCopies())
    if config.mg_direction:
        yield "mg_direction", MindSporeDirectionCollector(attached)
    if config.ur_distribution:
        yield "ur_distribution", MindSporeAdamCollector(attached)
