"""Collectors of weight updates for PyTorch: ``update_ratio``, ``ur_distribution`` and ``mg_direction``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from monitor.pytorch.frameworks.dtensor import part_like
from monitor.pytorch.frameworks.framework import SteppedTensor
from monitor.recording.attached_model import Attached, ComputedRow, NamedParameter
from monitor.recording.parameters import RatioCollector
from monitor.recording.phases import Collector, OptimizerTurn
from monitor.series import DIRECTION_KIND
from monitor.stats.partials import COUNT, SUM, WRITES
from monitor.stats.torch.tensors import local_shard
from monitor.stats.torch.updates import Scratch, agreement, signed, squares_of_update, together

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
        usable = held is not None and held.layout is torch.strided and held.is_floating_point() and held.numel()
        return held.detach() if usable and held is not None else None

    def copy(self, usable: Tensor) -> Tensor:
        return torch.clone(usable)

    def squares(self, after: Tensor, before: Tensor) -> tuple[Tensor, Tensor] | None:
        same = after.shape == before.shape and after.device == before.device
        return squares_of_update(after, before) if same else None


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

Correction = float | Tensor


@dataclass(frozen=True, slots=True)
class AdamMoments:
    """The values from which Adam computed the step of a parameter.

    Attributes:
        mean: ``exp_avg``.
        square: ``exp_avg_sq``, or its running maximum under AMSGrad.
        mean_correction: The divisor of ``mean``; a tensor if the step count is on a device.
        square_correction: The divisor of ``square``.
        made: 1 if the step was made, 0 if the optimizer has skipped it by itself. A tensor is float64, one element.
    """

    mean: Tensor
    square: Tensor
    mean_correction: Correction
    square_correction: Correction
    eps: float
    made: float | Tensor


class AdamCollector(Collector):
    """``adam_update`` and ``adam_ratio``."""

    def __init__(self, attached: Attached) -> None:
        self._update = attached.series("adam_update")
        self._ratio = attached.series("adam_ratio")
        self._framework = attached.framework
        self._failures = attached.failures
        self._reader: Any = attached.recorder.reader
        self._eps = attached.config.eps
        self._steps: dict[NamedParameter, float | Tensor] = {}

    def before_step(self, turn: OptimizerTurn) -> None:
        """Store the step counts: a parameter whose count does not change has no update."""
        groups, self._steps = ParameterGroups(), {}
        self._update.each(lambda parameter: self._remember(parameter, turn.optimizer, groups), turn.held)

    def _remember(self, parameter: NamedParameter, optimizer: Optimizer, groups: ParameterGroups) -> None:
        stepped = self._framework.stepped(parameter, optimizer)
        if stepped is not None and (step := steps_made(stepped, groups.of(stepped) or {})) is not None:
            self._steps[parameter] = step

    def after_step(self, turn: OptimizerTurn) -> None:
        optimizer = turn.optimizer
        if optimizer is None:
            return
        groups = ParameterGroups()
        counted: dict[NamedParameter, ComputedRow] = {}

        def update(parameter: NamedParameter) -> ComputedRow | None:
            moments = self._moments(parameter, optimizer, groups)
            if moments is None:
                return None
            updates, counted[parameter] = self._count(moments)
            return updates

        self._update.record_computed(update, turn.held)
        self._ratio.record_computed(lambda parameter: counted.pop(parameter, None), turn.held)

    def _moments(self, parameter: NamedParameter, optimizer: Optimizer, groups: ParameterGroups) -> AdamMoments | None:
        stepped = self._framework.stepped(parameter, optimizer)
        group = None if stepped is None else groups.of(stepped)
        if stepped is None or group is None or not self._is_adam(stepped.optimizer):
            return None
        kinds = ("exp_avg", "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
        found = [self._framework.moment(kind, parameter, optimizer) for kind in kinds]
        mean, square = (None if one is None else local_shard(one) for one in found)
        step = steps_made(stepped, group)
        before = self._steps.get(parameter)
        if step is not None and not isinstance(step, Tensor) and step == (before or 0.0):
            return None
        if mean is None or square is None or step is None or mean.shape != square.shape or not mean.is_floating_point():
            return None
        corrections = [_correction(beta, step, group) for beta in group["betas"][:2]]
        return AdamMoments(mean, square, corrections[0], corrections[1], float(group["eps"]), made(step, before))

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

    def _is_adam(self, optimizer: Optimizer) -> bool:
        known = any(base.__name__ in ADAMS for base in type(optimizer).__mro__)
        if not known:
            name = type(optimizer).__name__
            self._failures.warn(
                "ur_distribution", f"ur_distribution needs an Adam optimizer, and {name} is none: it has no rows."
            )
        return known


def _ratio(mean: Tensor, root: Tensor, into: Tensor) -> Tensor:
    if root.is_cpu and root.amin().item() > 0:
        return torch.div(mean, root, out=into)
    neither = (mean == 0) & (root == 0)
    return torch.div(mean, root, out=into).masked_fill_(neither, 0)


def _correction(beta: float | Tensor, step: float | Tensor, group: Mapping[str, Any]) -> Correction:
    """The bias correction ``1 - beta ** step``. A beta on a device is not copied to the host."""
    if group.get("bias_correction", True) in (False, 0):
        return 1.0
    exact = beta.detach().to(torch.float64) if isinstance(beta, Tensor) else beta
    corrected: Correction = 1 - exact**step
    return corrected


# --- ``mg_direction``: the fraction of gradient elements whose sign equals the momentum's.


class DirectionCollector(Collector):
    """Compares the reduced gradient with the momentum before the step.

    Before its first step an optimizer has no momentum. After that step the momentum is a multiple of the gradient: they agree.
    """

    def __init__(self, attached: Attached) -> None:
        self._series = attached.series(DIRECTION_KIND)
        self._framework = attached.framework
        self._is_reduced = attached.is_reduced
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
        momentum = self._framework.moment("exp_avg", parameter, optimizer)
        return None if momentum is None else local_shard(momentum)


def _steps_of(stepped: SteppedTensor | None) -> float | Tensor | None:
    return None if stepped is None else steps_made(stepped, stepped.group or {})


def _share(agreeing: Tensor, x: Tensor) -> ComputedRow:
    return ComputedRow({COUNT: float(x.numel()), SUM: agreeing}, x)


def new_updates(attached: Attached) -> Iterator[tuple[str, Collector]]:
    """Create the configured collectors of updates."""
    config = attached.config
    if config.update_ratio:
        yield "update_ratio", RatioCollector(attached, TorchWeightCopies())
    if config.mg_direction:
        yield "mg_direction", DirectionCollector(attached)
    if config.ur_distribution:
        yield "ur_distribution", AdamCollector(attached)
