"""Collectors of weight updates for MindSpore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from mindspore import Tensor, nn

from monitor.mindspore.features.reading import is_floating_point
from monitor.mindspore.frameworks.adams import MindSporeMoments
from monitor.mindspore.frameworks.optimizer_state import ADAM_WS, MINT, OptimizerState, classes_of, is_a, next_rate, rate_of
from monitor.recording.attached_model import Attached, ComputedRow, NamedParameter
from monitor.recording.phases import Collector, OptimizerTurn
from monitor.recording.updates import HealthCollector, RatioCollector, WeightsBefore
from monitor.series import DIRECTION_KIND
from monitor.stats.mindspore import updates as kernels
from monitor.stats.mindspore.tensors import Number, has_data
from monitor.stats.partials import COUNT, SUM

# --- ``ur_distribution``: Adam's updates and moment ratios, as histograms.
#
# The update is taken as the optimizer applies it, before the learning rate. The ratio is that of the moments, with bias
# correction if the optimizer applies it. See ``monitor.mindspore.frameworks.adams`` for the rules of MindSpore's Adams.


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
            self._failures.nothing_of("adam_update", f"{said}: there are no rows.")
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
        if turn.optimizer is not None and not self._framework.is_compiled(turn.optimizer):
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


# --- ``optimizer_health``: what rounding makes of a step, and whether Adam's second moment fits the gradient.


class GradientUse(NamedTuple):
    """How an optimizer uses a gradient that it is given.

    Attributes:
        divisor: The loss scale that it divides by.
        decay: The multiple of the weight that it then adds; None if it changes the gradient in another way.
        rate: Its learning rate in the step, a number or a tensor; None if that is unknown.
    """

    divisor: float
    decay: Number | None
    rate: Any


def use_of(state: OptimizerState, place: int) -> GradientUse:
    """How an optimizer will use the gradient of its parameter at an index in its next step."""
    return GradientUse(float(getattr(state.optimizer, "loss_scale", 1.0)), _added_decay(state, place), _rate(state, place))


def _rate(state: OptimizerState, place: int) -> Any:
    if group := state.group(place):
        return rate_of(group)
    kept: Any = getattr(state.optimizer, "learning_rate", None)
    one = kept[place] if getattr(state.optimizer, "is_group_lr", False) else kept
    return next_rate(state.optimizer, one)


def _added_decay(state: OptimizerState, place: int) -> Number | None:
    optimizer, group = state.optimizer, state.group(place)
    if is_a(optimizer, "AdamWeightDecay", *ADAM_WS):
        return 0.0
    if getattr(optimizer, "grad_centralization", False):
        return None
    if group:
        decay = group.get("weight_decay", 0.0)
        return -decay if group.get("maximize") else decay  # its square is that of the negated gradient with the decay
    if not getattr(optimizer, "exec_weight_decay", False) or not optimizer.decay_flags[place]:
        return 0.0
    kept: Any = optimizer.weight_decay
    one = kept[place] if isinstance(kept, (tuple, list)) else kept
    return None if isinstance(one, nn.Cell) else one / optimizer.loss_scale  # MindSpore has multiplied it by the scale


class MindSporeStepReading:
    """The gradients and moments of a step (``StepReading``)."""

    def __init__(self, attached: Attached) -> None:
        self._framework = attached.framework
        self._is_reduced = attached.is_reduced
        self._failures = attached.failures
        self._uses: dict[NamedParameter, GradientUse] = {}
        self._reduced: set[NamedParameter] = set()

    def begin_step(self, turn: OptimizerTurn) -> None:
        self.end_step()
        if not self._framework.is_adam(turn.optimizer):
            name = type(turn.optimizer).__name__
            said = f"staleness and below_eps need an Adam optimizer, and {name} is no known Adam"
            self._failures.nothing_of("staleness", f"optimizer_health: {said}: their cells are empty.")

    def end_step(self) -> None:
        self._uses.clear()
        self._reduced.clear()

    def remember(self, parameter: NamedParameter, turn: OptimizerTurn) -> None:
        del turn
        found = self._framework.state_of(parameter)
        if found is not None:
            self._uses[parameter] = use_of(*found)

    def gradient_ready(self, parameter: NamedParameter) -> None:
        if self._is_reduced(parameter, self._framework.reduced(parameter)):
            self._reduced.add(parameter)

    def health(self, parameter: NamedParameter, turn: OptimizerTurn, weight: Tensor, before: Any) -> kernels.Numbers | None:
        del turn
        gradient, use = self._framework.reduced(parameter), self._uses.get(parameter)
        if gradient is None or use is None or parameter not in self._reduced or tuple(before.shape) != tuple(weight.shape):
            return None
        if not _fits(gradient, weight):
            return None
        numbers = kernels.swallowed(weight, before, gradient, use.rate)
        moments = self._framework.adam_of(parameter)
        if moments is None or use.decay is None or not _fits(moments.square, weight):
            return numbers
        lowest = moments.eps**2 * (1.0 if moments.eps_on_root else moments.square_correction)
        terms = moments.bias, lowest, before, use.divisor, use.decay
        return numbers | kernels.staleness(gradient, moments.square, *terms)


def _fits(x: Tensor, weight: Tensor) -> bool:
    return tuple(x.shape) == tuple(weight.shape) and is_floating_point(x) and has_data(x)


# --- Optimizers that change no weight on a CPU.

NO_EFFECT: Final = (
    "{name} of mindspore.mint.optim changes no weight on this device: MindSpore's in-place additions have no effect here. Its "
    "rows show just that. Use an optimizer of mindspore.nn or mindspore.experimental.optim."
)


def _warn_of_mint(attached: Attached) -> None:
    """Warn once. Waits if there is an optimizer of ``mindspore.mint``."""
    known = classes_of(MINT, *getattr(MINT, "__all__", ()))
    found = [one.state.optimizer for one in attached.framework.stepped.values() if isinstance(one.state.optimizer, known)]
    if found and not _adds_in_place():
        attached.failures.warn("mint", NO_EFFECT.format(name=type(found[0]).__name__))


def _adds_in_place() -> bool:
    x, one = (Tensor(np.float32(number)) for number in (0.0, 1.0))
    try:
        x.add_(one)
        return bool(x.asnumpy() == 1.0)
    except RuntimeError:  # no kernel
        return False


def new_updates(attached: Attached) -> Iterator[tuple[str, Collector]]:
    """Create the configured collectors of updates."""
    _warn_of_mint(attached)
    config = attached.config
    weights = WeightsBefore(attached, MindSporeWeightCopies())
    if config.update_ratio:
        yield "update_ratio", RatioCollector(attached, weights)
    if config.optimizer_health:
        yield "optimizer_health", HealthCollector(attached, weights, MindSporeStepReading(attached))
    if config.mg_direction:
        yield "mg_direction", MindSporeDirectionCollector(attached)
    if config.ur_distribution:
        yield "ur_distribution", MindSporeAdamCollector(attached)
