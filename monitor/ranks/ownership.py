"""Who writes what: of a number that several ranks hold, one rank's files have it, so that their union holds it once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from monitor.series import MOMENT_KINDS, PARAMETER_KINDS

SAME_AFTER_REDUCTION: Final = frozenset({"grad_reduced", *PARAMETER_KINDS, *MOMENT_KINDS})
"""Kinds in which the ranks of a data-parallel group hold replicas; their activations and unreduced gradients differ."""

OF_PARAMETERS: Final = frozenset({"grad_unreduced", *SAME_AFTER_REDUCTION})
"""Kinds in which the ranks of a tensor-parallel group hold replicas of a parameter that is not split among them."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The rules for one rank. It asks before it computes, so that a replica costs nothing where it is not written.

    Attributes:
        module_ranks: The ranks to be monitored, in any order; empty for all.
        dp_group: Ranks of this rank's data-parallel group; None where the user passed none, and then every rank writes.
        tp_group: The same for tensor parallelism.
    """

    rank: int
    world_size: int = 1
    module_ranks: Collection[int] = ()
    dp_group: Collection[int] | None = None
    tp_group: Collection[int] | None = None

    @property
    def monitored(self) -> bool:
        """Whether this rank records anything."""
        return not self.module_ranks or self.rank in self.module_ranks

    def writes(self, kind: str, *, tensor_parallel: bool = False, sharded: bool = False) -> bool:
        """Whether this rank writes a series.

        Args:
            kind: The series' kind.
            tensor_parallel: Whether the parameter is split among the tensor-parallel ranks (``tensor_model_parallel``).
            sharded: Whether this rank's tensor is a part of the whole (a shard, a partial sum) and no replica.
        """
        if not self.monitored or sharded:
            return self.monitored
        dp_replica = kind in SAME_AFTER_REDUCTION
        tp_replica = kind in OF_PARAMETERS and not tensor_parallel
        return (not dp_replica or self._first_of(self.dp_group)) and (not tp_replica or self._first_of(self.tp_group))

    def _first_of(self, group: Collection[int] | None) -> bool:
        """Whether this rank is the group's first monitored one: the lowest, so that no two ranks defer to each other."""
        if group is None or self.rank not in group:
            return True
        return self.rank == min(rank for rank in group if not self.module_ranks or rank in self.module_ranks)


def nobody_monitored(module_ranks: Collection[int], world_size: int) -> str | None:
    """What to warn of when ``module_ranks`` names no rank of the job; None where it names one, or is empty."""
    if not module_ranks or any(0 <= rank < world_size for rank in module_ranks):
        return None
    return (
        f"module_ranks {sorted(module_ranks)} names no rank of this job, whose ranks are 0 to {world_size - 1}: "
        "nothing will be recorded"
    )
