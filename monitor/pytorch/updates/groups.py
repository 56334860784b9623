"""The parameter groups of optimizers, by what they step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from monitor.pytorch.frameworks.moments import Stepped


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
