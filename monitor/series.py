"""The identity of a recorded series: its kind, name and tag, and its placement on the ranks (replicas, shards).

A *series* is one tensor over time. Its identity is its kind, its virtual pipeline stage and its name. A *row* is one
measurement of a series, at one step and, for some kinds, one micro-step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

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


# --- Kinds. Each kind has one entry in ``KIND_TABLE``. The tuples below it are derived from the entries.


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a kind that has its own columns in place of ops.

    Attributes:
        formula: A name in ``FORMULAS`` of ``monitor/stats/features.py``: how partials give the column.
        partial: The partial that the formula reads, if it reads a single one.
        combines: How values of CSV rows combine, since these rows have no partials: as means weighted with the count, as norms,
            sums or maxima, or as the ratio of ``update_norm`` and ``weight_norm``. ``experts``: computed anew from the rows of
            experts. ``never``: not even partials give the number of a whole from those of its parts. None: the weights are in
            partials only.
    """

    name: str
    formula: str
    partial: str = ""
    combines: Literal["weighted", "norm", "sum", "max", "ratio", "experts", "never"] | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of series, with everything that differs between kinds outside of their collectors.

    Attributes:
        name: Its name in series; also in files, unless ``shown_as`` names another kind.
        field: The configuration field that switches it on; '' if there is none.
        of: What a series belongs to.
        phase: When rows are measured, which orders rows of different ranks: ``step`` is after every backward. None: only the
            order within a rank is known.
        group: The name of the derived tuple that it is in.
        role: The name of its ``Role`` in ``monitor/anomalies/ranking/graph.py``; '' for ``OTHER``.
        fed_by: Kinds of the same parameter that it is computed from within a step. Moments are those from before the step: this
            step's gradient shows in the moments of the next step.
        replicated: Whether the ranks of a data-parallel group hold replicas.
        per_micro_step: Whether each micro-step has a row of its own, unless the field ``micro_steps`` combines them.
        of_frozen: Whether parameters that are not trained have rows, too.
        estimated: Whether the start-up estimate counts it. Kinds that few optimizers have are left out.
        warned: Whether to warn if there are no rows although the field is on. One row in a group of moments is enough.
        after: Complete steps after which there must be rows.
        why_none: A likely reason why there are no rows, for the warning.
        signed: Whether its histograms are of signed numbers.
        shown_as: The kind under which files show its rows, which are scalars then.
        columns: Its columns in place of ops; empty for statistics of a tensor.
        of_elements: Whether the partial ``count`` counts elements of a tensor.
        watcher: For kinds of ``l2_targets``: ``module:class`` of the ``FeatureWatcher`` that measures it.
        suffix: What the name of a series has after the name of the module.
        of_ranks: Whether its rows belong to ranks alone, so that a merge has no rows of whole tensors of it.
        checked: Whether copies of a tensor on several ranks must have the same bits.
    """

    name: str
    field: str = ""
    of: Literal["module", "parameter", "rank"] = "rank"
    phase: Literal["forward", "backward", "step"] | None = None
    group: Literal["activation", "gradient", "parameter", "moment", ""] = ""
    role: str = ""
    fed_by: tuple[str, ...] = ()
    replicated: bool = False
    per_micro_step: bool = False
    of_frozen: bool = False
    estimated: bool = True
    warned: bool = False
    after: int = 1
    why_none: str = ""
    signed: bool = False
    shown_as: str = ""
    columns: tuple[Column, ...] = ()
    of_elements: bool = True
    watcher: str = ""
    suffix: str = ""
    of_ranks: bool = False
    checked: bool = False


def _activation(name: str, phase: Literal["forward", "backward"]) -> Kind:
    role, why = phase.upper(), "Modules in evaluation mode, or called without gradients, have none. "
    return Kind(name, "xy_distribution", "module", phase, "activation", role, per_micro_step=True, warned=True, why_none=why)


def _of_step(name: str, field: str, **more: Any) -> Kind:
    """A kind of parameters that is measured when the optimizer steps."""
    return Kind(name, field, "parameter", "step", replicated=True, **more)


COLLECTIVE_INPUT: Final = "pre_0"
"""The last part of the name of a series that holds what a rank gave to a collective."""
COLLECTIVE_OUTPUT: Final = "post_0"
"""The same of what a rank got from it."""

EVALUATION: Final = "evaluation_mode"
"""The note that a model trains in evaluation mode, so that activations have no rows."""

WITHOUT_ROWS: Final = "missing for gradients"
"""How the manifest's note under ``grad_reduced`` begins that names gradients without rows."""

OF_ONE_RANK: Final = "weights"
"""The note under which a manifest names weights and moments of which one rank writes its own, though others may differ."""

IN_NO_GROUP: Final = "ranks in no group"
"""The note that gradients are summed over ranks that are in no group which was passed."""

LEFT_BY_STEP: Final = "_updated"
"""What the name of a kind has after that of the same tensors before the step."""


def _moment(name: str, *, estimated: bool = True) -> Kind:
    """A moment of the optimizer, which a new optimizer does not have in its first step."""
    why = "An optimizer without momentum keeps no moments. "
    more = {"estimated": estimated, "warned": True, "after": 2, "why_none": why, "checked": True}
    return _of_step(name, "mv_distribution", group="moment", role="MOMENT", **more)


def _moment_left(name: str) -> Kind:
    """The same moment after the step; with ``"replica_check": "all"``."""
    more = {"role": "MOMENT", "fed_by": ("grad_reduced", name), "estimated": False, "checked": True}
    return _of_step(f"{name}{LEFT_BY_STEP}", "mv_distribution", **more)


def _feature(
    name: str, phase: Literal["forward", "step"], watcher: str, suffix: str, *columns: Column, of_elements: bool = False
) -> Kind:
    """A kind of the modules that ``l2_targets`` names: measured in every forward, or of a weight when a forward begins.

    Args:
        watcher: ``module:class`` within ``monitor.recording.features``.
    """
    forward, path = phase == "forward", f"monitor.recording.features.{watcher}"
    own: Any = {"columns": columns, "of_elements": of_elements, "watcher": path, "suffix": suffix}
    return Kind(name, "recording_l2_features", "module", phase, replicated=not forward, per_micro_step=forward, **own)


REPLICA_KIND: Final = "replica"
CALL_KIND: Final = "other"
"""One row per communication operator and step, which combines its calls, and rows of scalars."""
DIRECTION_KIND: Final = "mg_direction"
"""The fraction of gradient elements whose sign equals the momentum's. In files it is a scalar of kind ``other``."""
HEALTH_KIND: Final = "optimizer_health"
"""Whether rounding swallows an optimizer's updates, and whether Adam's second moment fits the gradient."""
RUN_KIND: Final = "run"
"""The run's own numbers: what the loop logs, learning rates, and the total norm of gradients."""
LEARNING_RATE: Final = "learning_rate"
"""Among them the learning rates, each with the number of its group of parameters: ``learning_rate.0``."""
GRAD_NORM: Final = "grad_norm"
"""The norm of all gradients as one vector, before clipping."""
CLIPPED_NORM: Final = "grad_norm_clipped"
"""The same after clipping."""

_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_GRADIENT_AND_MOMENTS: Final = ("grad_reduced", *_MOMENTS)

_IN_A_STEP: Final = (
    "param_origin",
    *_GRADIENT_AND_MOMENTS,
    *(f"{name}{LEFT_BY_STEP}" for name in _MOMENTS),
    "param_updated",
)

KIND_TABLE: Final = (
    _activation("actv", "forward"),
    _activation("actv_grad", "backward"),
    Kind(
        "grad_unreduced",
        "wg_distribution",
        "parameter",
        "backward",
        "gradient",
        "LOCAL_GRADIENT",
        warned=True,
        why_none="PyTorch gradients that the loop assigns to .grad, such as those of torch.autograd.grad, have none. ",
    ),
    _of_step(
        "grad_reduced",
        "wg_distribution",
        group="gradient",
        role="GRADIENT",
        fed_by=("grad_unreduced",),
        warned=True,
        checked=True,
    ),
    _of_step(
        "param_origin",
        "param_distribution",
        group="parameter",
        role="ORIGINAL_WEIGHT",
        of_frozen=True,
        warned=True,
        checked=True,
    ),
    _of_step(
        "param_updated",
        "param_distribution",
        group="parameter",
        role="UPDATED_WEIGHT",
        fed_by=("grad_reduced", "param_origin", *_MOMENTS),
        of_frozen=True,
        checked=True,
    ),
    _moment("exp_avg"),
    _moment("exp_avg_sq"),
    _moment("max_exp_avg_sq", estimated=False),
    *map(_moment_left, _MOMENTS),
    Kind(CALL_KIND),
    Kind(REPLICA_KIND, of_ranks=True),
    # Queries, and over them the sums of the entropy of the attention weights and of their greatest.
    _feature(
        "attention_hook",
        "forward",
        "watchers:AttentionWatcher",
        "attention",
        Column("entropy", "mean", "sum"),
        Column("softmax_max", "mean", "sumsq"),
    ),
    # Queries, the sum of their entropies, the greatest score, heads, and heads above the bound. Also the queries that see a
    # sink and another key, and the sum of their weights on the sinks.
    _feature(
        "attention_head_hook",
        "forward",
        "watchers:AttentionHeadWatcher",
        "heads",
        Column("entropy", "mean", "sum"),
        Column("max_logit", "largest", "max"),
        Column("heads_above", "share of heads"),
        Column("sink", "mean of sinks", "sumsq"),
    ),
    # Elements, matrices (1), the square of the Frobenius norm, the spectral norm.
    _feature(
        "linear_hook",
        "step",
        "watchers:LinearWatcher",
        "linear",
        Column("sr", "stable rank", combines="never"),
        Column("kernel_norm", "spectral norm", combines="never"),
        Column("frobenius_norm", "Frobenius norm", combines="norm"),
        of_elements=True,
    ),
    # Pairs of experts, matrices (1), the sum of the cosines of the pairs.
    _feature(
        "moe_router_weight_hook",
        "step",
        "watchers:RouterWeightWatcher",
        "moe_router",
        Column("router_weight_similarity", "mean of one matrix", "sum", "never"),
    ),
    # Tokens, and over them the sum of the entropy of the softmax over the experts.
    _feature(
        "moe_router_logit_hook",
        "forward",
        "watchers:RouterLogitWatcher",
        "moe_router",
        Column("per_token_expert_entropy", "mean", "sum"),
    ),
    # Of a router: tokens, the sum of their squared log-sums of exponentials, the greatest logit, and counts of assignments. Of
    # an expert: the assignments of its router, and those to it.
    _feature(
        "moe_router_load_hook",
        "forward",
        "watchers:RouterLoadWatcher",
        "experts",
        Column("assigned", "count", "posinfs", "sum"),  # first, since all rows have it: reports judge it
        Column("load", "load of an expert", "posinfs", "experts"),
        Column("load_p05", "of the experts of one router", "min", "experts"),
        Column("load_p50", "of the experts of one router", "sumsq", "experts"),
        Column("load_p95", "of the experts of one router", "m2", "experts"),
        Column("imbalance", "of the experts of one router", "m3", "experts"),
        Column("dead_experts", "of the experts of one router", "m4", "experts"),
        Column("dropped", "share dropped"),
        Column("z_loss", "mean of a router", "sum"),
        Column("logit_max", "of a router", "max", "max"),
    ),
    # Tokens, and over them the sum of their norms; forwards (1), the sum of their effective ranks, the largest ratio of the
    # largest magnitude and the median, the channel of the largest magnitude and its square; forwards with a share of active
    # units (1 or 0), and that share.
    _feature(
        "activation_hook",
        "forward",
        "activations:ActivationWatcher",
        "activation",
        Column("massive", "largest ratio", "max"),
        Column("massive_channel", "channel of all"),
        Column("dead_units", "rest of one share", "min"),
        Column("effective_rank", "mean of forwards", "sumsq"),
        Column("residual_norm", "mean", "sum"),
    ),
    # Elements, the squares of the norms of the update and of the weight before it.
    _of_step(
        "update_ratio",
        "update_ratio",
        of_frozen=True,
        warned=True,
        columns=(
            Column("update_ratio", "ratio of roots", combines="ratio"),
            Column("update_norm", "root", "sum", "norm"),
            Column("weight_norm", "root", "sumsq", "norm"),
        ),
    ),
    # Elements, how many have an update (``neginfs``), and how many of these stay the same (``smalls``). Elements with a second
    # moment (``sumsq``), the sum over them of gradient² / second moment, and how many are below ``eps`` (``posinfs``).
    _of_step(
        HEALTH_KIND,
        "optimizer_health",
        fed_by=_GRADIENT_AND_MOMENTS,
        warned=True,
        columns=(
            Column("staleness", "root mean square", "sum"),
            Column("swallowed", "share of updates", "smalls"),
            Column("below_eps", "share of second moments", "posinfs", "weighted"),
        ),
    ),
    # Elements, and the number of elements whose gradient and momentum have the same sign.
    _of_step(DIRECTION_KIND, "mg_direction", shown_as=CALL_KIND, columns=(Column(DIRECTION_KIND, "mean", "sum", "weighted"),)),
    # Vectors that Adam computes from its moments.
    _of_step("adam_update", "ur_distribution", fed_by=_GRADIENT_AND_MOMENTS, signed=True),
    _of_step("adam_ratio", "ur_distribution", fed_by=_GRADIENT_AND_MOMENTS, signed=True),
    # Numbers, and their sum.
    Kind(
        RUN_KIND,
        "run_numbers",
        phase="step",
        estimated=False,
        columns=(Column("value", "mean", "sum", "never"),),
        of_elements=False,
        of_ranks=True,
    ),
)
"""Every kind, in the order in which a step's rows are stored."""


def _names(which: Callable[[Kind], object] = bool) -> tuple[str, ...]:
    return tuple(kind.name for kind in KIND_TABLE if which(kind))


def kinds_asked_for(fields: Collection[str]) -> str:
    """A list of the kinds that fields of the configuration ask for; of names that ask for no kind, the names. A kind counts as
    its own field.
    """
    found = _names(lambda kind: kind.field in fields or kind.name in fields)
    return ", ".join(found or fields)


KINDS: Final = _names()
ACTIVATION_KINDS: Final = _names(lambda kind: kind.group == "activation")
GRADIENT_KINDS: Final = _names(lambda kind: kind.group == "gradient")
PARAMETER_KINDS: Final = _names(lambda kind: kind.group == "parameter")
MOMENT_KINDS: Final = _names(lambda kind: kind.group == "moment")
FEATURE_KINDS: Final = _names(lambda kind: kind.columns and not kind.shown_as)
"""Kinds whose rows have columns of their own in place of ops."""
WATCHED_KINDS: Final = {kind.name: kind for kind in KIND_TABLE if kind.watcher}
"""Kinds of the modules that ``l2_targets`` names."""
MICRO_STEP_KINDS: Final = frozenset(_names(lambda kind: kind.per_micro_step))
"""Kinds with a row for each micro-step, unless they are combined."""
CHECKED_KINDS: Final = tuple(sorted(_names(lambda kind: kind.checked), key=_IN_A_STEP.index))
"""Kinds whose bits replicas have in common, as they are computed from each other in a step."""
KINDS_OF_RANKS: Final = _names(lambda kind: kind.of_ranks)
"""Kinds without rows of whole tensors."""
SIGNED_KINDS: Final = _names(lambda kind: kind.signed)
"""Kinds with histograms of signed numbers."""

_SHOWN_AS: Final = {kind.name: kind.shown_as for kind in KIND_TABLE if kind.shown_as}

NO_MICRO_STEP = -1
"""The micro-step of a row that belongs to the step as a whole."""


def shown_kind(kind: str) -> str:
    """The name of a kind in file names and tags."""
    return _SHOWN_AS.get(kind, kind)


def encodable(text: str) -> str:
    """``text`` with escapes in place of lone surrogates, which UTF-8 cannot encode: names in files and messages."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


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

    def __post_init__(self) -> None:
        if not self.name.isascii():
            object.__setattr__(self, "name", encodable(self.name))

    def tag(self, rank: int, micro_step: int = NO_MICRO_STEP) -> str:
        """The TensorBoard tag and event ``tag_name``, without its ``_{op}``."""
        place = f":{micro_step}" if micro_step != NO_MICRO_STEP else ""
        return f"{self.vpp_stage}:{self.name}{place}/rank{rank}/{shown_kind(self.kind)}"


ACTIVATION_NAME: Final = re.compile(r"(?P<module>.*)\.(?P<slot>(?:input|output)(?:_.*?)?)(?:#(?P<call>\d{1,9}))?", re.DOTALL)
"""The name of an activation as hooks make it: its module, which tensor of it, and which call."""


def is_input(name: str) -> bool:
    """Whether the name of an activation is that of an input of a module."""
    found = ACTIVATION_NAME.fullmatch(name)
    return found is not None and found["slot"].startswith("input")


def underlying_series(series: Series) -> Series:
    """The series itself; for a replica, the series that another rank writes."""
    if series.kind != REPLICA_KIND:
        return series
    kind, slash, name = series.name.partition("/")
    return Series(kind, series.vpp_stage, name) if slash else series


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
