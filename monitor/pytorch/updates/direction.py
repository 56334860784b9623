"""``mg_direction``: how much of a gradient points where the momentum does."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from monitor.pytorch.frameworks.dtensor import part_like
from monitor.pytorch.frameworks.moments import Stepped
from monitor.pytorch.updates.groups import Groups
from monitor.pytorch.updates.stepping import made, steps_made
from monitor.recording.optimizer_turns import Stepping
from monitor.recording.parameter_series import Computed, NamedParameter
from monitor.recording.parameters import WatchedParameters
from monitor.recording.updates import UpdateCollector
from monitor.series import DIRECTION_KIND
from monitor.stats.partials import COUNT, SUM, WRITES
from monitor.stats.torch.tensors import local_shard
from monitor.stats.torch.updates import agreement


class DirectionCollector(UpdateCollector):
    """Compares the reduced gradient with the momentum before the step.

    In the first step of an optimizer there is none before, and after it the momentum is a multiple of the gradient: they agree.
    """

    def __init__(self, watched: WatchedParameters) -> None:
        self._series = watched.series(DIRECTION_KIND)
        self._framework = watched.framework
        self._is_reduced = watched.is_reduced
        self._begins: dict[NamedParameter, Computed] = {}

    def gradients_ready(self, stepping: Stepping) -> None:
        self._begins.clear()
        groups = Groups()
        self._series.record_computed(lambda one: self._compared(one, stepping.optimizer, groups), stepping.held)

    def after_step(self, stepping: Stepping) -> None:
        """Of what had no momentum before the step and has one now."""
        begins, self._begins = self._begins, {}
        optimizer = stepping.optimizer

        def begun(parameter: NamedParameter) -> Computed | None:
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

    def _compared(self, parameter: NamedParameter, optimizer: Optimizer, groups: Groups) -> Computed | None:
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


def _share(agreeing: Tensor, x: Tensor) -> Computed:
    return Computed({COUNT: float(x.numel()), SUM: agreeing}, x)
