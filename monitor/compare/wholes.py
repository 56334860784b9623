"""Two runs whose ranks hold other parts of the same training: rows of whole tensors.

    on one rank                 layer.output: 8 samples
    data parallel, rank 0       layer.output: samples 0 to 3    together they are the same 8
                   rank 1       layer.output: samples 4 to 7

Replicas are counted once and shards combined by the merge. What modules take and give is combined over the ranks and
micro-steps of a step: the same batch, however it is cut.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.compare.names import NameRules
from monitor.compare.rows import Row, RowComparison
from monitor.compare.sides import ALL_RANKS, Choice, Side
from monitor.compare.tolerances import AVERAGES, ELEMENTS, EXTREMES, GIVEN, HIGHER, SHARES, VALUE, Facts, SeriesFacts
from monitor.merge.outputs import GLOBAL
from monitor.merge.statistics import Flags, Index, PartialColumns, Statistics, combined
from monitor.merge.tables import order_by, starts_of_runs
from monitor.query.batches import IDENTITY, place_of
from monitor.query.sources import ALL, QueryError, RowChoice
from monitor.series import (
    ACTIVATION_KINDS,
    CALL_KIND,
    CLIPPED_NORM,
    GRAD_NORM,
    GRADIENT_KINDS,
    KIND_TABLE,
    KINDS_OF_RANKS,
    PARAMETER_KINDS,
    RUN_KIND,
    shown_kind,
)
from monitor.sinks.files import StepSpan
from monitor.stats.ops import CALLS, INTEGER_OPS, TEXT_OPS
from monitor.stats.partials import Floats
from monitor.terminal import counted

COMBINED: Final = ACTIVATION_KINDS
"""Kinds with a row for each rank and micro-step, of which a step has a part of its batch each."""
BACKWARD: Final = [kind.name for kind in KIND_TABLE if kind.phase == "backward"]
"""Kinds whose size depends on how a rank's own loss is averaged over its own part of the batch."""
OTHERS: Final = (CALL_KIND, *KINDS_OF_RANKS)
"""Kinds without whole tensors: another layout communicates otherwise."""
OUTPUT: Final = re.compile(r"\.output(_\d+)?(#\d+)?$")
"""The end of the name of what a module gives."""
PARTS: Final = "parts"
"""How many rows were united."""
MOST_CALLS: Final = 1 << 30
"""Most calls of a step."""
MOST_STAGES: Final = 1 << 12
"""Most stages of a pipeline."""


class WholeTensors:
    """The rows of one side, each of a whole tensor in a step.

    Args:
        names: The rules by which its names become those of the other side.
        choice: What is compared.

    Attributes:
        kinds: Those that have rows.
        names: By kind, all names in the steps that are compared, as the other side calls them.
        steps: By kind, the steps that have rows.
        is_cut: Whether ranks are stages of a pipeline, and nothing says which.
    """

    def __init__(self, side: Side, names: NameRules, choice: Choice) -> None:
        self.side, self._rules = side, names
        self._source = side.wholes(choice)
        kinds = [kind for kind in self._source.kinds(whole=True) if kind not in OTHERS]
        kinds += [RUN_KIND] if RUN_KIND in self._source.kinds(whole=False) else []
        self.names: dict[str, set[str]] = {}
        self.steps: dict[str, list[int]] = {}
        for kind in (kind for kind in kinds if choice.has(shown_kind(kind))):
            rows = self._rules.renamed(self._read(kind, choice.steps, ("name", "step")))
            if len(rows):
                self.names[kind] = set(rows["name"].unique().to_pylist())
                self.steps[kind] = np.unique(rows["step"].to_numpy()).tolist()
        self.kinds = list(self.names)
        self._first: dict[str, int] = {}
        self._at_first: dict[str, pa.Table] = {}
        self.is_cut = False

    def begin(self, other: WholeTensors) -> None:
        """Look at the first step of each kind that both sides have."""
        shared = {kind: set(self.steps[kind]) & set(other.steps.get(kind, ())) for kind in self.kinds}
        self._first = {kind: min(steps or self.steps[kind]) for kind, steps in shared.items()}
        self._at_first = {kind: self._of_ranks(kind) for kind in self.kinds}
        self.is_cut = any(_is_cut(rows) for kind, rows in self._at_first.items() if kind in COMBINED)

    @property
    def complexity(self) -> tuple[bool, int, bool, int]:
        """The order of a step is known best where stages are known and few, and rows are not from CSV."""
        stages = max((len(rows["stage"].drop_null().unique()) for rows in self._at_first.values()), default=0)
        return self.is_cut, stages, any(map(self.is_rounded, self.kinds)), len(self.side.source.ranks)

    def parts(self) -> tuple[int, int]:
        """Into how many parts the batch of a step is cut: over ranks, copies included, and over micro-steps."""
        cut = [(1, 1)]
        for kind in (one for one in self.kinds if one in COMBINED):
            step = self._first[kind]
            rows = self._read(kind, StepSpan(step, step))
            places = zip(rows["name"].to_pylist(), rows["micro_step"].to_pylist(), strict=True)
            found = Counter(place for place in places if not place[0].startswith("."))  # each stage has a root of its own
            cut.append((max(found.values(), default=1), len({micro_step for _, micro_step in found})))
        ranks, micro_steps = zip(*cut, strict=True)
        return max(ranks), max(micro_steps)

    def is_rounded(self, kind: str) -> bool:
        """Whether the rows are from CSV."""
        rows = self._at_first[kind]
        return len(rows) > 0 and rows["call_id"].null_count == len(rows)

    def positions(self, kind: str) -> dict[str, int]:
        """The place of each name in the order of a step: forward by stages, backward by stages from the last."""
        found: dict[str, int] = {}
        for number, row in enumerate(self._at_first[kind].select(["name", "stage", "call_id"]).to_pylist()):
            stage, call = row["stage"] or 0, number if row["call_id"] is None else row["call_id"]
            stage = MOST_STAGES - 1 - stage if kind in BACKWARD else stage
            place = ((kind in BACKWARD) * MOST_STAGES + stage) * MOST_CALLS + min(call, MOST_CALLS - 1)
            found[row["name"]] = min(found.get(row["name"], place), place)
        return found

    def facts(self) -> Facts:
        """What ranks say of the series, with the most dimensions that a part has. Rows say how many elements there are."""
        found: Facts = {}
        for kind, rows in self._at_first.items():
            for row in _of_one_stage(rows, kind).select(["name", "shape", "dtype"]).to_pylist():
                key, dimensions = (kind, 0, row["name"]), (0,) * ((row["shape"] or "").count(",") + 1)
                one = SeriesFacts((row["dtype"] or "").rpartition(".")[2].lower(), dimensions)
                before = found.get(key, one)
                coarsest = max(one, before, key=lambda facts: (facts.epsilon or 0.0, facts.dtype))
                found[key] = coarsest._replace(shape=max(dimensions, before.shape or ()))
        return found

    def first_rows(self, kind: str) -> pa.Table:
        """The rows of the first step of a kind."""
        return self.rows(kind, self._first[kind], self._first[kind])

    def rows(self, kind: str, first: int, last: int) -> pa.Table:
        """The rows of some steps: ``name step micro_step parts elements`` and ops."""
        rows = self._rules.renamed(self._read(kind, StepSpan(first, last)))
        return self._of_run(rows) if kind == RUN_KIND else _united(_of_one_stage(rows, kind), kind)

    def _read(self, kind: str, steps: StepSpan, columns: tuple[str, ...] | None = None) -> pa.Table:
        """Rows of whole tensors, without terms of a sum; of the run, those of ranks."""
        whole, wanted = kind != RUN_KIND, range(steps.first, min(steps.last, ALL.stop - 1) + 1)
        columns = (*columns, "term") if columns and whole else columns
        rows = self._rows_of(RowChoice(kind, whole, steps=wanted, columns=columns))
        rows = rows.filter(rows["name"].is_valid())
        return rows.filter(call_function("invert", [rows["term"].fill_null(False)])) if whole else rows

    def _rows_of(self, choice: RowChoice) -> pa.Table:
        try:
            return self._source.rows(choice)
        except (pa.ArrowException, LookupError) as error:  # a damaged footer may name other columns
            raise QueryError(f"{self.side}: a file of {choice.kind} is damaged: {error}") from error

    def _of_run(self, rows: pa.Table) -> pa.Table:
        """The run's numbers, averaged over ranks; NaN if these disagree on what no arithmetic has touched."""
        rows = rows.set_column(rows.column_names.index("name"), "name", rows["name"].cast(pa.string()))
        found = rows.group_by(["name", "step"]).aggregate([(VALUE, "mean"), (VALUE, "min"), (VALUE, "max")])
        values = []
        for row in found.to_pylist():
            alike = row["value_min"] == row["value_max"]  # the mean of equal numbers may be rounded
            agree = alike or not GIVEN.fullmatch(row["name"])
            values.append(row["value_min"] if alike else row["value_mean"] if agree else math.nan)
            if not agree and not math.isnan(row["value_mean"] or 0.0):
                self.side.miss(f"{self.side}: ranks disagree on {row['name']}")
        nothing = pa.nulls(len(found), pa.int64())
        columns = {"name": found["name"], "step": found["step"], "micro_step": nothing, PARTS: nothing, ELEMENTS: nothing}
        return pa.table({**columns, VALUE: pa.array(values, pa.float64())})

    def _of_ranks(self, kind: str) -> pa.Table:
        """What the ranks say of the series of its first step, in the order in which they were measured."""
        columns, step = ("rank", "stage", "global_name", "call_id", "shape", "dtype"), self._first[kind]
        rows = self._rows_of(RowChoice(kind, steps=range(step, step + 1), columns=columns)).select(list(columns))
        rows = rows.filter(rows["global_name"].is_valid())
        return self._rules.renamed(rows.rename_columns(["rank", "stage", "name", "call_id", "shape", "dtype"]))


def with_same_dimensions(left: Facts, right: Facts) -> tuple[Facts, Facts]:
    """Give series of both sides the dimensions of the side that knows more: a flat part has one."""
    for key in left.keys() & right.keys():
        shape = max(left[key].shape or (), right[key].shape or ())
        left[key], right[key] = (one[key]._replace(shape=shape) for one in (left, right))
    return left, right


def _is_cut(rows: pa.Table) -> bool:
    """Whether ranks are stages of a pipeline, and nothing says which: their models take or give something else."""
    roots: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for row in rows.to_pylist() if rows["stage"].null_count == len(rows) else ():
        if row["name"].startswith("."):
            roots[row["name"]].add(((row["shape"] or "").partition(",")[2], row["dtype"]))  # ranks may have more samples
    return any(len(found) > 1 for found in roots.values())


def _of_one_stage(rows: pa.Table, kind: str) -> pa.Table:
    """Without rows of modules that several stages call alike: the whole model takes what its first stage takes, and gives what
    the last one gives.
    """
    if kind not in COMBINED or rows["stage"].null_count == len(rows):
        return rows
    places = list(zip(rows["name"].to_pylist(), rows["stage"].fill_null(0).to_pylist(), strict=True))
    stages: dict[str, int] = {}
    for name, stage in places:
        choose = max if OUTPUT.search(name) else min
        stages[name] = choose(stage, stages.get(name, stage))
    return rows.filter(pa.array([stages[name] == stage for name, stage in places], pa.bool_()))


def _united(rows: pa.Table, kind: str) -> pa.Table:
    """One row for each name and step, and micro-step unless these are combined: of all elements together.

    Weights and gradients that several ranks have of their own should be one. If they agree, the row is that of one of them.
    """
    names = rows["name"].cast(pa.string()).combine_chunks().dictionary_encode()
    micro = rows["micro_step"].fill_null(-1).to_numpy() if kind not in COMBINED else np.full(len(rows), -1)
    key = [rows["step"].to_numpy(), names.indices.to_numpy().astype(np.int64), micro.astype(np.int64)]
    order = order_by(key)
    order = np.arange(len(rows)) if order is None else order
    starts = starts_of_runs([column[order] for column in key])
    statistics = _statistics(rows, kind)
    found, firsts = combined(statistics, order, starts), order[starts]
    one = np.zeros(len(firsts), dtype=np.bool_) if kind in COMBINED else _agree(found.ops, statistics.values[:, order], starts)
    count, known = np.where(one, statistics.count[firsts], found.count), np.where(one, statistics.known[:, firsts], found.known)
    values = np.where(one, statistics.values[:, firsts], found.values)
    counted = ~np.isnan(count)
    return pa.table(
        {
            "name": names.take(pa.array(firsts)).cast(pa.string()),
            "step": rows["step"].take(pa.array(firsts)),
            "micro_step": pa.array(micro[firsts], mask=micro[firsts] < 0),
            PARTS: pa.array(np.diff(starts, append=len(rows))),
            ELEMENTS: pa.array(np.where(counted, count, 0).astype(np.int64), mask=~counted),
            **{op: pa.array(values[at], mask=~known[at]) for at, op in enumerate(found.ops)},
        }
    )


def _agree(ops: Sequence[str], values: Floats, starts: Index) -> Flags:
    """Whether the rows of each run have the same numbers but for rounding.

    Args:
        values: Of the ops, shape ``(ops, rows)``.
    """
    if not len(starts):
        return np.zeros(0, dtype=np.bool_)
    with np.errstate(invalid="ignore"):
        most, least = np.maximum.reduceat(values, starts, axis=1), np.minimum.reduceat(values, starts, axis=1)
        sizes = np.maximum(np.abs(most), np.abs(least))
        sizes = np.maximum(sizes, np.max(np.where(np.isin(ops, EXTREMES)[:, None], sizes, 0.0), axis=0))  # a mean may be near 0
        close = most - least <= AGREE * sizes
    every: Flags = (close | (most == least) | np.isnan(most)).all(axis=0)
    return every


def _statistics(rows: pa.Table, kind: str) -> Statistics:
    """Rows of whole tensors of which only ops are known. Those of parts do not make up higher moments."""
    without = (*GLOBAL.names, *TEXT_OPS, CALLS, *(HIGHER if kind in COMBINED else []))
    ops = tuple(one for one in rows.column_names if one not in without)
    count = rows["count"].cast(pa.float64()).fill_null(np.nan).to_numpy()
    values = np.array([rows[op].fill_null(0.0).to_numpy() for op in ops]).reshape(len(ops), len(rows))
    known = np.array([rows[op].is_valid().to_numpy() for op in ops], dtype=np.bool_).reshape(len(ops), len(rows))
    flags = np.zeros(len(rows), dtype=np.bool_)
    return Statistics(ops, count, values, known, PartialColumns.unknown(len(rows)), flags, np.zeros(len(rows), dtype=np.uint64))


# --- The comparison of both sides.

OPTIONAL: Final = (*(kind.name for kind in KIND_TABLE if kind.of == "module"), GRADIENT_KINDS[0])
"""Kinds of which another layout may lack some: modules that it does not call, and gradients that it never has."""
REDUCED: Final = GRADIENT_KINDS[1]
HELD: Final = (*PARAMETER_KINDS, REDUCED)
"""Kinds whose series show which part of the model a rank holds."""
RUN_NORMS: Final = [(RUN_KIND, name) for name in (GRAD_NORM, CLIPPED_NORM)]
"""Numbers of the run that only a rank with all gradients has."""


BATCH_ROWS: Final = 20_000
"""Rows that are compared at a time, about: as Python objects a row takes a kilobyte."""
MOST_NAMED: Final = 5

MOVED: Final = 0.1
"""The share of tensors that other ranks must hold to make another layout: fewer are missing."""
AGREE: Final = 1e-6
"""How close numbers of ranks must be, relative to them, to be those of copies."""
CLOSE: Final = 0.02
"""How close two sizes must be to a ratio of whole numbers to have it."""


def layouts_differ(sides: Sequence[Side], tables: Sequence[pa.Table]) -> bool:
    """Whether ranks of the two runs hold other parts. There are more ranks, or the same ranks hold other shapes of weights or
    gradients, or many of these are on other ranks. A rank that has none of a kind has lost it.

    Args:
        tables: The series of both sides, as the right side calls them.
    """
    left, right = (side.source.told()["world_size"] for side in sides)
    both = set(sides[0].source.ranks) & set(sides[1].source.ranks)
    if left != right or left == 1:
        return bool(left != right and both)
    held = [_held(table, both) for table in tables]
    return any(_differ(held[0][kind], held[1][kind]) for kind in held[0].keys() & held[1].keys())


Held = dict[int, dict[tuple[int, str], str]]
"""By rank, the shapes of what it holds, by stage and name."""


def _held(series: pa.Table, ranks: Container[int]) -> Mapping[str, Held]:
    found: dict[str, Held] = defaultdict(lambda: defaultdict(dict))
    for row in series.select(["kind", "rank", "vpp_stage", "name", "shape"]).to_pylist():
        if row["kind"] in HELD and row["rank"] in ranks:
            found[row["kind"]][row["rank"]][row["vpp_stage"], row["name"]] = row["shape"]
    return found


def _differ(left: Held, right: Held) -> bool:
    ranks = left.keys() & right.keys()
    if any(left[rank][name] != right[rank][name] for rank in ranks for name in left[rank].keys() & right[rank].keys()):
        return True
    owners: list[dict[tuple[int, str], list[int]]] = [defaultdict(list), defaultdict(list)]
    for side, found in zip((left, right), owners, strict=True):
        for rank in sorted(ranks):
            for name in side[rank]:
                found[name].append(rank)
    every = owners[0].keys() | owners[1].keys()
    return sum(owners[0].get(name) != owners[1].get(name) for name in every) > MOVED * len(every)


class LayoutComparison:
    """Compares whole tensors of two sides.

    Args:
        comparison: Takes the rows.
    """

    def __init__(self, sides: tuple[WholeTensors, WholeTensors], comparison: RowComparison) -> None:
        self._sides, self._comparison = sides, comparison
        comparison.alike = self._alike
        # What CSV has rounded is added up, and may be multiplied by the number of parts: it has a digit less.
        self._ndigits = [max(0, one.side.ndigits(one.side.source.ranks) - 1) for one in sides]
        self._order = min(sides, key=lambda one: one.complexity)
        self._own_ops: dict[tuple[str, str], int] = defaultdict(int)
        self._copies: dict[tuple[str, str], tuple[int, int]] = {}

    def compare(self) -> None:
        """Compare all kinds that both sides have."""
        left, right = self._sides
        for one, other in ((left, right), (right, left)):
            for kind in one.kinds:
                if kind not in other.kinds:
                    one.side.has_kind(kind, ALL_RANKS)
        for kind in sorted(set(left.kinds) & set(right.kinds), key=place_of):
            self._compare_kind(kind)
        for (kind, op), rows in self._own_ops.items():
            left.side.note(f"{counted(rows, f'row of {kind} has', f'rows of {kind} have')} {op} on one side alone")
        copied = Counter(kind for (kind, _), copies in self._copies.items() if max(copies) > 1)
        for kind, number in copied.items():
            are = counted(number, f"tensor of {kind} is", f"tensors of {kind} are")
            left.side.note(f"{are} there in several copies on one side, which count once")

    def _compare_kind(self, kind: str) -> None:
        firsts = [one.first_rows(kind) for one in self._sides]
        dropped = self._alone(kind, firsts)
        if all(one.names[kind] <= dropped for one in self._sides):
            return
        scale, positions, before = self._scale(kind, firsts), self._positions(kind), self._comparison.compared
        every = sorted({step for one in self._sides for step in one.steps[kind]})
        size = max(1, BATCH_ROWS // max(1, *map(len, firsts)))
        for at in range(0, len(every), size):
            some = every[at : at + size]
            tables = [one.rows(kind, some[0], some[-1]) for one in self._sides]
            if scale != 1:
                factors = (max(1.0, scale), max(1.0, 1 / scale))  # sizes grow: what CSV has rounded must not look finer
                tables = [_scaled(table, factor) for table, factor in zip(tables, factors, strict=True)]
            rounded = (one.is_rounded(kind) for one in self._sides)
            ready = [_identified(_without(table, dropped), positions, is_rounded=next(rounded)) for table in tables]
            self._comparison.add(kind, ready, self._ndigits)
            self._comparison.progress(kind, at + len(some), len(every))
        if self._comparison.compared == before:
            self._sides[0].side.miss(f"{kind}: no tensor has a number of the same op, name and step on both sides")

    def _positions(self, kind: str) -> dict[str, int]:
        """In the order of the side with fewer stages; what the other one has alone comes after it."""
        found = self._order.positions(kind)
        last = max(found.values(), default=0)
        others = next(one for one in self._sides if one is not self._order).positions(kind)
        return {**dict.fromkeys(others, last + 1), **found}

    def _alone(self, kind: str, firsts: Sequence[pa.Table]) -> set[str]:
        """Names that are not compared, with a word: what one side cannot have, and tensors of single ranks."""
        dropped: set[str] = set()
        names = [one.names[kind] for one in self._sides]
        for one, known, others in zip(self._sides, names, reversed(names), strict=True):
            alone = sorted(name for name in known - others if kind in OPTIONAL or (kind, name) in RUN_NORMS)
            dropped |= set(alone)
            if kind in OPTIONAL and 2 * len(alone) > len(known):
                one.side.miss(
                    f"{one.side} alone has {kind} of {_listed(alone)}. Are they called otherwise? --map names them alike"
                )
            elif alone:
                one.side.note(f"{one.side} alone has {kind} of {_listed(alone)}, which the other layout need not have")
        if kind in COMBINED and any(one.is_cut for one in self._sides):
            roots = sorted(name for name in names[0] & names[1] if name.startswith("."))
            dropped |= set(roots)
            self._sides[0].side.note(
                f"{kind} of {_listed(roots)} is not compared: which stage of a pipeline has them is not known"
            )
        micro_steps = [set(table["micro_step"].to_pylist()) for table in firsts]
        if kind in OPTIONAL and kind not in COMBINED and micro_steps[0] != micro_steps[1]:
            dropped |= names[0] | names[1]
            self._sides[0].side.note(f"{kind} is not compared: micro-steps have other parts of the batch")
        for one, table in zip(self._sides, firsts, strict=True) if kind not in (*COMBINED, RUN_KIND) else ():
            of_ranks = {row["name"] for row in table.select(["name", PARTS]).to_pylist() if row[PARTS] > 1}
            if own := sorted(of_ranks - dropped):
                dropped |= set(own) if kind in OPTIONAL else set()
                why = "whose parts of the batch differ" if kind in OPTIONAL else "which should be the same"
                one.side.note(f"{one.side} has {kind} of single ranks, {why}: {_listed(own)}")
        return dropped

    def _scale(self, kind: str, firsts: Sequence[pa.Table]) -> float:
        """How much larger gradients of the right side are because each of its parts averages its own loss; else 1.

        A rank that averages over its own half of the batch has gradients of activations that are twice as large. So has a
        micro-step, if gradients are divided later: then the reduced ones agree.
        """
        found = _ratio(firsts) if kind in BACKWARD else 1.0
        best = min(self._scales, key=lambda one: abs(math.log(found / one)))
        if best == 1 or abs(found / best - 1) > CLOSE:
            return 1.0
        why = "as each of its parts averages its own loss. That is taken into account"
        larger, times = (self._sides[1].side, best) if best > 1 else (self._sides[0].side, 1 / best)
        larger.note(f"{larger} has {kind} {times:g} times as large, {why}")
        return best

    @cached_property
    def _scales(self) -> set[float]:
        """The scales that the layouts can have."""
        cut = [one.parts() for one in self._sides]
        outputs = [one.first_rows(COMBINED[0]) for one in self._sides if COMBINED[0] in one.kinds]
        copies = _copies(*outputs) if len(outputs) == 2 else [1, 1]
        numbers = [max(1, ranks // held) for (ranks, _), held in zip(cut, copies, strict=True)]
        found, steps = {1.0, numbers[1] / numbers[0]}, [micro_steps for _, micro_steps in cut]
        reduced = [one.first_rows(REDUCED) for one in self._sides if REDUCED in one.kinds]
        if len(reduced) == 2 and abs(_ratio(reduced) - 1) < CLOSE:
            found |= {up / down * numbers[1] / numbers[0] for up in (1, steps[1]) for down in (1, steps[0])}
        return found

    def _alike(self, kind: str, left: Row, right: Row) -> tuple[Row, Row]:
        """With the same number of elements if one side holds several copies, and without ops of one side alone."""
        rows = dict(left), dict(right)
        if kind in COMBINED and left[ELEMENTS] and right[ELEMENTS]:
            known = self._copies.setdefault((kind, left["name"]), self._copies_in(left[ELEMENTS], right[ELEMENTS]))
            for row, copies in zip(rows, known, strict=True):
                _take_copies(row, copies)
        for op in left:
            if op in right and (left[op] is None) != (right[op] is None) and op not in IDENTITY:
                rows[0][op] = rows[1][op] = None
                self._own_ops[kind, op] += op != ELEMENTS
        return rows

    def _copies_in(self, left: int, right: int) -> tuple[int, int]:
        """How many copies of a tensor each side has, by its numbers of elements: no more than it has ranks."""
        most = [len(one.side.source.ranks) for one in self._sides]
        if left % right == 0 and left // right <= most[0]:
            return left // right, 1
        return (1, right // left) if right % left == 0 and right // left <= most[1] else (1, 1)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _take_copies(row: Row, copies: int) -> None:
    """Leave one of several copies in a row, if all of them are the same."""
    if copies == 1 or row[ELEMENTS] % copies:
        return
    row[ELEMENTS] //= copies
    if row.get("norm") is not None:
        row["norm"] /= math.sqrt(copies)
    for op in INTEGER_OPS:
        if row.get(op) is not None:
            row[op] /= copies


def _ratio(tables: Sequence[pa.Table]) -> float:
    """How many times as large tensors of the right side are, in the middle; 1 if sizes do not say."""
    columns = [{op for op in table.column_names if table[op].null_count < len(table)} for table in tables]
    shared = columns[0] & columns[1]
    left, right = (dict(_sizes(table, shared)) for table in tables)
    found = [right[name] / size for name, size in left.items() if right.get(name) and size]
    usual = [one for one in found if 0 < one < math.inf]
    return median(usual) if usual else 1.0


def _copies(left: pa.Table, right: pa.Table) -> list[int]:
    """How often each side holds the outputs of modules, at most."""
    sizes = [dict(zip(*(rows[one].to_pylist() for one in ("name", ELEMENTS)), strict=True)) for rows in (left, right)]
    shared = [name for name in sizes[0] if sizes[0][name] and sizes[1].get(name)]
    pairs = (sizes, reversed(sizes))
    return [max((own[name] // other[name] for name in shared), default=1) or 1 for own, other in pairs]


def _sizes(rows: pa.Table, ops: Container[str]) -> Iterator[tuple[str, float]]:
    """By name, how large the elements are by these ops."""
    for row in rows.to_pylist():
        if "norm" in ops and row["norm"] is not None and row[ELEMENTS]:
            yield row["name"], row["norm"] / math.sqrt(row[ELEMENTS])
        elif ends := [abs(row[op]) for op in (*EXTREMES, "std", "mean") if op in ops and row[op] is not None]:
            yield row["name"], max(ends)


def _scaled(rows: pa.Table, factor: float) -> pa.Table:
    """With all sizes multiplied. Shares of small or lost elements would be others then: they are left out."""
    rows = rows.drop_columns([op for op in SHARES if op in rows.column_names])
    for op in (*EXTREMES, *AVERAGES):
        if op in rows.column_names:
            column = call_function("multiply", [rows[op], pa.scalar(factor)])
            rows = rows.set_column(rows.column_names.index(op), op, column)
    return rows


def _without(rows: pa.Table, names: Container[str]) -> pa.Table:
    return rows.filter(pa.array([name not in names for name in rows["name"].to_pylist()], pa.bool_())) if names else rows


def _identified(rows: pa.Table, positions: Mapping[str, int], *, is_rounded: bool) -> pa.Table:
    """In order of execution, in the columns of rows of ranks."""
    last = max(positions.values(), default=0) + 1
    place = np.array([positions.get(name, last) for name in rows["name"].to_pylist()], dtype=np.int64)
    order = order_by([rows["step"].to_numpy(), place])
    call = pa.array(place, mask=np.full(len(place), is_rounded))
    columns = {
        "rank": pa.array(np.full(len(rows), ALL_RANKS)),
        "vpp_stage": pa.array(np.zeros(len(rows), dtype=np.int64)),
        "name": rows["name"],
        "step": rows["step"],
        "micro_step": rows["micro_step"].cast(pa.int64()),
        "call_id": call,
        **{one: rows[one] for one in rows.column_names if one not in ("name", "step", "micro_step", PARTS)},
    }
    found = pa.table(columns)
    return found if order is None else found.take(pa.array(order))
