"""Decides which rank writes a series: one rank writes each replicated tensor, so that all files together hold it once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from monitor.series import KIND_TABLE, LOCAL, Placement, Ranks, ranks_of

SAME_AFTER_REDUCTION: Final = frozenset(kind.name for kind in KIND_TABLE if kind.replicated)
"""Kinds in which the ranks of a data-parallel group hold replicas; their activations and unreduced gradients differ."""

OF_PARAMETERS: Final = frozenset(kind.name for kind in KIND_TABLE if kind.replicated or kind.of == "parameter")
"""Kinds in which the ranks of a tensor-parallel group hold replicas of a parameter that they do not split."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The rules for one rank. They apply before computing, so that a replica costs nothing on ranks that do not write it.

    Attributes:
        module_ranks: The ranks to be monitored, in any order; empty for all.
        dp_group: Ranks of this rank's data-parallel group; None if the user passed none, and then every rank writes.
        tp_group: The same for tensor parallelism.
        pp_group: The same for pipeline parallelism.
        staged: Whether the ranks may have different parts of one model, under the same names.
        claims: Whether the first rank also writes for ranks that only a wrapper shows to hold replicas (``unclaimed``).
    """

    rank: int
    world_size: int = 1
    module_ranks: Collection[int] = ()
    dp_group: Collection[int] | None = None
    tp_group: Collection[int] | None = None
    pp_group: Collection[int] | None = None
    staged: bool = False
    claims: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "module_ranks", frozenset(self.module_ranks))  # looked up for thousands of ranks a series

    @property
    def monitored(self) -> bool:
        """Whether this rank records anything."""
        return not self.module_ranks or self.rank in self.module_ranks

    def placed(self, kind: str, known: Placement, *, tensor_parallel: bool = False) -> Placement:
        """The placement of a series, completed from the groups that the user passed.

        Args:
            kind: The series' kind.
            known: The placement that the tensor and the framework show.
            tensor_parallel: Whether the tensor-parallel ranks hold different numbers (``tensor_model_parallel``).
        """
        if known.partial and not known.differing:
            return known  # a term of an unknown sum
        dp_group = known.data_parallel if known.data_parallel and self.dp_group else self.dp_group
        groups = [known.replicas, dp_group if kind in SAME_AFTER_REDUCTION else None]
        groups.append(self.tp_group if kind in OF_PARAMETERS and not tensor_parallel else None)
        groups.append(known.unclaimed if self.claims and not known.assumed else None)
        others = {*(known.shard.ranks if known.shard else ()), *known.differing} - {self.rank}
        # Ranks that shard the tensor hold no replicas, whatever group they form.
        alike = alike_over(self.rank, [group for group in groups if group and not others.intersection(group)])
        replicas = tuple(rank for rank in alike if 0 <= rank < self.world_size) if alike else ()
        unclaimed = () if set(known.unclaimed) <= set(replicas) else known.unclaimed
        return replace(known, replicas=replicas, unclaimed=unclaimed, differing=(), data_parallel=())

    def assumed(self, kind: str, placed: Placement) -> Placement:
        """``placed``; for a parameter of unknown placement, the assumption that every rank of the job holds a replica."""
        if placed != LOCAL or kind not in SAME_AFTER_REDUCTION or self.staged or self.world_size < 2:
            return placed
        return Placement(unclaimed=_all_ranks(self.world_size), assumed=True)

    @property
    def may_assume(self) -> bool:
        """Whether ranks of unknown relation may be assumed to hold replicas: the user passed no data-parallel group, and no
        rank has another part of the model.
        """
        return self.dp_group is None and not self.staged

    def counts_apart(self, kind: str, placed: Placement) -> bool:
        """Whether a parameter may have replicas that count as other tensors: the job has more ranks than its pipeline and its
        tensor-parallel group, the user passed no data-parallel group, and the model shows none.
        """
        if kind not in SAME_AFTER_REDUCTION or self.dp_group is not None or len(self.pp_group or ()) < 2:
            return False
        alone = replace(placed, replicas=()) == LOCAL and set(placed.replicas) <= set(self.tp_group or ())
        return alone and len(self.pp_group or ()) * len(self.tp_group or (self.rank,)) < self.world_size

    def writes(self, placement: Placement) -> bool:
        """Whether this rank writes a series: it is the first monitored rank of those that hold it."""
        return self.monitored and (not placement.replicas or self.rank == self.owner(placement))

    def owner(self, placement: Placement) -> int | None:
        """The rank that writes a replicated series; None if there are no replicas, or none of them is monitored.

        It is the lowest rank, so that no two ranks defer to each other.
        """
        return next((rank for rank in placement.replicas if not self.module_ranks or rank in self.module_ranks), None)


def no_rank_monitored(module_ranks: Collection[int], world_size: int) -> str | None:
    """A warning if ``module_ranks`` names no rank of the job; None if it names one, or is empty."""
    if not module_ranks or any(0 <= rank < world_size for rank in module_ranks):
        return None
    return (
        f"module_ranks {sorted(module_ranks)} names no rank of this job, whose ranks are 0 to {world_size - 1}: "
        "nothing will be recorded"
    )


@cache
def _all_ranks(world_size: int) -> Ranks:
    return tuple(range(world_size))


def reaches(ownership: Ownership, rank: int, world_size: int, groups: Sequence[Iterable[int]]) -> bool:
    """Whether a gradient that was summed over ``groups`` holds the term of every rank that shares the parameter.

    The sharing ranks are those of the data-parallel group. If the user passed none, they are all ranks of the job except
    those of ``tp_group`` and ``pp_group``, which hold other parts of the model.

    Args:
        rank, world_size: The current values; the ownership may have been made before they were known.
        groups: Groups that the gradient was summed over, or whose members hold other parts of the same tensor.
    """
    return not _sharing(ownership, rank, world_size, groups)


def adds_terms_of_others(
    ownership: Ownership, rank: int, world_size: int, parts: Sequence[Iterable[int]], summed_over: Iterable[int]
) -> bool:
    """Whether a sum over ``summed_over`` adds the term of another rank that shares the parameter, as ``reaches`` says.

    Args:
        parts: Groups whose members hold other parts of the same tensor.
    """
    return not _sharing(ownership, rank, world_size, parts).isdisjoint(summed_over)


def beyond(ownership: Ownership, rank: int, parts: Sequence[Iterable[int]], summed_over: Iterable[Iterable[int]]) -> Ranks:
    """The other ranks that a gradient was summed over, and that are in none of the groups that the user passed with a
    data-parallel group. They hold replicas that no group declares.

    Args:
        parts: Groups whose members hold other parts of the same tensor.
    """
    if ownership.dp_group is None:
        return ()
    passed = (ownership.dp_group, ownership.tp_group, ownership.pp_group, *parts)
    declared = alike_over(rank, [group for group in passed if group])
    return ranks_of({one for group in summed_over for one in group} - {rank, *declared})


def _sharing(ownership: Ownership, rank: int, world_size: int, reached: Sequence[Iterable[int]]) -> set[int]:
    """The other ranks that share a parameter, except those that ``reached`` leads to."""
    model_parallel = [group for group in (ownership.tp_group, ownership.pp_group) if group and ownership.dp_group is None]
    alike = alike_over(rank, [group for group in (*model_parallel, *reached) if group])
    return {*(range(world_size) if ownership.dp_group is None else ownership.dp_group)} - {rank, *alike}


def alike_over(rank: int, groups: Sequence[Iterable[int]]) -> Ranks:
    """The ranks that hold what ``rank`` holds, when the ranks within each of ``groups`` do.

    A rank of the data-parallel group has a tensor-parallel group of its own, which shares no group with this rank. In a grid
    of ranks, its members are this rank's tensor-parallel ranks, shifted: r + (d - r) + (t - r).

    Returns:
        Empty if no other rank holds the same.
    """
    alike = {rank}
    for group in map(set, groups):
        if rank not in group or group <= alike:
            continue
        alike = group if alike <= group else {held + mate - rank for held in alike for mate in group}
    return ranks_of(alike) if len(alike) > 1 else ()
