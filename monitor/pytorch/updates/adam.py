"""``ur_distribution``: what Adam makes of its moments, as histograms.

With the moments of the step that was just made, ``m`` and ``v`` corrected for their bias:

    update = m / (sqrt(v) + eps)        ratio = m / sqrt(v)

the first as the optimizer applies it, before the learning rate; the second 0 where both moments are 0, as nothing was updated.
Kingma and Ba (2015), "Adam: A method for stochastic optimization".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from monitor.pytorch.updates.groups import Groups
from monitor.pytorch.updates.stepping import made, steps_made
from monitor.recording.optimizer_turns import Stepping
from monitor.recording.parameter_series import Computed, NamedParameter
from monitor.recording.parameters import WatchedParameters
from monitor.recording.updates import UpdateCollector
from monitor.stats.partials import WRITES
from monitor.stats.torch.tensors import local_shard
from monitor.stats.torch.updates import Scratch, signed, together

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

    def __init__(self, watched: WatchedParameters, eps: float) -> None:
        self._update = watched.series("adam_update")
        self._ratio = watched.series("adam_ratio")
        self._framework = watched.framework
        self._failures = watched.failures
        self._kernel = watched.recorder.host
        self._eps = eps
        self._steps: dict[NamedParameter, float | Tensor] = {}

    def before_step(self, stepping: Stepping) -> None:
        """Remember how many steps were made: what is not stepped now has no update."""
        groups, self._steps = Groups(), {}
        self._update.each(lambda parameter: self._remember(parameter, stepping.optimizer, groups), stepping.held)

    def _remember(self, parameter: NamedParameter, optimizer: Optimizer, groups: Groups) -> None:
        stepped = self._framework.stepped(parameter, optimizer)
        if stepped is not None and (step := steps_made(stepped, groups.of(stepped) or {})) is not None:
            self._steps[parameter] = step

    def after_step(self, stepping: Stepping) -> None:
        optimizer = stepping.optimizer
        if optimizer is None:
            return
        groups = Groups()
        counted: dict[NamedParameter, Computed] = {}

        def update(parameter: NamedParameter) -> Computed | None:
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

    def _count(self, moments: Moments) -> tuple[Computed, Computed]:
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
            Computed({**one.numbers(), WRITES: moments.made}, moments.mean, one.histogram()) for one in (updates, ratios)
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
