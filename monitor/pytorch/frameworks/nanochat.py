"""How nanochat's optimizers lay out their state: what one tensor holds of several parameters, and one rank of one parameter.

``MuonAdamW`` steps groups of matrices of one shape together, and keeps their momenta in one stack under the first of them.
``DistMuonAdamW`` deals the matrices of a group out to the ranks, a run of them each, and large parameters of its other groups
in equal slices of rows. It reduces gradients inside its step. Both are known by their names: nanochat is no package to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from monitor.series import Placement, Shard, ranks_of

DEALING: Final = "DistMuonAdamW"
"""The class that deals its work out to all ranks of the job."""

WHOLE_BELOW: Final = 1024
"""Elements of a parameter from which on ``DistMuonAdamW`` cuts it into slices."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is in a stack.

    Attributes:
        parameters: Of its group. The stack is kept under the first.
        place: Of the parameter in the group.
        size: How many the group had.
        index: Of the parameter in this rank's stack: below 0 or from ``among`` on where another rank has it.
        among: Entries of this rank's stack.
    """

    parameters: Sequence[Tensor]
    place: int
    size: int
    index: int
    among: int

    def holds(self, parameter: Tensor) -> bool:
        """Whether the group is still as it was when this was made."""
        return len(self.parameters) == self.size and self.parameters[self.place] is parameter


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows of a parameter that one rank steps.

    Attributes:
        shape: Of the slice.
        first: Its first row.
    """

    shape: tuple[int, ...]
    first: int


def places_in_stacks(optimizer: Optimizer) -> Iterator[tuple[int, Place]]:
    """Where each parameter would be, by its id, were the momenta of its group stacked."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        if any(one.shape != parameters[0].shape for one in parameters):
            continue
        among, first = len(parameters), 0
        if _deals(optimizer):
            among = -(-len(parameters) // dist.get_world_size())
            first = dist.get_rank() * among
        for place, one in enumerate(parameters):
            yield id(one), Place(parameters, place, len(parameters), place - first, among)


def slice_of(optimizer: Optimizer, parameter: Tensor) -> Slice | None:
    """What this rank steps of a parameter that is cut into slices; None of any other."""
    if not _deals(optimizer) or parameter.dim() == 0 or parameter.numel() < WHOLE_BELOW:
        return None
    rows = parameter.shape[0] // dist.get_world_size()
    return Slice((rows, *parameter.shape[1:]), rows * dist.get_rank())


def placement_of_moments(optimizers: Sequence[Optimizer], parameter: Tensor) -> Placement | None:
    """Where the moments of a parameter are; None where no optimizer deals them out."""
    group = next((group for one in optimizers if _deals(one) for group in one.param_groups if _lists(group, parameter)), None)
    if group is None:
        return None
    ranks = ranks_of(range(dist.get_world_size()))
    if group.get("kind") == "muon":
        return Placement(differing=ranks)
    cut = next((found for one in optimizers if (found := slice_of(one, parameter)) is not None), None)
    if cut is None:
        return Placement(unclaimed=ranks)
    offset = cut.first, *(0 for _ in cut.shape[1:])
    return Placement(shard=Shard(ranks, tuple(parameter.shape), offset))


def _deals(optimizer: Optimizer) -> bool:
    is_one = any(base.__name__ == DEALING for base in type(optimizer).__mro__)
    return is_one and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _lists(group: dict[str, Any], parameter: Tensor) -> bool:
    return any(one is parameter for one in group["params"])
