"""Two monitored runs: what they have recorded, row by row, whatever the formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from monitor.compare.values import Compared, ComparisonError, Difference, Finding, of_numbers
from monitor.merge.report import summary
from monitor.query.batches import IDENTITY, Batch, batch_of, batches, files_of, kinds_in, ops_in, place_of
from monitor.query.opened import open_source
from monitor.query.sources import MergedSet, QueryError, RunSource
from monitor.sinks.csv import rounded
from monitor.stats.ops import TEXT_OPS

Row = dict[str, Any]
Key = tuple[int, int, str]
"""A rank, a step, and what the row is of."""

BATCH_ROWS: Final = 20_000
"""Rows that are compared at a time, about: as Python objects a row takes a kilobyte."""

MOST_ROWS: Final = 1 << 40
"""Of a kind in a step: kinds follow each other in the order in which a step has them."""

NDIGITS: Final = 6
"""Of a merged set of CSV, which does not say its own: the default."""


def compare(left: Path, right: Path) -> Compared:
    """Compare what was recorded below two directories: of ranks, or merged sets, in any format.

    CSV has rounded numbers. Where only one side has a row from CSV, the numbers of the other are rounded alike.

    Raises:
        ComparisonError: There is nothing, or no kind and rank that both have.
    """
    sides = [_opened(side) for side in (left, right)]
    places = [_places(side) for side in sides]
    shared = places[0] & places[1]
    if not any(places):  # both can be read, and neither has rows
        return Compared(0, [])
    if not shared:
        raise ComparisonError(f"{left} and {right} have no kind of rows and no rank in common.")
    rows, findings = 0, []
    for kind in sorted({kind for kind, _ in shared}, key=place_of):
        for pair in _pairs(sides[0], sides[1], kind, [rank for each, rank in shared if each == kind]):
            number, found = _differences(pair, [_ndigits(side, pair[0].ranks) for side in sides])
            rows += number
            findings += found
    findings.sort(key=lambda finding: (finding.step, finding.order, finding.rank_order))
    return Compared(rows, findings, thinned=(*_thinned(left, sides[0]), *_thinned(right, sides[1])))


def _thinned(directory: Path, source: RunSource) -> Iterator[str]:
    return (f"{directory}: {line}" for what, line in summary(source.told()) if what == "thinned")


def _opened(directory: Path) -> RunSource:
    try:
        return open_source(directory)
    except QueryError as error:
        raise ComparisonError(f"{directory} holds neither a precision dump nor a monitored run: {error}") from error


def _places(source: RunSource) -> set[tuple[str, int]]:
    """The kinds and ranks that have files."""
    found = ((kind, ranks) for kind in kinds_in(source) for ranks, _ in files_of(source, kind))
    return {(kind, rank) for kind, ranks in found for rank in ranks}


def _ndigits(source: RunSource, ranks: tuple[int, ...]) -> int:
    known = [one for one in source.configured("ndigits", ranks) if isinstance(one, int)]
    return min(known, default=NDIGITS)


def _pairs(left: RunSource, right: RunSource, kind: str, shared: list[int]) -> Iterator[tuple[Batch, Batch]]:
    """The same steps and ranks of both sides, cut as the files of a merged set are, which hold all ranks."""
    for one in batches(right if isinstance(right, MergedSet) else left, kind, BATCH_ROWS):
        if ranks := [rank for rank in one.ranks if rank in shared]:
            yield batch_of(left, kind, ranks, one.steps), batch_of(right, kind, ranks, one.steps)


def _differences(pair: tuple[Batch, Batch], ndigits: list[int]) -> tuple[int, list[Finding]]:
    """One kind, in the steps that a rank has on both sides."""
    tables = [one.read()[0] for one in pair]
    shared = [op for op in ops_in(tables[0]) if op in ops_in(tables[1])]
    tables = [table.select([*IDENTITY, *shared]) for table in tables]
    if tables[0].equals(tables[1]):
        return len(tables[0]), []
    left, right = (_rows(table.to_pylist(), pair[0].kind) for table in tables)
    both = {key[:2] for key in left} & {key[:2] for key in right}
    findings: list[Finding] = []
    compared, first = 0, place_of(pair[0].kind) * MOST_ROWS
    places: dict[tuple[int, int], int] = {}
    for key, row in left.items():
        order = first + places.get(key[:2], 0)
        places[key[:2]] = order - first + 1
        if key in right:
            compared += 1
            findings += _differing(key, order, *_alike(row, right[key], ndigits), shared)
        elif key[:2] in both:
            findings.append(_finding(key, order, "missing", "there", ""))
    added = (key for key in right if key[:2] in both and key not in left)
    return compared, [*findings, *(_finding(key, first + places[key[:2]], "added", "", "there") for key in added)]


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
