"""The identity of a recorded series: its kind, name and tag, and its placement on the ranks (replicas, shards).

A *series* is one tensor over time. Its identity is its kind, its virtual pipeline stage and its name. A *row* is one
measurement of a series, at one step and, for some kinds, one micro-step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

# --- Placement: whether other ranks hold replicas or shards of the same tensor.

Ranks = tuple[int, ...]
"""Global ranks, ascending and each once."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of a tensor that is split over several ranks.

    Attributes:
        ranks: The ranks that hold the shards, including this one; if the shards are replicated as well, one set of ranks.
        global_shape: Shape of the whole tensor.
        offset: Index of the shard's first element in each dimension of the whole tensor; for a flat shard one number, the
            index in the flattened tensor. Empty if the shard is not contiguous.
        flat: Whether the shard is a contiguous range of the flattened tensor, as in FSDP1, ZeRO and distributed optimizers.
    """

    ranks: Ranks
    global_shape: tuple[int, ...]
    offset: tuple[int, ...] = ()
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Which ranks hold the tensor of a series, and which part of it.

    Attributes:
        replicas: Ranks that hold the same numbers, including this one. The first monitored rank writes them. Empty if no
            other rank holds them.
        unclaimed: Ranks that are known to hold the same numbers, but belong to no group that was passed. All of them write.
        shard: The part that this rank holds, if it does not hold the whole.
        partial: Whether the numbers are a term of a sum over other ranks that is not formed yet.
        differing: Ranks that are known to hold other numbers under the same name, such as the other terms of a sum. No
            passed group makes them replicas. Used to decide which rank writes; not saved.
        data_parallel: The ranks to use in place of the passed data-parallel group: the ranks that hold an expert, or those of
            context parallelism as well. Used to decide which rank writes; not saved.
        assumed: Whether only a mesh suggests ``unclaimed``, without a wrapper or a group that confirms it. The assumption
            holds as long as the numbers of these ranks agree.
    """

    replicas: Ranks = ()
    unclaimed: Ranks = ()
    shard: Shard | None = None
    partial: bool = False
    differing: Ranks = ()
    data_parallel: Ranks = ()
    assumed: bool = False


LOCAL: Final = Placement()
"""Only this rank holds the tensor, and holds all of it."""


def ranks_of(ranks: Iterable[int]) -> Ranks:
    """Any collection of ranks in the form that a placement uses: ascending, each once."""
    return tuple(sorted(set(ranks)))


ACTIVATION_KINDS = ("actv", "actv_grad")
GRADIENT_KINDS = ("grad_unreduced", "grad_reduced")
PARAMETER_KINDS = ("param_origin", "param_updated")
MOMENT_KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
REPLICA_KIND = "replica"
CALL_KIND = "other"
"""One row per communication operator and step, which combines its calls, and rows of scalars."""
FEATURE_KINDS = ("attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook", "update_ratio")
"""Kinds whose rows have columns of their own in place of ops."""
FORWARD_FEATURE_KINDS = ("attention_hook", "moe_router_logit_hook")
"""Feature kinds that are measured in every forward."""
WEIGHT_FEATURE_KINDS = ("linear_hook", "moe_router_weight_hook")
"""Feature kinds of a module's weight, read when its forward begins."""
DIRECTION_KIND = "mg_direction"
"""The fraction of gradient elements whose sign equals the momentum's. In files it is a scalar of kind ``other``."""
ADAM_KINDS = ("adam_update", "adam_ratio")
"""Vectors that Adam computes from its moments, with histograms of signed numbers."""
UPDATE_KINDS = ("update_ratio", DIRECTION_KIND, *ADAM_KINDS)
"""Kinds that describe the optimizer's step of each parameter."""
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
    """The name of a kind in file names and tags."""
    return CALL_KIND if kind == DIRECTION_KIND else kind


@dataclass(frozen=True, slots=True)
class Series:
    """The identity of one recorded tensor.

    Attributes:
        kind: One of ``KINDS``; also the stem of its CSV files.
        vpp_stage: Index of the model chunk (virtual pipeline stage), 0 for an ordinary model.
        name: A parameter's name, or ``{module}.{input|output}[_{i}][#{call}]``. For a ``replica``: ``{kind}/{name}`` of the
            series that another rank writes in full.
    """

    kind: str
    vpp_stage: int
    name: str

    def tag(self, rank: int, micro_step: int = NO_MICRO_STEP) -> str:
        """The TensorBoard tag and event ``tag_name``, without its ``_{op}``."""
        place = f":{micro_step}" if micro_step != NO_MICRO_STEP else ""
        return f"{self.vpp_stage}:{self.name}{place}/rank{rank}/{shown_kind(self.kind)}"


class SeriesTable:
    """Every series of a rank, numbered in the order of first use, and their placements.

    Append-only: the training thread adds series, the writer thread reads those whose numbers it has received. A number never
    changes its meaning.
    """

    def __init__(self, series: Iterable[Series] = ()) -> None:
        self._series: list[Series] = []
        self._index: dict[Series, int] = {}
        self._placements: dict[Series, Placement] = {}
        self._ranks: dict[Ranks, Ranks] = {}
        for one in series:
            self.index_of(one)

    def index_of(self, series: Series) -> int:
        """The number of ``series``. A new series gets the next number."""
        index = self._index.get(series)
        if index is None:
            index = self._index[series] = len(self._series)
            self._series.append(series)
        return index

    def place(self, series: Series, placement: Placement) -> None:
        """Set the placement of ``series``, before it is recorded."""
        if placement != LOCAL:
            self._placements[series] = self._sharing_ranks(placement)
        else:  # the default; but an earlier attachment may have set another placement
            self._placements.pop(series, None)

    def placement(self, series: Series) -> Placement:
        """The placement of ``series``; ``LOCAL`` if none was set."""
        return self._placements.get(series, LOCAL)

    @property
    def placements(self) -> Mapping[Series, Placement]:
        """The placements of all series that are not ``LOCAL``, whether recorded already or not."""
        return self._placements

    def _sharing_ranks(self, placement: Placement) -> Placement:
        """A copy that shares equal rank tuples: a tuple per series would take gigabytes in a job of thousands of ranks."""
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
