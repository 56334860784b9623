"""Two monitored runs: what they have recorded, row by row, whatever the formats."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from monitor.compare.tolerances import VALUE, Rounding, judged
from monitor.compare.values import ROWS, Compared, ComparisonError, Difference, Finding, of_numbers
from monitor.coordinator.manifest_format import ManifestError
from monitor.merge.report import listed_steps, said_steps, summary
from monitor.query.batches import IDENTITY, SHOWN_KINDS, Batch, batch_of, batches, files_of, kinds_in, ops_in, place_of
from monitor.query.opened import open_source
from monitor.query.sources import MergedSet, QueryError, RunSource
from monitor.series import RUN_KIND, Series, underlying_series
from monitor.sinks.csv import rounded
from monitor.sinks.files import StepSpan
from monitor.stats.ops import LAYOUT_OPS, TEXT_OPS

Row = dict[str, Any]
Key = tuple[int, int, str]
"""A rank, a step, and what the row is of."""

BATCH_ROWS: Final = 20_000
"""Rows that are compared at a time, about: as Python objects a row takes a kilobyte."""

MOST_ROWS: Final = 1 << 40
"""Of a kind in a step, if rows do not say in which order they were measured: kinds follow each other then."""

USED, CALLS, REDUCED, STEPPED = (phase * MOST_ROWS * len(SHOWN_KINDS) for phase in range(4))
PHASES: Final = {
    **dict.fromkeys(("param_origin", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "linear_hook"), USED),
    **dict.fromkeys(("grad_reduced", "run"), REDUCED),
    **dict.fromkeys(("update_ratio", "adam_update", "adam_ratio"), STEPPED),
    **dict.fromkeys(("param_updated", "exp_avg_updated", "exp_avg_sq_updated", "max_exp_avg_sq_updated"), STEPPED),
}
"""The order of a step, where it is not that of measuring: what the step uses, its calls forward and backward (all other kinds),
the gradients that the optimizer is given, and what it makes of them."""

MISSING: Final = ("missing ranks", "gaps", "dropped", "thinned", "not closed", "set aside")
"""What a side's own report says of rows that are not there."""

NOT_JUDGED: Final = "{} of {}: rounding changes them, and there is no other op. --tolerance 0 compares them"

NDIGITS: Final = 6
"""Of a merged set of CSV, which does not say its own: the default."""


def compare(left: Path, right: Path, *, exact: bool = False) -> Compared:
    """Compare what was recorded below two directories: of ranks, or merged sets, in any format.

    CSV has rounded numbers. Where only one side has a row from CSV, the numbers of the other are rounded alike. What only one
    side has, and what is known to be missing on a side, is named.

    Args:
        exact: Whether everything is a finding that is not the same, also where rounding explains it.

    Raises:
        ComparisonError: There is nothing, or no kind and rank that both have.
    """
    sides = [_opened(side) for side in (left, right)]
    places = [_places(side) for side in sides]
    shared = places[0] & places[1]
    if not any(places):  # both can be read, and neither has rows
        return Compared(0, [], unit=ROWS)
    if not shared:
        raise ComparisonError(f"{left} and {right} have no kind of rows and no rank in common.")
    rows, findings, alone = 0, [], (OneSide(left, sides[0]), OneSide(right, sides[1]))
    rounding = None if exact else _rounding_of(sides)
    for kind in sorted({kind for kind, _ in shared}, key=place_of):
        for pair in _pairs(sides[0], sides[1], kind, [rank for each, rank in shared if each == kind]):
            number, found = _differences(pair, [_ndigits(side, pair[0].ranks) for side in sides], alone, rounding)
            rows += number
            findings += found
    findings.sort(key=lambda finding: (finding.step, finding.order, finding.rank_order))
    said = [
        line
        for one, source, own, other in zip(alone, sides, places, reversed(places), strict=True)
        for line in (*one.missing(source), *one.kinds(own - other), *one.steps(), *one.ops())
    ]
    whole = Compared(rows, findings, not_compared=tuple(said), unit=ROWS)
    return whole if rounding is None else judged(whole, rounding)


class OneSide:
    """What one of two runs has alone, or lacks.

    Attributes:
        derives_ops: Whether it has all ops, not only those that were recorded.
    """

    def __init__(self, directory: Path, source: RunSource) -> None:
        self._directory = directory
        self.derives_ops = isinstance(source, MergedSet)
        self._steps: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._ops: dict[str, dict[str, None]] = defaultdict(dict)
        self._texts: dict[str, dict[str, None]] = defaultdict(dict)

    def add(self, kind: str, places: Iterable[tuple[int, int]]) -> None:
        """It alone has rows of a kind of these ranks and steps."""
        for rank, step in places:
            self._steps[kind, rank].append(step)

    def has_ops(self, kind: str, ops: Iterable[str]) -> None:
        """It alone has these ops of a kind."""
        self._ops[kind].update(dict.fromkeys(ops))

    def is_not_judged(self, kind: str, ops: Iterable[str]) -> None:
        """Both have these texts of a kind, and no number."""
        self._texts[kind].update(dict.fromkeys(ops))

    def ops(self) -> Iterator[str]:
        """A line for kinds with the same ops."""
        for found, said in ((self._ops, f"{self._directory} alone has {{}} of {{}}"), (self._texts, NOT_JUDGED)):
            kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
            for kind, ops in found.items():
                kinds[tuple(ops)].append(kind)
            yield from (said.format(", ".join(ops), ", ".join(of)) for ops, of in kinds.items() if ops)

    def missing(self, source: RunSource) -> Iterator[str]:
        """What its own report names as missing."""
        found = [(what, line) for what, line in summary(source.told()) if what in MISSING]
        return (f"{self._directory}: {f'{what} ' if what == MISSING[0] else ''}{line}" for what, line in found)

    def kinds(self, places: Iterable[tuple[str, int]]) -> Iterator[str]:
        """It alone has these kinds on these ranks."""
        ranks: dict[str, list[int]] = defaultdict(list)
        for kind, rank in places:
            ranks[kind].append(rank)
        return (f"{self._directory} alone has {kind} of {_ranks(of)}" for kind, of in sorted(ranks.items()))

    def steps(self) -> Iterator[str]:
        """A line for kinds of the same steps and ranks."""
        ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
        for (kind, rank), steps in self._steps.items():
            ranks[kind, said_steps(listed_steps(steps))].append(rank)
        kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (kind, at), of in ranks.items():
            kinds[_ranks(of), at].append(kind)
        return (f"{self._directory} alone has {', '.join(some)} of {of} at {at}" for (of, at), some in kinds.items())


def _ranks(ranks: Iterable[int]) -> str:
    return said_steps(listed_steps(ranks)).replace("step", "rank")


def _opened(directory: Path) -> RunSource:
    try:
        return open_source(directory)
    except QueryError as error:
        raise ComparisonError(
            f"{directory} holds neither a precision dump nor a monitored run that can be read: {error}"
        ) from error


def _places(source: RunSource) -> set[tuple[str, int]]:
    """The kinds and ranks that have files."""
    found = ((kind, ranks) for kind in kinds_in(source) for ranks, _ in files_of(source, kind))
    return {(kind, rank) for kind, ranks in found for rank in ranks}


def _ndigits(source: RunSource, ranks: tuple[int, ...]) -> int:
    known = [one for one in source.configured("ndigits", ranks) if isinstance(one, int)]
    return min(known, default=NDIGITS)


def _pairs(left: RunSource, right: RunSource, kind: str, shared: list[int]) -> Iterator[tuple[Batch, Batch]]:
    """The same steps and ranks of both sides: all, cut as the files of a merged set are, which hold all ranks."""
    first, second = (right, left) if isinstance(right, MergedSet) else (left, right)
    others = [one.steps.last for one in batches(second, kind, BATCH_ROWS)]
    for of, lots in itertools.groupby(batches(first, kind, BATCH_ROWS), key=lambda one: one.ranks):
        if ranks := [rank for rank in of if rank in shared]:
            for steps in _spans([one.steps.last for one in lots], others):
                yield batch_of(left, kind, ranks, steps), batch_of(right, kind, ranks, steps)


def _spans(ends: Sequence[int], others: Sequence[int]) -> Iterator[StepSpan]:
    """All steps, cut after those of ``ends``, and after those of ``others`` that come later."""
    begin = 0
    for end in sorted({*ends, *(one for one in others if one > max(ends))}):
        yield StepSpan(begin, end)
        begin = end + 1


def _rounding_of(sides: Sequence[RunSource]) -> Rounding:
    try:
        return Rounding([side.series() for side in sides], _first_step(sides), max(map(_largest_rate, sides)))
    except (pa.ArrowException, ManifestError) as error:
        raise QueryError(str(error)) from error


def _largest_rate(side: RunSource) -> float:
    """The largest learning rate of all steps; 0 if none was recorded."""
    found = [0.0]
    for batch in batches(side, RUN_KIND, BATCH_ROWS) if RUN_KIND in kinds_in(side) else ():
        rows, _ = batch.read()
        rates = rows.filter(pc.starts_with(rows["name"], "learning_rate"))  # type: ignore[attr-defined]
        found += rates[VALUE].drop_null().to_pylist() if VALUE in ops_in(rows) else []
    return max(map(abs, found))


def _first_step(sides: Sequence[RunSource]) -> int:
    """The first that both have."""
    first = [min((steps.start for spans in side.steps.values() for steps in spans), default=0) for side in sides]
    return max(first)


def _differences(
    pair: tuple[Batch, Batch], ndigits: list[int], alone: tuple[OneSide, OneSide], rounding: Rounding | None
) -> tuple[int, list[Finding]]:
    """One kind, in the steps that a rank has on both sides."""
    tables = [one.read()[0] for one in pair]
    recorded = [[op for op in ops_in(table) if table[op].null_count < len(table)] for table in tables]
    shared = [op for op in recorded[0] if op in recorded[1]]
    if all(map(len, tables)):
        _say_ops(pair[0].kind, recorded, alone, judged=rounding is not None)
    tables = [table.select([*IDENTITY, *shared]) for table in tables]
    if tables[0].equals(tables[1]):
        return len(tables[0]) if shared else 0, []
    numbers = [op for op in shared if op not in TEXT_OPS]
    left, right = (_rows(table.to_pylist(), pair[0].kind) for table in tables)
    places = [{key[:2] for key in side} for side in (left, right)]
    both = places[0] & places[1]
    for side, own in zip(alone, places, strict=True):
        side.add(pair[0].kind, own - both)
    findings: list[Finding] = []
    largest = {} if rounding is None else rounding.largest(pair[0].kind, left.values())
    compared, first = 0, place_of(pair[0].kind) * MOST_ROWS
    last: dict[tuple[int, int], int] = {}
    for key, row in left.items():
        position = last.get(key[:2], first) if row["call_id"] is None else row["call_id"]
        last[key[:2]] = position + 1
        order = _phase(pair[0].kind, row["name"]) + position
        if key in right:
            compared += bool(shared)
            decimals = min(ndigits) if _is_of_csv(row, right[key]) else None
            sides = _alike(row, right[key], ndigits)
            found = list(_differing(key, order, *sides, shared))
            if rounding is not None:
                others = largest.get(key[1], 0.0)
                share = rounding.share(pair[0].kind, sides, numbers, others, decimals) if found else (0.0, "")
                found = [*_unexplained(found, *share, rounding), *_of_series(key, order, pair[0].kind, row, shared, rounding)]
            findings += found
        elif key[:2] in both:
            findings.append(_finding(key, order, "missing", "there", ""))
    for key in (key for key in right if key[:2] in both and key not in left):
        order = _phase(pair[0].kind, right[key]["name"]) + last[key[:2]]
        findings.append(_finding(key, order, "added", "", "there"))
    return compared, findings


def _say_ops(kind: str, recorded: Sequence[Sequence[str]], alone: tuple[OneSide, OneSide], *, judged: bool) -> None:
    """Name the ops that only one side has, and the texts that cannot be judged because the kind has no numbers."""
    shared = [op for op in recorded[0] if op in recorded[1]]
    for one, own in zip(alone, recorded, strict=True):
        one.has_ops(kind, [op for op in own if op not in shared] if not (one.derives_ops and shared) else [])
    if judged and shared and all(op in TEXT_OPS for op in shared):
        alone[0].is_not_judged(kind, shared)


def _phase(kind: str, name: str) -> int:
    """A replica's is that of the kind that is checked."""
    return PHASES.get(underlying_series(Series(kind, 0, name)).kind, CALLS)


def _rows(rows: list[Row], kind: str) -> dict[Key, Row]:
    """In the order in which they were measured."""
    found: dict[Key, Row] = {}
    for row in rows:
        micro_step = "" if row["micro_step"] is None else f", micro-step {row['micro_step']}"
        found[row["rank"], row["step"], f"{kind}/{row['vpp_stage']}:{row['name']}{micro_step}"] = row
    return found


def _alike(left: Row, right: Row, ndigits: list[int]) -> tuple[Row, Row]:
    """Both rows, with the numbers of one rounded if the other is from CSV."""
    if (left["call_id"] is None) == (right["call_id"] is None):
        return left, right
    return (left, _rounded(right, ndigits[0])) if left["call_id"] is None else (_rounded(left, ndigits[1]), right)


def _rounded(row: Row, ndigits: int) -> Row:
    return {name: rounded(value, ndigits) if isinstance(value, float) else value for name, value in row.items()}


def _is_of_csv(*rows: Row) -> bool:
    return any(row["call_id"] is None for row in rows)


def _unexplained(found: Iterable[Finding], share: float, op: str, rounding: Rounding) -> Iterator[Finding]:
    """The findings of a row that rounding does not explain. Other bits explain other check sums and histograms."""
    for one in found:
        if one.what in LAYOUT_OPS:
            yield one
        elif one.what == "values" and not rounding.explains(share, one.step):
            yield replace(one, rounding=share, op=op)


def _of_series(key: Key, order: int, kind: str, row: Row, ops: list[str], rounding: Rounding) -> Iterator[Finding]:
    """The dtype or the shape, where it is no op of the rows."""
    found = rounding.unlike.pop((kind, row["vpp_stage"], row["name"]), ())
    return (_finding(key, order, *one) for one in found if one[0] not in ops)


def _differing(key: Key, order: int, left: Row, right: Row, ops: list[str]) -> Iterator[Finding]:
    for op in ops:
        if op in TEXT_OPS and left[op] != right[op]:
            yield _finding(key, order, op, str(left[op]), str(right[op]))
    numbers = [op for op in ops if op not in TEXT_OPS]
    difference = of_numbers([(left[op], right[op]) for op in numbers]) if numbers else None
    if difference is not None and not difference.same:
        yield _finding(key, order, "values", _shown(left, numbers), _shown(right, numbers), difference)


def _finding(key: Key, order: int, what: str, left: str, right: str, difference: Difference | None = None) -> Finding:
    return Finding(key[1], f"rank{key[0]}", order, key[2], what, left, right, difference)


def _shown(row: Mapping[str, Any], ops: list[str]) -> str:
    return ", ".join(f"{op} {row[op]:.9g}" for op in ops if row[op] is not None)
