"""Two runs whose ranks hold other parts of the same training: rows of whole tensors.

    on one rank                 layer.output: 8 samples
    data parallel, rank 0       layer.output: samples 0 to 3    together they are the same 8
                   rank 1       layer.output: samples 4 to 7

Replicas are counted once and shards combined by the merge. What modules take and give is combined over the ranks and
micro-steps of a step: the same batch, however it is cut.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.compare.names import NameRules
from monitor.compare.rows import Row, RowComparison
from monitor.compare.sides import ALL_RANKS, Choice, Side
from monitor.compare.tolerances import AVERAGES, ELEMENTS, EXTREMES, SHARES, VALUE, Facts, SeriesFacts
from monitor.merge.outputs import GLOBAL
from monitor.merge.statistics import Statistics, combined
from monitor.merge.tables import order_by, starts_of_runs
from monitor.query.batches import IDENTITY, place_of
from monitor.query.sources import RowChoice
from monitor.series import CALL_KIND, GRADIENT_KINDS, KIND_TABLE, KINDS_OF_RANKS, PARAMETER_KINDS, RUN_KIND, shown_kind
from monitor.stats.ops import CALLS, INTEGER_OPS, TEXT_OPS
from monitor.stats.partials import EMPTY, Partials

COMBINED: Final = [kind.name for kind in KIND_TABLE if kind.of == "module" and kind.per_micro_step]
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
"""Of a step."""
MOST_STAGES: Final = 1 << 12
"""Of a pipeline."""


class WholeTensors:
    """The rows of one side, each of a whole tensor in a step.

    Args:
        names: The rules by which its names become those of the other side.
        choice: What is compared.
        first: The first step that both sides have.
    """

    def __init__(self, side: Side, names: NameRules, choice: Choice, first: int) -> None:
        self.side, self._names, self._choice = side, names, choice
        self._source = side.wholes
        kinds = [kind for kind in self._source.kinds(whole=True) if kind not in OTHERS]
        kinds += [RUN_KIND] if RUN_KIND in self._source.kinds(whole=False) else []
        self.kinds = [kind for kind in kinds if choice.has(shown_kind(kind))]
        self._first = {kind: min((one for one in self.steps(kind) if one >= first), default=first) for kind in self.kinds}
        self._at_first = {kind: self._of_ranks(kind) for kind in self.kinds}
        self.is_cut = any(_is_cut(rows) for kind, rows in self._at_first.items() if kind in COMBINED)

    @property
    def complexity(self) -> tuple[int, int]:
        """How many stages and ranks there are: the order of a step is known best where there are few."""
        stages = max(len(rows["stage"].drop_null().unique()) for rows in self._at_first.values())
        return stages, len(self.side.source.ranks)

    def parts(self) -> tuple[int, int]:
        """Into how many parts the batch of a step is cut: over ranks, copies included, and over micro-steps."""
        cut = [(1, 1)]
        for kind in (one for one in self.kinds if one in COMBINED):
            step = self._first[kind]
            rows = self._source.rows(RowChoice(kind, whole=True, steps=range(step, step + 1)))
            places = zip(rows["name"].to_pylist(), rows["micro_step"].to_pylist(), strict=True)
            found = Counter(place for place in places if not place[0].startswith("."))  # each stage has a root of its own
            cut.append((max(found.values(), default=1), len({micro_step for _, micro_step in found})))
        ranks, micro_steps = zip(*cut, strict=True)
        return max(ranks), max(micro_steps)

    def is_rounded(self, kind: str) -> bool:
        """Whether the rows are from CSV."""
        rows = self._at_first[kind]
        return len(rows) > 0 and rows["call_id"].null_count == len(rows)

    def steps(self, kind: str) -> list[int]:
        every = (step for steps in self._source.steps.get(kind, ()) for step in steps)
        return sorted({step for step in every if self._choice.steps.first <= step <= self._choice.steps.last})

    def positions(self, kind: str) -> dict[str, int]:
        """By name, the place in the order of a step: forward by stages, backward by stages from the last."""
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
                dimensions = (0,) * ((row["shape"] or "").count(",") + 1)
                one = SeriesFacts((row["dtype"] or "").rpartition(".")[2].lower(), dimensions)
                key = kind, 0, row["name"]
                found[key] = max(one, found.get(key, one), key=lambda facts: len(facts.shape or ()))
        return found

    def first_rows(self, kind: str) -> pa.Table:
        """Those of its first step."""
        return self.rows(kind, self._first[kind], self._first[kind])

    def rows(self, kind: str, first: int, last: int) -> pa.Table:
        """Of some steps: ``name step micro_step parts elements`` and ops."""
        steps = range(first, last + 1)
        if kind == RUN_KIND:
            return _of_run(self._source.rows(RowChoice(kind, steps=steps)))
        rows = self._source.rows(RowChoice(kind, whole=True, steps=steps))
        whole = call_function("invert", [rows["term"].fill_null(False)])
        rows = self._names.renamed(rows.filter(whole))
        return _united(_of_one_stage(rows, kind), kind)

    def _of_ranks(self, kind: str) -> pa.Table:
        """What the ranks say of the series of its first step, in the order in which they were measured."""
        columns, step = ("rank", "stage", "global_name", "call_id", "shape", "dtype"), self._first[kind]
        rows = self._source.rows(RowChoice(kind, steps=range(step, step + 1), columns=columns)).select(list(columns))
        return self._names.renamed(rows.rename_columns(["rank", "stage", "name", "call_id", "shape", "dtype"]))


def with_same_dimensions(left: Facts, right: Facts) -> tuple[Facts, Facts]:
    """Of series of both sides, the dimensions of the side that knows more: a flat part has one."""
    for key in left.keys() & right.keys():
        shape = max(left[key].shape or (), right[key].shape or ())
        left[key], right[key] = (one[key]._replace(shape=shape) for one in (left, right))
    return left, right


def _of_run(rows: pa.Table) -> pa.Table:
    """The run's numbers, averaged over the ranks that have them."""
    rows = rows.set_column(rows.column_names.index("name"), "name", rows["name"].cast(pa.string()))
    found = rows.group_by(["name", "step"]).aggregate([(VALUE, "mean")]).rename_columns(["name", "step", VALUE])
    nothing = pa.nulls(len(found), pa.int64())
    return found.append_column("micro_step", nothing).append_column(PARTS, nothing).append_column(ELEMENTS, nothing)


def _is_cut(rows: pa.Table) -> bool:
    """Whether ranks have other modules, and nothing says which stage of a pipeline they are."""
    names: dict[int, set[str]] = defaultdict(set)
    for row in rows.select(["rank", "name"]).to_pylist() if rows["stage"].null_count == len(rows) else ():
        names[row["rank"]].add(row["name"])
    return any(one != other for one, other in itertools.pairwise(names.values()))


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

    Weights and gradients that several ranks have of their own should be one: their row is that of as many elements as one has.
    """
    names = rows["name"].cast(pa.string()).combine_chunks().dictionary_encode()
    micro = rows["micro_step"].fill_null(-1).to_numpy() if kind not in COMBINED else np.full(len(rows), -1)
    key = [rows["step"].to_numpy(), names.indices.to_numpy().astype(np.int64), micro.astype(np.int64)]
    order = order_by(key)
    order = np.arange(len(rows)) if order is None else order
    starts = starts_of_runs([column[order] for column in key])
    found = combined(_statistics(rows), order, starts)
    firsts = order[starts]
    parts = np.diff(starts, append=len(rows))
    own = np.ones(len(parts)) if kind in COMBINED else parts
    for at, op in enumerate(found.ops):
        found.values[at] /= np.sqrt(own) if op == "norm" else own if op in INTEGER_OPS else 1
    count, known = found.count / own, ~np.isnan(found.count)
    return pa.table(
        {
            "name": names.take(pa.array(firsts)).cast(pa.string()),
            "step": rows["step"].take(pa.array(firsts)),
            "micro_step": pa.array(micro[firsts], mask=micro[firsts] < 0),
            PARTS: pa.array(parts),
            ELEMENTS: pa.array(np.where(known, count, 0).astype(np.int64), mask=~known),
            **{op: found.op(op) for op in found.ops},
        }
    )


def _statistics(rows: pa.Table) -> Statistics:
    """Rows of whole tensors of which only ops are known."""
    ops = tuple(one for one in rows.column_names if one not in (*GLOBAL.names, *TEXT_OPS, CALLS))
    nothing = Partials(np.broadcast_to(np.array(EMPTY)[:, None], (len(EMPTY), len(rows))))
    count = rows["count"].cast(pa.float64()).fill_null(np.nan).to_numpy()
    values = np.array([rows[op].fill_null(0.0).to_numpy() for op in ops]).reshape(len(ops), len(rows))
    known = np.array([rows[op].is_valid().to_numpy() for op in ops], dtype=np.bool_).reshape(len(ops), len(rows))
    flags = np.zeros(len(rows), dtype=np.bool_)
    return Statistics(ops, count, values, known, nothing, flags, np.zeros(len(rows), dtype=np.uint64))


# --- The comparison of both sides.

OPTIONAL: Final = (*(kind.name for kind in KIND_TABLE if kind.of == "module"), GRADIENT_KINDS[0], RUN_KIND)
"""Kinds of which another layout may lack some: modules that it does not call, and gradients that it never has."""
REDUCED: Final = GRADIENT_KINDS[1]
HELD: Final = (*PARAMETER_KINDS, REDUCED)
"""Kinds whose series show which part of the model a rank holds."""
NOT_OPS: Final = (*IDENTITY, PARTS)


BATCH_ROWS: Final = 20_000
"""Rows that are compared at a time, about."""
MOST_NAMED: Final = 5

CLOSE: Final = 0.02
"""How close two sizes must be to a ratio of whole numbers to have it."""


def layouts_differ(sides: Sequence[Side]) -> bool:
    """Whether ranks of the two runs hold other parts: there are more ranks, or other weights and gradients on the same one."""
    left, right = (side.source.told()["world_size"] for side in sides)
    both = set(sides[0].source.ranks) & set(sides[1].source.ranks)
    if left != right or left == 1:
        return bool(left != right and both)
    held = [_held(side.series, both) for side in sides]
    return any(held[0][kind] != held[1][kind] for kind in held[0].keys() & held[1].keys())


def _held(series: pa.Table, ranks: Container[int]) -> Mapping[str, set[tuple[Any, ...]]]:
    found: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for row in series.select(["kind", "rank", "vpp_stage", "name", "shape"]).to_pylist():
        if row["kind"] in HELD and row["rank"] in ranks:
            found[row["kind"]].add(tuple(row.values())[1:])
    return found


class LayoutComparison:
    """Compares whole tensors of two sides.

    Args:
        comparison: Takes the rows.
    """

    def __init__(self, sides: tuple[WholeTensors, WholeTensors], comparison: RowComparison) -> None:
        self._sides, self._comparison = sides, comparison
        comparison.alike = self._alike
        self._ndigits = [one.side.ndigits(one.side.source.ranks) for one in sides]
        self._order = min(sides, key=lambda one: one.complexity)
        self._own_ops: dict[tuple[str, str], int] = defaultdict(int)
        self._copies: dict[str, int] = defaultdict(int)

    def compare(self) -> None:
        """Compare all kinds that both sides have."""
        left, right = self._sides
        for one, other in ((left, right), (right, left)):
            for kind in one.kinds:
                if kind not in other.kinds:
                    self._say_kind(one.side, kind)
        for kind in sorted(set(left.kinds) & set(right.kinds), key=place_of):
            self._compare_kind(kind)
        for (kind, op), rows in self._own_ops.items():
            left.side.note(f"{rows:,} rows of {kind} have {op} on one side alone")
        for kind, rows in self._copies.items():
            left.side.note(f"{rows:,} rows of {kind} are of several copies on one side, which count once")

    def _say_kind(self, side: Side, kind: str) -> None:
        if kind in OPTIONAL:
            side.note(f"{{}} alone has {kind}, which the other layout need not have")
        else:
            side.has_kind(kind, ALL_RANKS)

    def _compare_kind(self, kind: str) -> None:
        firsts = [one.first_rows(kind) for one in self._sides]
        dropped = self._alone(kind, firsts)
        scale = self._scale(kind, firsts)
        positions = self._positions(kind)
        every = sorted({step for one in self._sides for step in one.steps(kind)})
        size = max(1, BATCH_ROWS // max(1, *map(len, firsts)))
        for some in (every[at : at + size] for at in range(0, len(every), size)):
            tables = [one.rows(kind, some[0], some[-1]) for one in self._sides]
            tables[1] = _scaled(tables[1], 1 / scale)
            rounded = (one.is_rounded(kind) for one in self._sides)
            ready = [_identified(_without(table, dropped), positions, is_rounded=next(rounded)) for table in tables]
            self._comparison.add(kind, ready, self._ndigits)

    def _positions(self, kind: str) -> dict[str, int]:
        """In the order of the side with fewer stages; what the other one has alone comes after it."""
        found = self._order.positions(kind)
        last = max(found.values(), default=0)
        others = next(one for one in self._sides if one is not self._order).positions(kind)
        return {**dict.fromkeys(others, last + 1), **found}

    def _alone(self, kind: str, firsts: Sequence[pa.Table]) -> list[str]:
        """Names that are not compared, with a word: what one side cannot have, and tensors of single ranks."""
        dropped: list[str] = []
        names = [set(table["name"].to_pylist()) for table in firsts]
        for one, known, others in zip(self._sides, names, reversed(names), strict=True):
            if kind in OPTIONAL and (alone := sorted(known - others)):
                dropped += alone
                one.side.note(f"{{}} alone has {kind} of {_listed(alone)}, which the other layout need not have")
        if kind in COMBINED and any(one.is_cut for one in self._sides):
            dropped += [name for name in names[0] & names[1] if name.startswith(".")]
        if kind in COMBINED or kind == RUN_KIND:
            return dropped
        for one, table in zip(self._sides, firsts, strict=True):
            of_ranks = {row["name"] for row in table.select(["name", PARTS]).to_pylist() if row[PARTS] > 1}
            if own := sorted(of_ranks.difference(dropped)):
                dropped += own if kind in OPTIONAL else []
                why = "whose parts of the batch differ" if kind in OPTIONAL else "which are compared as if they were one"
                one.side.note(f"{{}} has {kind} of single ranks, {why}: {_listed(own)}")
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
        said = f"{{}} has {kind} {best:g} times as large, as each of its parts averages its own loss. It is divided by that"
        self._sides[1].side.note(said)
        return best

    @cached_property
    def _scales(self) -> set[float]:
        """The scales that the layouts can have."""
        cut = [one.parts() for one in self._sides]
        outputs = [one.first_rows(COMBINED[0]) for one in self._sides if COMBINED[0] in one.kinds]
        copies = _copies(*outputs) if len(outputs) == 2 else [1, 1]
        numbers = [max(1, ranks // held) for (ranks, _), held in zip(cut, copies, strict=True)]
        reduced = [one.first_rows(REDUCED) for one in self._sides if REDUCED in one.kinds]
        if len(reduced) == 2 and abs(_ratio(reduced) - 1) < CLOSE:
            numbers = [number * micro_steps for number, (_, micro_steps) in zip(numbers, cut, strict=True)]
        wholes = {divisor for number in numbers for divisor in range(1, number + 1) if number % divisor == 0}
        return {up / down for up in wholes for down in wholes}

    def _alike(self, kind: str, left: Row, right: Row) -> tuple[Row, Row]:
        """With the same number of elements if one side holds several copies, and without ops of one side alone."""
        rows = [dict(left), dict(right)]
        if kind in COMBINED and left[ELEMENTS] and right[ELEMENTS]:
            few, many = sorted(rows, key=lambda row: row[ELEMENTS])
            copies, rest = divmod(many[ELEMENTS], few[ELEMENTS])
            if copies > 1 and not rest:
                _take_copies(many, copies)
                self._copies[kind] += 1
        for op in left:
            if op in right and (left[op] is None) != (right[op] is None) and op not in NOT_OPS:
                rows[0][op] = rows[1][op] = None
                self._own_ops[kind, op] += op != ELEMENTS
        return rows[0], rows[1]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _take_copies(row: Row, copies: int) -> None:
    """Leave one of several copies in a row, if all of them are the same."""
    row[ELEMENTS] //= copies
    if row.get("norm") is not None:
        row["norm"] /= math.sqrt(copies)
    for op in INTEGER_OPS:
        if row.get(op) is not None:
            row[op] = row[op] // copies if row[op] % copies == 0 else row[op]


def _ratio(tables: Sequence[pa.Table]) -> float:
    """How many times as large tensors of the right side are, in the middle; 1 if sizes do not say."""
    left, right = (dict(_sizes(table)) for table in tables)
    found = [right[name] / size for name, size in left.items() if right.get(name) and size]
    usual = median(found) if found else 1.0
    return usual if 0 < usual < math.inf else 1.0


def _copies(left: pa.Table, right: pa.Table) -> list[int]:
    """How often each side holds the outputs of modules, at most."""
    sizes = [dict(zip(*(rows[one].to_pylist() for one in ("name", ELEMENTS)), strict=True)) for rows in (left, right)]
    shared = [name for name in sizes[0] if sizes[0][name] and sizes[1].get(name)]
    pairs = (sizes, reversed(sizes))
    return [max((own[name] // other[name] for name in shared), default=1) or 1 for own, other in pairs]


def _sizes(rows: pa.Table) -> Iterator[tuple[str, float]]:
    """By name, how large the elements are."""
    for row in rows.to_pylist():
        if row.get("norm") is not None and row[ELEMENTS]:
            yield row["name"], row["norm"] / math.sqrt(row[ELEMENTS])
        elif ends := [abs(row[op]) for op in EXTREMES if row.get(op) is not None]:
            yield row["name"], max(ends)


def _scaled(rows: pa.Table, factor: float) -> pa.Table:
    """With all sizes multiplied. Shares of small or lost elements do not say what they would be then."""
    for op in (*EXTREMES, *AVERAGES, *SHARES) if factor != 1 else ():
        if op in rows.column_names:
            lost = pa.nulls(len(rows), pa.float64())
            column = lost if op in SHARES else call_function("multiply", [rows[op], pa.scalar(factor)])
            rows = rows.set_column(rows.column_names.index(op), op, column)
    return rows


def _without(rows: pa.Table, names: Sequence[str]) -> pa.Table:
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
