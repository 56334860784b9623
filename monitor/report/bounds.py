"""Bounds of recorded numbers, each with what lies beyond it, what to do then, and where the bound comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.query.sources import RowChoice
from monitor.report.facts import GLOBAL_NAME, Facts, KindReader
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding, Place
from monitor.report.history import Ints
from monitor.series import HEALTH_KIND


class Bound(NamedTuple):
    """Values of a column that are a fault.

    Attributes:
        kinds: The kinds with the column; empty: all that have it.
        column: Its name.
        high: Whether values from ``limit`` on are a fault; otherwise values up to ``limit``.
        means: What such a value says, after "its entropy is 0.001: ".
        then: What to do.
        source: A paper or a thread, or ``MEASURED``.
        ends: What the names of the rows end with; empty: all rows.
        in_a_row: Recorded steps in a row at which a tensor must be beyond it: single steps may be, in healthy runs.
        after: The first recorded values of a tensor that are not judged.
    """

    kinds: tuple[str, ...]
    column: str
    limit: float
    high: bool
    means: str
    then: str = ""
    source: str = ""
    in_a_row: int = 1
    after: int = 0
    ends: str = ""

    def is_of(self, kind: str, column: str) -> bool:
        """Whether a column of a kind has this bound."""
        return column == self.column and (not self.kinds or kind in self.kinds)


class BoundGroup(NamedTuple):
    """A check of a report that compares columns with bounds.

    Attributes:
        nothing: What it says if no column was recorded.
        look: See ``CheckResult``.
    """

    check: str
    nothing: str
    look: str
    bounds: tuple[Bound, ...]


MEASURED: Final = "our measurement"
LASTING: Final = 32
"""Recorded steps in a row. In eight healthy trainings of small transformers ``staleness`` was above its bound for 9 at most."""
OF_NEW_WEIGHTS: Final = 64
"""Recorded values of a weight that may have begun at 0, so that its first updates are as large as itself."""
_FEATURES: Final = '"recording_l2_features": true and l2_targets'

GROUPS: Final = (
    BoundGroup(
        "Low precision",
        "No op that counts what narrower numbers lose was recorded.",
        '"ops": ["overflow_fp16", "underflow_bf16"]',
        # FP8 needs a scale, so `trainermon precision` judges it.
        tuple(
            bound
            for name in ("fp16", "bf16")
            for bound in (
                Bound((), f"overflow_{name}", 1e-9, True, "elements overflow this format"),
                Bound((), f"underflow_{name}", 0.9, True, "most of its elements become zero in this format"),
            )
        ),
    ),
    BoundGroup(
        "Attention",
        "It was not recorded.",
        _FEATURES,
        (
            Bound(("attention_hook",), "entropy", 0.01, False, "attention has collapsed onto single tokens"),
            Bound(("attention_hook",), "softmax_max", 0.99, True, "attention has collapsed onto single tokens"),
            Bound(
                ("attention_head_hook",),
                "max_logit",
                100.0,
                True,
                "scores of attention are so large that training may diverge",
                "See whether they keep growing. Normalise Q and K, clip them (QK-clip), or lower the learning rate.",
                "QK-clip acts from 100 on: Kimi K2, https://arxiv.org/abs/2507.20534",
            ),
            Bound(
                ("attention_head_hook",),
                "entropy",
                0.01,
                False,
                "all heads of the module attend to single tokens",
                "Lower the learning rate, or normalise the weights of Q and K.",
                "Entropy collapse: Zhai et al., https://arxiv.org/abs/2303.06296. The limit: our measurement, docs/features.md",
                ends=".heads",  # a single head may do so in a healthy model, such as one that attends to a sink
            ),
        ),
    ),
    BoundGroup(
        "Experts",
        "They were not recorded.",
        _FEATURES,
        (
            Bound(
                ("moe_router_logit_hook",),
                "per_token_expert_entropy",
                0.01,
                False,
                "every token chooses one expert with certainty",
            ),
            Bound(
                ("moe_router_weight_hook",),
                "router_weight_similarity",
                0.99,
                True,
                "all experts respond to the same tokens",
            ),
            Bound(
                ("moe_router_load_hook",),
                "logit_max",
                128.0,
                True,
                "bfloat16 rounds logits of this size by up to 0.5, which changes the probability of an expert by up to 65 %",
                "Add a router z-loss, or raise its coefficient, and compute the router in float32.",
                "Zoph et al. 2022 (ST-MoE, arXiv 2202.08906): rounding of large logits. The limit follows from the format",
            ),
            Bound(
                ("moe_router_load_hook",),
                "dropped",
                0.5,
                True,
                "these assignments exceed the capacity of their experts, and the tokens skip them",
                "Raise the capacity factor, or the coefficient of the load-balancing loss.",
                "Fedus et al. 2021 (Switch Transformer, arXiv 2101.03961): dropped tokens. The limit is our choice",
            ),
        ),
    ),
    BoundGroup(
        "Activations",
        "The outputs of no module were looked at.",
        _FEATURES,
        (
            Bound(
                ("activation_hook",),
                "dead_units",
                0.5,
                True,
                "most of its units are dead: they compute nothing and receive no gradient",
                "Look at the learning rate before this step, and at the bias in front of the activation.",
                "Lu et al. 2019, arXiv:1903.06733; Voita et al. 2023, arXiv:2309.04827",
            ),
            Bound(
                ("activation_hook",),
                "effective_rank",
                1.001,
                False,
                "all tokens point in the same direction",
                "Look at the residual connections and norms in front of it, and at the scale of the weights.",
                "Dong et al. 2021, arXiv:2103.03404; Noci et al. 2022, arXiv:2206.03126",
            ),
        ),
    ),
    BoundGroup(
        "Optimizer",
        "It was not recorded.",
        '"optimizer_health": true',
        (
            Bound(
                (HEALTH_KIND,),
                "staleness",
                2.3,
                True,
                "the gradient has outgrown Adam's second moment",
                "Lower beta2 or the learning rate, or clip updates as StableAdamW does.",
                "Wortsman et al. 2023, arXiv 2304.13013: loss spikes follow 1 to 8 steps after 2.3; the number of steps is "
                + MEASURED,
                LASTING,
            ),
            Bound(
                (HEALTH_KIND,),
                "swallowed",
                0.9,
                True,
                "rounding swallows its updates",
                "Let the optimizer update float32 master weights, or use stochastic rounding.",
                "Zamirai et al. 2020, arXiv 2010.06192: nearest rounding cancels small updates; the limit is " + MEASURED,
                LASTING,
            ),
        ),
    ),
    BoundGroup(
        "Size of updates",
        "It was not recorded.",
        '"update_ratio": true',
        (
            Bound(
                ("update_ratio",),
                "update_ratio",
                0.1,
                True,
                "a step changes this weight too much",
                "Lower the learning rate of this weight.",
                "CS231n, Neural Networks Part 3: about 1e-3 is healthy, more is too high; the limit is " + MEASURED,
                LASTING,
                OF_NEW_WEIGHTS,
            ),
        ),
    ),
)
"""In the order in which the page shows them."""


class Beyond(NamedTuple):
    """A row beyond a bound."""

    step: int
    rank: int
    kind: str
    name: str
    column: str
    value: float
    bound: Bound
    is_nan: bool


def within(group: BoundGroup, facts: Facts) -> CheckFinding:
    """Whether all rows are within the bounds of a group."""
    asked = [
        (kind, column, bound)
        for kind, rows in facts.kinds.items()
        for column in rows.ops
        for bound in group.bounds
        if bound.is_of(kind, column)
    ]
    found = [one for each in asked for one in beyond(facts, *each)]
    if found:
        return first_beyond(facts, found)
    columns = sorted({column for _, column, _ in asked})
    said = f"{', '.join(columns)} {'is' if len(columns) == 1 else 'are'} within bounds."
    return CheckFinding(GOOD, said) if columns else CheckFinding(NOT_LOOKED_AT, group.nothing)


def beyond(facts: Facts, kind: str, column: str, bound: Bound) -> Iterator[Beyond]:
    """The first row beyond a bound, or with NaN, in the first file that has one. Where several rows in a row must be, the last
    of the first ones that are.
    """
    if bound.in_a_row > 1:
        yield from _lasting(facts, kind, column, bound)
        return
    for span in {**facts.kinds, **facts.others}[kind].spans:
        wanted = ("step", "rank", "name", GLOBAL_NAME, column)
        rows = facts.source.rows(RowChoice(kind, steps=range(span.first, span.last + 1), columns=wanted))
        rows = rows.filter(rows[column].is_valid())
        if bound.ends:
            rows = rows.filter([name.endswith(bound.ends) for name in rows["name"].to_pylist()])
        values = rows[column].to_numpy().astype(float)
        outside = values >= bound.limit if bound.high else values <= bound.limit
        there = (outside | np.isnan(values)).nonzero()[0]
        if len(there):
            row: Mapping[str, Any] = rows.slice(int(there[0]), 1).to_pylist()[0]
            name, is_nan = row[GLOBAL_NAME] or row["name"], not outside[there[0]]
            yield Beyond(row["step"], row["rank"], kind, name, column, row[column], bound, is_nan)
            return


class _RowsInARow:
    """Counts the rows in a row at which each tensor of each rank is beyond a bound (``RowTaker``).

    Attributes:
        found: Step, number of the series, number of the rank, and value where a count is reached first.
    """

    def __init__(self, bound: Bound, ranks: int) -> None:
        self._bound, self._ranks = bound, ranks
        self._counts: Ints = np.zeros((2, 0), np.int64)  # of all rows, and of those in a row
        self.found: tuple[int, int, int, float] | None = None

    def add(self, step: Ints, micro_step: Ints, series: Ints, rank: Ints, values: NDArray[np.float64]) -> None:
        del micro_step
        pairs = series * self._ranks + rank
        more = int(pairs.max(initial=-1)) + 1 - self._counts.shape[1]
        self._counts = np.pad(self._counts, ((0, 0), (0, max(more, 0))))
        begins = np.flatnonzero(np.diff(step, prepend=step[:1] - 1))
        for first, end in zip(begins, [*begins[1:], len(step)], strict=True):
            self._take(int(step[first]), pairs[first:end], values[first:end])

    def _take(self, step: int, pairs: Ints, values: NDArray[np.float64]) -> None:
        bound = self._bound
        outside = values >= bound.limit if bound.high else values <= bound.limit
        seen, in_a_row = self._counts[:, pairs]
        in_a_row = np.where(outside & (seen >= bound.after), in_a_row + 1, 0)
        self._counts[:, pairs] = seen + 1, in_a_row
        there = np.flatnonzero(in_a_row >= bound.in_a_row)
        if len(there) and self.found is None:
            pair = int(pairs[there[0]])
            self.found = step, pair // self._ranks, pair % self._ranks, float(values[there[0]])


def _lasting(facts: Facts, kind: str, column: str, bound: Bound) -> Iterator[Beyond]:
    rows, counted = KindReader(facts.source, kind, column), _RowsInARow(bound, len(facts.ranks))
    rows.feed(counted)
    if counted.found is not None:
        step, series, rank, value = counted.found
        means = bound._replace(means=f"{bound.means}, {bound.in_a_row} recorded steps in a row")
        yield Beyond(step, facts.ranks[rank], kind, rows.series[series][1], column, value, means, False)


def first_beyond(facts: Facts, found: Sequence[Beyond], then: str = "") -> CheckFinding:
    """The finding about the earliest of these rows.

    Args:
        then: What to do, where the bound does not say it.
    """
    one = min(found, key=lambda each: each[:5])
    means = "it cannot be computed from NaN" if one.is_nan else one.bound.means
    says = f"{one.kind} {one.name} on rank {one.rank} in step {one.step}: its {one.column} is {one.value:.3g}: {means}."
    place = Place(one.step, one.rank, one.kind, facts.shown_name(one.kind, one.name))
    return CheckFinding(BAD, says, place, "" if one.is_nan else one.bound.then or then)
