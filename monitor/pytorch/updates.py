"""Which collectors of updates a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from monitor.pytorch.frameworks.dtensor import part_like
from monitor.pytorch.frameworks.optimizer_state import Stepped
from monitor.recording import updates
from monitor.recording.optimizer_turns import OptimizerTurn
from monitor.recording.parameter_series import ComputedRow, NamedParameter
from monitor.recording.parameters import ParameterContext
from monitor.recording.updates import UpdateCollector, wanted
from monitor.series import DIRECTION_KIND
from monitor.stats.partials import COUNT, SUM, WRITES
from monitor.stats.torch.tensors import local_shard
from monitor.stats.torch.updates import Scratch, agreement, signed, squares_of_update, together

# --- The parameter groups of optimizers, by what they step.


class Groups:
    """For the time of one step: a checkpoint that is loaded replaces the groups, and schedules change what is in them."""

    def __init__(self) -> None:
        self._groups: dict[Optimizer, dict[int, dict[str, Any]]] = {}

    def of(self, stepped: Stepped) -> Mapping[str, Any] | None:
        """The hyperparameters of what is stepped; None where the optimizer does not list it."""
        if stepped.group is not None:
            return stepped.group
        known = self._groups.get(stepped.optimizer)
        if known is None:
            known = self._groups[stepped.optimizer] = {
                id(parameter): group for group in stepped.optimizer.param_groups for parameter in group["params"]
            }
        return known.get(id(stepped.key))


# --- ``update_ratio`` of weights of torch.


class RatioCollector(updates.RatioCollector):
    """Of what this rank holds."""

    def _usable(self, weight: Tensor) -> Tensor | None:
        held = local_shard(weight)
        usable = held is not None and held.layout is torch.strided and held.is_floating_point() and held.numel()
        return held.detach() if usable and held is not None else None

    def _copy(self, usable: Tensor) -> Tensor:
        return torch.clone(usable)

    def _squares(self, after: Tensor, before: Tensor) -> tuple[Tensor, Tensor] | None:
        same = after.shape == before.shape and after.device == before.device
        return squares_of_update(after, before) if same else None


# --- How many steps an optimizer has made with a parameter, which tells whether it has made this one.


def steps_made(stepped: Stepped, group: Mapping[str, Any]) -> float | Tensor | None:
    """A tensor, float64, where the number is on an accelerator; None where none is kept. Some optimizers count for a group."""
    state = stepped.optimizer.state.get(stepped.key) or {}
    step = state.get("step", group.get("step"))
    if isinstance(step, Tensor):
        return step.detach().to(torch.float64, copy=True) if step.device.type != "cpu" else float(step.item())
    return None if step is None else float(step)


def made(now: float | Tensor, before: float | Tensor | None = None) -> float | Tensor:
    """1 where there were more steps than ``before``, or any; else 0. Float64, one element, where ``now`` is a tensor."""
    more = now - (0.0 if before is None else before)
    return more.ne(0).to(torch.float64) if isinstance(more, Tensor) else float(more != 0)


# --- ``ur_distribution``: what Adam makes of its moments, as histograms.
#
# With the moments of the step that was just made, ``m`` and ``v`` corrected for their bias:
#
#     update = m / (sqrt(v) + eps)        ratio = m / sqrt(v)
#
# the first as the optimizer applies it, before the learning rate; the second 0 where both moments are 0, as nothing was
# updated. Kingma and Ba (2015), "Adam: A method for stochastic optimization".

ADAMS: Final = frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "CPUAdam", "HybridAdam"})
"""Classes, by name, whose step is this rule; a class made from one of them counts."""

Correction = float | Tensor


@dataclass(frozen=True, slots=True)
class Moments:
    """What the step of a parameter was computed from.

    Attributes:
        mean: ``exp_avg``.
        square: ``exp_avg_sq``, or the greatest that it has been.
        mean_correction: What ``mean`` is to be divided by; a tensor where the step's number is on a device.
        square_correction: The same of ``square``.
        made: 1 where the step was made, float64, one element; 0 where the optimizer has skipped it on its own.
    """

    mean: Tensor
    square: Tensor
    mean_correction: Correction
    square_correction: Correction
    eps: float
    made: float | Tensor


class AdamCollector(UpdateCollector):
    """``adam_update`` and ``adam_ratio``."""

    def __init__(self, watched: ParameterContext, eps: float) -> None:
        self._update = watched.series("adam_update")
        self._ratio = watched.series("adam_ratio")
        self._framework = watched.framework
        self._failures = watched.failures
        self._kernel = watched.recorder.host
        self._eps = eps
        self._steps: dict[NamedParameter, float | Tensor] = {}

    def before_step(self, stepping: OptimizerTurn) -> None:
        """Remember how many steps were made: what is not stepped now has no update."""
        groups, self._steps = Groups(), {}
        self._update.each(lambda parameter: self._remember(parameter, stepping.optimizer, groups), stepping.held)

    def _remember(self, parameter: NamedParameter, optimizer: Optimizer, groups: Groups) -> None:
        stepped = self._framework.stepped(parameter, optimizer)
        if stepped is not None and (step := steps_made(stepped, groups.of(stepped) or {})) is not None:
            self._steps[parameter] = step

    def after_step(self, stepping: OptimizerTurn) -> None:
        optimizer = stepping.optimizer
        if optimizer is None:
            return
        groups = Groups()
        counted: dict[NamedParameter, ComputedRow] = {}

        def update(parameter: NamedParameter) -> ComputedRow | None:
            moments = self._moments(parameter, optimizer, groups)
            if moments is None:
                return None
            updates, counted[parameter] = self._count(moments)
            return updates

        self._update.record_computed(update, stepping.held)
        self._ratio.record_computed(lambda parameter: counted.pop(parameter, None), stepping.held)

    def _moments(self, parameter: NamedParameter, optimizer: Optimizer, groups: Groups) -> Moments | None:
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
        return Moments(mean, square, corrections[0], corrections[1], float(group["eps"]), made(step, before))

    def _count(self, moments: Moments) -> tuple[ComputedRow, ComputedRow]:
        updates, ratios = (signed(moments.mean, self._kernel, self._eps) for _ in range(2))
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
                "ur_distribution", f"ur_distribution records what Adam makes of its moments, and {name} is no Adam: no rows."
            )
        return known


def _ratio(mean: Tensor, root: Tensor, into: Tensor) -> Tensor:
    if root.is_cpu and root.amin().item() > 0:
        return torch.div(mean, root, out=into)
    neither = (mean == 0) & (root == 0)
    return torch.div(mean, root, out=into).masked_fill_(neither, 0)


def _correction(beta: float | Tensor, step: float | Tensor, group: Mapping[str, Any]) -> Correction:
    """A hyperparameter may be a tensor, too; its value is taken where it is."""
    if group.get("bias_correction", True) in (False, 0):
        return 1.0
    exact = beta.detach().to(torch.float64) if isinstance(beta, Tensor) else beta
    corrected: Correction = 1 - exact**step
    return corrected


# --- ``mg_direction``: how much of a gradient points where the momentum does.


class DirectionCollector(UpdateCollector):
    """Compares the reduced gradient with the momentum before the step.

    In the first step of an optimizer there is none before, and after it the momentum is a multiple of the gradient: they agree.
    """

    def __init__(self, watched: ParameterContext) -> None:
        self._series = watched.series(DIRECTION_KIND)
        self._framework = watched.framework
        self._is_reduced = watched.is_reduced
        self._begins: dict[NamedParameter, ComputedRow] = {}

    def gradients_ready(self, stepping: OptimizerTurn) -> None:
        self._begins.clear()
        groups = Groups()
        self._series.record_computed(lambda one: self._compared(one, stepping.optimizer, groups), stepping.held)

    def after_step(self, stepping: OptimizerTurn) -> None:
        """Of what had no momentum before the step and has one now."""
        begins, self._begins = self._begins, {}
        optimizer = stepping.optimizer

        def begun(parameter: NamedParameter) -> ComputedRow | None:
            computed = begins.get(parameter)
            if computed is None or optimizer is None or self._momentum(parameter, optimizer) is None:
                return None
            step = _steps_of(self._framework.stepped(parameter, optimizer))
            # An optimizer that skips on its own may have made its state and no step.
            return computed if step is None else replace(computed, numbers={**computed.numbers, WRITES: made(step)})

        if begins and optimizer is not None:
            self._series.record_computed(begun, stepping.held)

    def forget_step(self) -> None:
        self._begins.clear()

    def _compared(self, parameter: NamedParameter, optimizer: Optimizer, groups: Groups) -> ComputedRow | None:
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
            return None  # another part of the parameter than the gradient is of
        stepped = self._framework.stepped(parameter, optimizer)
        group = None if stepped is None else groups.of(stepped)
        uphill = group is not None and bool(group.get("maximize"))
        agreeing = agreement(held, momentum.view(held.shape), uphill=uphill)
        step = _steps_of(stepped)
        began = 1.0 if step is None else made(step)  # a momentum of no step yet is none
        if isinstance(began, Tensor):
            agreeing = torch.where(began > 0, agreeing, agreement(held, held))
        elif not began:
            agreeing = agreement(held, held)
        return _share(agreeing, held)

    def _momentum(self, parameter: NamedParameter, optimizer: Optimizer) -> Tensor | None:
        momentum = self._framework.moment("exp_avg", parameter, optimizer)
        return None if momentum is None else local_shard(momentum)


def _steps_of(stepped: Stepped | None) -> float | Tensor | None:
    return None if stepped is None else steps_made(stepped, stepped.group or {})


def _share(agreeing: Tensor, x: Tensor) -> ComputedRow:
    return ComputedRow({COUNT: float(x.numel()), SUM: agreeing}, x)


new_updates = partial(wanted, ratio=RatioCollector, direction=DirectionCollector, adam=AdamCollector)
