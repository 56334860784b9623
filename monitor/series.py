"""What is watched: the identity of a series and how it is spelled in every format.

A *series* is one tensor followed over time: its kind, the virtual pipeline stage it lives in and its name. A *row* is one
measurement of it, at one step and, for some kinds, one micro-step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

# --- How what one rank holds of a series relates to what the other ranks hold: replicas, shards, or neither.

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


ACTIVATION_KINDS = ("actv", "actv_grad")
GRADIENT_KINDS = ("grad_unreduced", "grad_reduced")
PARAMETER_KINDS = ("param_origin", "param_updated")
MOMENT_KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
REPLICA_KIND = "replica"
CALL_KIND = "other"
"""The kind that has rows of calls of communication operators, each of all calls of a step, among others that are none."""
FEATURE_KINDS = ("attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook", "update_ratio")
"""Kinds whose rows have columns of their own in place of ops."""
FORWARD_FEATURE_KINDS = ("attention_hook", "moe_router_logit_hook")
"""Those of them that are seen in every forward."""
WEIGHT_FEATURE_KINDS = ("linear_hook", "moe_router_weight_hook")
"""Those that are of a module's weight, as its forward finds it."""
DIRECTION_KIND = "mg_direction"
"""How much of a gradient agrees with its momentum in sign. To whoever reads, a scalar among the ``other`` ones."""
ADAM_KINDS = ("adam_update", "adam_ratio")
"""What Adam makes of its moments, with histograms of signed numbers."""
UPDATE_KINDS = ("update_ratio", DIRECTION_KIND, *ADAM_KINDS)
"""What is recorded of the optimizer's step, parameter by parameter."""
KINDS = (
    *ACTIVATION_KINDS,
    *GRADIENT_KINDS,
    *PARAMETER_KINDS,
    *MOMENT_KINDS,
    CALL_KIND,
    REPLICA_KIND,
    *FEATURE_KINDS,
    DIRECTION_KIND,
    *ADAM_KINDS,
)


NO_MICRO_STEP = -1
"""The micro-step of a row that belongs to the step as a whole."""


def shown_kind(kind: str) -> str:
    """What a kind is called in the names of files and in tags."""
    return CALL_KIND if kind == DIRECTION_KIND else kind


@dataclass(frozen=True, slots=True)
class Series:
    """One watched tensor.

    Attributes:
        kind: One of ``KINDS``; also the stem of its CSV files.
        vpp_stage: Index of the model chunk (virtual pipeline stage), 0 for an ordinary model.
        name: A parameter's name, or ``{module}.{input|output}[_{i}][#{call}]``; of a ``replica``, what another rank writes in
            full: ``{kind}/{name}``.
    """

    kind: str
    vpp_stage: int
    name: str

    def tag(self, rank: int, micro_step: int = NO_MICRO_STEP) -> str:
        """The TensorBoard tag and event ``tag_name``, without its ``_{op}``."""
        place = f":{micro_step}" if micro_step != NO_MICRO_STEP else ""
        return f"{self.vpp_stage}:{self.name}{place}/rank{rank}/{shown_kind(self.kind)}"


class SeriesTable:
    """Every series of a rank, numbered in the order in which they were first seen.

    Append-only: the training thread adds, the writer thread reads what it was told of; a number never changes its meaning.
    Beside them stands how what the rank holds of a series relates to what others hold.
    """

    def __init__(self, series: Iterable[Series] = ()) -> None:
        self._series: list[Series] = []
        self._index: dict[Series, int] = {}
        self._placements: dict[Series, Placement] = {}
        self._ranks: dict[Ranks, Ranks] = {}
        for one in series:
            self.index_of(one)

    def index_of(self, series: Series) -> int:
        """The number of ``series``, given to it now if it is new."""
        index = self._index.get(series)
        if index is None:
            index = self._index[series] = len(self._series)
            self._series.append(series)
        return index

    def place(self, series: Series, placement: Placement) -> None:
        """Say how what this rank holds of ``series`` relates to what others hold; before it is recorded."""
        if placement != LOCAL:
            self._placements[series] = self._sharing_ranks(placement)
        else:  # goes without saying; but an earlier attachment may have said something else
            self._placements.pop(series, None)

    def placement(self, series: Series) -> Placement:
        """``LOCAL`` where nobody has said anything."""
        return self._placements.get(series, LOCAL)

    @property
    def placements(self) -> Mapping[Series, Placement]:
        """Of the series that are not ``LOCAL``, recorded already or not."""
        return self._placements

    def _sharing_ranks(self, placement: Placement) -> Placement:
        """With each set of ranks held once: one for every series would come to gigabytes in a job of thousands of ranks."""
        once, shard = self._ranks.setdefault, placement.shard
        return replace(
            placement,
            replicas=once(placement.replicas, placement.replicas),
            unclaimed=once(placement.unclaimed, placement.unclaimed),
            shard=None if shard is None else replace(shard, ranks=once(shard.ranks, shard.ranks)),
        )

    def __getitem__(self, index: int) -> Series:
        return self._series[index]

    def __len__(self) -> int:
        return len(self._series)

    def __iter__(self) -> Iterator[Series]:
        return iter(self._series)
