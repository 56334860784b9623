"""Collectors of weight updates for PyTorch: ``update_ratio``, ``optimizer_health``, ``ur_distribution``, ``mg_direction``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from monitor.pytorch.frameworks.dtensor import part_like
from monitor.pytorch.frameworks.optimizer_state import SteppedTensor
from monitor.recording.attached_model import Attached, ComputedRow, NamedParameter
from monitor.recording.phases import STILL_SCALED, Collector, OptimizerTurn
from monitor.recording.updates import HealthCollector, RatioCollector, WeightsBefore
from monitor.series import DIRECTION_KIND
from monitor.stats.partials import COUNT, SUM, SUMSQ, WRITES
from monitor.stats.torch.tensors import local_shard
from monitor.stats.torch.updates import Numbers, Scratch, agreement, signed, squares_of_update, staleness, swallowed, together

# --- The hyperparameters of each stepped tensor.


class ParameterGroups:
    """Parameter groups by stepped tensor. Valid for one step: loading a checkpoint replaces groups, and schedules change
    them.
    """

    def __init__(self) -> None:
        self._groups: dict[Optimizer, dict[int, dict[str, Any]]] = {}

    def of(self, stepped: SteppedTensor) -> Mapping[str, Any] | None:
        """The hyperparameters of a stepped tensor; None if the optimizer does not list it."""
        if stepped.group is not None:
            return stepped.group
        known = self._groups.get(stepped.optimizer)
        if known is None:
            known = self._groups[stepped.optimizer] = {
                id(parameter): group for group in stepped.optimizer.param_groups for parameter in group["params"]
            }
        return known.get(id(stepped.key))


# --- ``update_ratio`` of weights of torch.


class TorchWeightCopies:
    """Copies of the parts of weights that this rank holds (``WeightCopies``)."""

    def usable(self, weight: Tensor) -> Tensor | None:
        held = local_shard(weight)
        if held is None or held.layout is not torch.strided or not held.numel():
            return None
        return held.detach() if held.is_floating_point() or held.is_complex() else None

    def copy(self, usable: Tensor) -> Tensor:
        return torch.clone(usable)

    def squares(self, after: Tensor, before: Tensor) -> tuple[Tensor, Tensor] | None:
        same = after.shape == before.shape and after.device == before.device
        return squares_of_update(_real(after), _real(before)) if same else None


def _real(x: Tensor) -> Tensor:
    """The real and imaginary parts of a complex tensor, as they are in memory; other tensors as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


# --- How many steps an optimizer has made with a parameter. An unchanged number means that it has skipped this step.


def steps_made(stepped: SteppedTensor, group: Mapping[str, Any]) -> float | Tensor | None:
    """The optimizer's step count of a parameter or its group; None if it keeps none. A float64 tensor if the count is on an
    accelerator.
    """
    state = stepped.optimizer.state.get(stepped.key) or {}
    step = state.get("step", group.get("step"))
    if isinstance(step, Tensor):
        return step.detach().to(torch.float64, copy=True) if step.device.type != "cpu" else float(step.item())
    return None if step is None else float(step)


def made(now: float | Tensor, before: float | Tensor | None = None) -> float | Tensor:
    """1 if ``now`` differs from ``before`` (0 by default), else 0. A float64 tensor of one element if ``now`` is a tensor."""
    more = now - (0.0 if before is None else before)
    return more.ne(0).to(torch.float64) if isinstance(more, Tensor) else float(more != 0)


# --- ``ur_distribution``: histograms of Adam's update and ratio.
#
# With the moments of the step that was just made, ``m`` and ``v`` corrected for their bias:
#
#     update = m / (sqrt(v) + eps)        ratio = m / sqrt(v)
#
# ``update`` is what the optimizer applies, before the learning rate. ``ratio`` is 0 where both moments are 0, as nothing was
# updated. Kingma and Ba (2015), "Adam: A method for stochastic optimization".

ADAMS: Final = frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "CPUAdam", "HybridAdam"})
"""Names of classes that step by this rule. Subclasses count too."""
PACKAGES: Final = frozenset({"torch", "apex", "deepspeed", "colossalai", "transformer_engine", "megatron", "mindspeed"})
"""The packages whose classes of these names do. Those of others may project gradients, as GaLore does, or correct no bias."""
DECOUPLED: Final = frozenset({"AdamW"})
"""Optimizers whose weight decay is never added to the gradient."""

Correction = float | Tensor


@dataclass(frozen=True, slots=True)
class AdamMoments:
    """The values from which Adam computed the step of a parameter.

    Attributes:
        mean: ``exp_avg``.
        square: ``exp_avg_sq``, or its running maximum under AMSGrad.
        mean_correction: The divisor of ``mean``; a tensor if the step count is on a device.
        square_correction: The divisor of ``square``.
        bias: The bias of ``square``, ``1 - beta2 ** step``, whether the optimizer corrects it or not.
        made: 1 if the step was made, 0 if the optimizer has skipped it by itself. A tensor is float64, one element.
    """

    mean: Tensor
    square: Tensor
    mean_correction: Correction
    square_correction: Correction
    bias: Correction
    eps: float
    made: float | Tensor


class AdamSteps:
    """The moments of the steps that an Adam makes, by parameter."""

    def __init__(self, attached: Attached) -> None:
        self._framework = attached.framework
        self._failures = attached.failures
        self._counts: dict[NamedParameter, float | Tensor] = {}
        self._groups = ParameterGroups()

    def begin(self) -> None:
        """An optimizer is about to step."""
        self._groups, self._counts = ParameterGroups(), {}

    def remember(self, parameter: NamedParameter, optimizer: Optimizer) -> None:
        """Store the step count before the step: a parameter whose count does not change has no update."""
        found = self.stepped(parameter, optimizer)
        if found is not None and (step := steps_made(found[0], found[1] or {})) is not None:
            self._counts[parameter] = step

    def end(self) -> None:
        """The optimizer has stepped. Its groups may have changed."""
        self._groups = ParameterGroups()

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> tuple[SteppedTensor, Mapping[str, Any] | None] | None:
        """The tensor that is stepped for a parameter, and its hyperparameters."""
        stepped: SteppedTensor | None = self._framework.stepped(parameter, optimizer)
        return None if stepped is None else (stepped, self._groups.of(stepped))

    def made(self, parameter: NamedParameter, stepped: SteppedTensor, group: Mapping[str, Any]) -> float | Tensor | None:
        """1 if the step was made, 0 if the optimizer has skipped it by itself; None if it keeps no count."""
        step = steps_made(stepped, group)
        return None if step is None else made(step, self._counts.get(parameter))

    def moments(self, parameter: NamedParameter, stepped: SteppedTensor, group: Mapping[str, Any]) -> AdamMoments | None:
        """The moments after the step; None if they are not known."""
        kinds = ("exp_avg", "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
        found = self._framework.moments(kinds, parameter, stepped.optimizer)
        mean, square = (None if one is None else local_shard(one) for one in found)
        step, was_made = steps_made(stepped, group), self.made(parameter, stepped, group)
        if mean is None or square is None or step is None or was_made is None:
            return None
        if mean.shape != square.shape or not mean.is_floating_point() or (not isinstance(was_made, Tensor) and not was_made):
            return None
        biases = [_bias(beta, step) for beta in group["betas"][:2]]
        corrections = biases if group.get("bias_correction", True) not in (False, 0) else [1.0, 1.0]
        return AdamMoments(mean, square, corrections[0], corrections[1], biases[1], float(group["eps"]), was_made)

    def is_adam(self, optimizer: Optimizer, lacking: str, needs: str, without: str = "it has no rows") -> bool:
        """Whether an optimizer is a known Adam. If not, a warning about ``lacking`` says once what ``needs`` one, and what is
        missing ``without``.
        """
        kind = type(optimizer)
        if any(_is_known_adam(base) for base in kind.__mro__):
            return True
        why = f"{kind.__module__}.{kind.__name__} is not a known one" if kind.__name__ in ADAMS else f"{kind.__name__} is none"
        self._failures.nothing_of(lacking, f"{needs}, and {why}: {without}.")
        return False


def _is_known_adam(kind: type) -> bool:
    return kind.__name__ in ADAMS and kind.__module__.partition(".")[0] in PACKAGES


class AdamCollector(Collector):
    """``adam_update`` and ``adam_ratio``."""

    def __init__(self, attached: Attached) -> None:
        self._update = attached.series("adam_update")
        self._ratio = attached.series("adam_ratio")
        self._steps = AdamSteps(attached)
        self._reader: Any = attached.recorder.reader
        self._eps = attached.config.eps

    def before_step(self, turn: OptimizerTurn) -> None:
        self._steps.begin()
        self._update.each(lambda parameter: self._steps.remember(parameter, turn.optimizer), turn.held)

    def after_step(self, turn: OptimizerTurn) -> None:
        optimizer = turn.optimizer
        if optimizer is None:
            return
        self._steps.end()
        counted: dict[NamedParameter, ComputedRow] = {}

        def update(parameter: NamedParameter) -> ComputedRow | None:
            moments = self._moments(parameter, optimizer)
            if moments is None:
                return None
            updates, counted[parameter] = self._count(moments)
            return updates

        self._update.record_computed(update, turn.held)
        self._ratio.record_computed(lambda parameter: counted.pop(parameter, None), turn.held)

    def _moments(self, parameter: NamedParameter, optimizer: Optimizer) -> AdamMoments | None:
        stepped, group = self._steps.stepped(parameter, optimizer) or (None, None)
        if stepped is None or group is None or not self._is_adam(stepped.optimizer):
            return None
        return self._steps.moments(parameter, stepped, group)

    def _is_adam(self, optimizer: Optimizer) -> bool:
        return self._steps.is_adam(optimizer, "adam_update", "ur_distribution needs an Adam optimizer")

    def _count(self, moments: AdamMoments) -> tuple[ComputedRow, ComputedRow]:
        updates, ratios = (signed(moments.mean, self._reader.host, self._eps) for _ in range(2))
        scratch = Scratch()
        precision = torch.float64 if moments.mean.dtype is torch.float64 else torch.float32
        for mean, square in together(moments.mean, moments.square):
            m = scratch.copy("mean", mean, precision).div_(moments.mean_correction)
            root = scratch.copy("square", square, precision).div_(moments.square_correction).sqrt_()
            vector = scratch.of("vector", m, precision)
            updates.add(torch.div(m, torch.add(root, moments.eps, out=vector), out=vector))
            ratios.add(_ratio(m, root, vector))
        computed = [
            ComputedRow({**one.numbers(), WRITES: moments.made}, moments.mean, one.histogram()) for one in (updates, ratios)
        ]
        return computed[0], computed[1]


def _ratio(mean: Tensor, root: Tensor, into: Tensor) -> Tensor:
    if root.is_cpu and root.amin().item() > 0:
        return torch.div(mean, root, out=into)
    neither = (mean == 0) & (root == 0)
    return torch.div(mean, root, out=into).masked_fill_(neither, 0)


def _bias(beta: float | Tensor, step: float | Tensor) -> Correction:
    """The bias ``1 - beta ** step``. A beta on a device is not copied to the host."""
    exact = beta.detach().to(torch.float64) if isinstance(beta, Tensor) else beta
    corrected: Correction = 1 - exact**step
    return corrected


# --- ``mg_direction``: the fraction of gradient elements whose sign equals the momentum's.


TERMS: Final = (
    "mg_direction: gradients that are terms of a sum over ranks, or sharded in another way than their parameter, have no rows "
    "(first: {name})."
)


class DirectionCollector(Collector):
    """Compares the reduced gradient with the momentum before the step.

    Before its first step an optimizer has no momentum. After that step the momentum is a multiple of the gradient: they agree.
    """

    def __init__(self, attached: Attached) -> None:
        self._series = attached.series(DIRECTION_KIND)
        self._framework = attached.framework
        self._is_reduced = attached.is_reduced
        self._failures = attached.failures
        self._begins: dict[NamedParameter, ComputedRow] = {}

    def gradients_ready(self, turn: OptimizerTurn) -> None:
        if turn.optimizer is None:
            return
        self._begins.clear()
        groups = ParameterGroups()
        self._series.record_computed(lambda one: self._compared(one, turn.optimizer, groups), turn.held)

    def after_step(self, turn: OptimizerTurn) -> None:
        """Record parameters whose momentum the step has created."""
        begins, self._begins = self._begins, {}
        optimizer = turn.optimizer

        def begun(parameter: NamedParameter) -> ComputedRow | None:
            computed = begins.get(parameter)
            if computed is None or optimizer is None or self._momentum(parameter, optimizer) is None:
                return None
            step = _steps_of(self._framework.stepped(parameter, optimizer))
            # An optimizer that skips by itself may have created its state without making a step.
            return computed if step is None else replace(computed, numbers={**computed.numbers, WRITES: made(step)})

        if begins and optimizer is not None:
            self._series.record_computed(begun, turn.held)

    def end_turn(self, turn: OptimizerTurn | None) -> None:
        del turn
        self._begins.clear()

    def _compared(self, parameter: NamedParameter, optimizer: Optimizer, groups: ParameterGroups) -> ComputedRow | None:
        gradient = self._framework.reduced(parameter)
        if not self._is_reduced(parameter, gradient):
            return None
        held = None if gradient is None else part_like(gradient, parameter.tensor)
        if held is None and gradient is not None:
            self._failures.nothing_of("mg_direction: terms", TERMS.format(name=parameter.name))
        if held is None or held.layout is not torch.strided or not held.is_floating_point() or not held.numel():
            return None
        momentum = self._momentum(parameter, optimizer)
        if momentum is None:
            self._begins[parameter] = _share(agreement(held, held), held)
            return None
        if momentum.numel() != held.numel() or momentum.device != held.device:
            return None  # the momentum covers another part of the parameter than the gradient
        stepped = self._framework.stepped(parameter, optimizer)
        group = None if stepped is None else groups.of(stepped)
        uphill = group is not None and bool(group.get("maximize"))
        agreeing = agreement(held, momentum.view(held.shape), uphill=uphill)
        step = _steps_of(stepped)
        began = 1.0 if step is None else made(step)  # before the first step the state holds no momentum
        if isinstance(began, Tensor):
            agreeing = torch.where(began > 0, agreeing, agreement(held, held))
        elif not began:
            agreeing = agreement(held, held)
        return _share(agreeing, held)

    def _momentum(self, parameter: NamedParameter, optimizer: Optimizer) -> Tensor | None:
        (momentum,) = self._framework.moments(("exp_avg",), parameter, optimizer)
        return None if momentum is None else local_shard(momentum)


def _steps_of(stepped: SteppedTensor | None) -> float | Tensor | None:
    return None if stepped is None else steps_made(stepped, stepped.group or {})


def _share(agreeing: Tensor, x: Tensor) -> ComputedRow:
    return ComputedRow({COUNT: float(x.numel()), SUM: agreeing}, x)


# --- ``optimizer_health``: what rounding makes of a step, and whether Adam's second moment fits the gradient.


CHANGED: Final = (
    "optimizer_health: gradients are changed or cleared inside the optimizer's step or in a hook of it (first: {name}). Their "
    "staleness and below_eps are empty, and swallowed counts elements whose first moment is not 0: without one, no row. "
    "To record all columns, change and clear gradients outside the step."
)
SPARSE: Final = "optimizer_health: parameters with sparse gradients have no rows (first: {name})."
COMPLEX: Final = "optimizer_health: complex parameters have no rows (first: {name})."


class TorchStepReading:
    """The gradients and moments of a step (``StepReading``)."""

    def __init__(self, attached: Attached) -> None:
        self._framework = attached.framework
        self._is_reduced = attached.is_reduced
        self._failures = attached.failures
        self._steps = AdamSteps(attached)
        self._ready: dict[NamedParameter, tuple[Tensor, int]] = {}

    def begin_step(self, turn: OptimizerTurn) -> None:
        del turn
        self._steps.begin()

    def end_step(self) -> None:
        self._ready.clear()

    def remember(self, parameter: NamedParameter, turn: OptimizerTurn) -> None:
        if parameter.tensor.is_complex():
            self._warn(COMPLEX, parameter)
        if turn.optimizer is not None:
            self._steps.remember(parameter, turn.optimizer)

    def gradient_ready(self, parameter: NamedParameter) -> None:
        gradient = self._framework.reduced(parameter)
        if gradient is not None and self._is_reduced(parameter, gradient) and not gradient.is_inference():
            self._ready[parameter] = gradient, gradient._version

    def health(self, parameter: NamedParameter, turn: OptimizerTurn, weight: Tensor, before: Tensor) -> Numbers | None:
        found = None if turn.optimizer is None else self._steps.stepped(parameter, turn.optimizer)
        if found is None or not (before.shape == weight.shape and before.device == weight.device):
            return None
        stepped, group = found[0], found[1] or {}
        was_made = self._steps.made(parameter, stepped, group)
        if was_made is not None and not isinstance(was_made, Tensor) and not was_made:
            return None
        ready = self._ready.get(parameter)
        if ready is not None and ready[0].layout is not torch.strided:
            self._warn(SPARSE, parameter)
            return None
        moments = self._moments(parameter, stepped, group, weight)
        gradient = self._gradient(parameter, turn, weight)
        if gradient is None:
            due = self._momentum(parameter, stepped, weight) if moments is None else moments.mean
        else:
            due = gradient
        if due is None:
            return None
        numbers = swallowed(weight, before, due, steps=_steps_at_all(group.get("lr")))
        if gradient is not None and moments is not None:
            lowest = moments.eps**2 * moments.square_correction
            numbers |= staleness(gradient, moments.square, moments.bias, lowest, before, _decay(stepped.optimizer, group))
            if ready is not None and gradient is not ready[0]:
                # A DTensor has no new version after ``zero_grad`` of a fused optimizer.
                numbers |= {SUMSQ: numbers[SUMSQ] * (numbers[SUM] != 0)}
        return {**numbers, WRITES: _was_made(was_made, stepped.optimizer)}

    def _momentum(self, parameter: NamedParameter, stepped: SteppedTensor, weight: Tensor) -> Tensor | None:
        """The first moment of an optimizer that is no Adam, if the parameter had a gradient."""
        if parameter not in self._ready:
            return None
        (found,) = self._framework.moments(("exp_avg",), parameter, stepped.optimizer)
        momentum = None if found is None else local_shard(found)
        return momentum if momentum is not None and _fits(momentum, weight) else None

    def _moments(
        self, parameter: NamedParameter, stepped: SteppedTensor, group: Mapping[str, Any], weight: Tensor
    ) -> AdamMoments | None:
        needs = "optimizer_health: staleness and below_eps need an Adam optimizer"
        if not group or not self._steps.is_adam(stepped.optimizer, "staleness", needs, "their cells are empty"):
            return None
        moments = self._steps.moments(parameter, stepped, group)
        return moments if moments is not None and _fits(moments.mean, weight) else None

    def _gradient(self, parameter: NamedParameter, turn: OptimizerTurn, weight: Tensor) -> Tensor | None:
        """The gradient that the optimizer has used, as far as it is known to be that one."""
        gradient, ready = self._framework.used_gradient(parameter), self._ready.get(parameter)
        if ready is None or not _unscales(turn) or self._framework.loses_gradients:
            return None
        if gradient is None or self._has_changed(gradient, *ready):
            self._warn(CHANGED, parameter)
            return None
        held = part_like(gradient, parameter.tensor)
        return held if held is not None and held.layout is torch.strided and _fits(held, weight) else None

    def _has_changed(self, gradient: Tensor, before: Tensor, version: int) -> bool:
        """Whether a gradient is another one than before the step, or was written to. Writes by fused optimizers, which divide
        by the loss scale, are no new version.
        """
        return gradient is not before or (gradient._version != version and not self._framework.clips_in_step)

    def _warn(self, message: str, parameter: NamedParameter) -> None:
        self._failures.nothing_of(message.split(" (first")[0], message.format(name=parameter.name))


def _fits(x: Tensor, weight: Tensor) -> bool:
    return x.shape == weight.shape and x.device == weight.device and x.is_floating_point()


def _unscales(turn: OptimizerTurn) -> bool:
    """Whether the gradients are without a loss scale after the step. Fused optimizers of torch write them back without it."""
    return turn.scaling != STILL_SCALED or isinstance(turn.optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD))


def _steps_at_all(rate: Any) -> float | Tensor:
    """1 if a learning rate is not 0, else 0: a step of the rate 0 has no update. A tensor if the rate is on an accelerator."""
    if isinstance(rate, Tensor) and not rate.is_cpu:
        return rate.detach().ne(0).to(torch.float64).reshape(())
    return float(rate is None or float(rate) != 0)


def _decay(optimizer: Optimizer, group: Mapping[str, Any]) -> Any:
    """The multiple of the weight that is added to the gradient, so that the second moment contains it; 0 if none is."""
    modes = [group.get("decoupled_weight_decay"), *(getattr(optimizer, name, False) for name in ("adam_w_mode", "adamw_mode"))]
    if any(modes) or any(base.__name__ in DECOUPLED for base in type(optimizer).__mro__):
        return 0
    decay = group.get("weight_decay", 0)
    return -decay if group.get("maximize") else decay  # its square is that of the negated gradient with the decay


def _was_made(counted: float | Tensor | None, optimizer: Optimizer) -> float | Tensor:
    """1 if a step was made, else 0. An optimizer without a count may skip on a device, by what a GradScaler found."""
    found = getattr(optimizer, "found_inf", None)
    if counted is not None or not isinstance(found, Tensor):
        return 1.0 if counted is None else counted
    return found.detach().eq(0).to(torch.float64).reshape(())


def new_updates(attached: Attached) -> Iterator[tuple[str, Collector]]:
    """Create the configured collectors of updates."""
    config = attached.config
    weights = WeightsBefore(attached, TorchWeightCopies())
    if config.update_ratio:
        yield "update_ratio", RatioCollector(attached, weights)
    if config.optimizer_health:
        yield "optimizer_health", HealthCollector(attached, weights, TorchStepReading(attached))
    if config.mg_direction:
        yield "mg_direction", DirectionCollector(attached)
    if config.ur_distribution:
        yield "ur_distribution", AdamCollector(attached)
