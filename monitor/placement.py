"""How what one rank holds of a series relates to what the other ranks hold: replicas, shards, or neither."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

Ranks = tuple[int, ...]
"""Global ranks, ascending and each once."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a tensor that several ranks hold between them.

    Attributes:
        ranks: Those that hold the parts, this one among them; of parts that are replicated as well, one set of them.
        global_shape: Of the whole tensor.
        offset: Index of the part's first element in each dimension of the whole; of a flat part one number, in the flattened
            whole. Empty where the part does not lie in one piece.
        flat: Whether the part is a run of elements of the flattened whole, as FSDP1, ZeRO and distributed optimizers cut.
    """

    ranks: Ranks
    global_shape: tuple[int, ...]
    offset: tuple[int, ...] = ()
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the numbers of a series are.

    Attributes:
        replicas: Ranks that hold the same numbers, this one among them: the first that is monitored writes them for all.
            Empty where no other rank has them.
        unclaimed: Ranks known to hold the same numbers that nobody passed a group for: all of them write.
        shard: The part that this rank holds, if it does not hold the whole.
        partial: Whether the numbers are a term of a sum over other ranks that has yet to be formed.
        differing: Ranks known to hold other numbers under the same name, the other terms of a sum among them: no group that
            somebody passes makes replicas of them. It serves to decide who writes, and is not kept.
        data_parallel: Ranks that a data-parallel group which somebody passes stands for, where they are not its own: those that
            have an expert, or those of context parallelism as well. They serve the same.
        assumed: Whether a mesh suggests ``unclaimed``, and neither a wrapper nor a group says so. It holds as long as the
            numbers of these ranks agree.
    """

    replicas: Ranks = ()
    unclaimed: Ranks = ()
    shard: Shard | None = None
    partial: bool = False
    differing: Ranks = ()
    data_parallel: Ranks = ()
    assumed: bool = False


LOCAL: Final = Placement()
"""What only this rank has, whole."""


def ranks_of(ranks: Iterable[int]) -> Ranks:
    """Any collection of ranks, as a placement spells it."""
    return tuple(sorted(set(ranks)))
