"""Two monitored runs: what they have recorded as CSV, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from monitor.compare.values import Compared, ComparisonError, Finding, of_numbers
from monitor.convert.conversion import DATA_TYPES, IDENTITY, ConversionError, Course, Request, courses_of, read_record
from monitor.merge.execution import MergeError
from monitor.stats.ops import TEXT_OPS

Row = Mapping[str, Any]
Key = tuple[int, str]
"""A step, and what the row is of."""

MOST_ROWS = 1 << 40
"""Of a kind in a step: kinds follow each other in the order in which a step has them."""


def compare(left: Path, right: Path) -> Compared:
    """Compare what was recorded below two directories.

    Raises:
        ComparisonError: There is nothing, or no kind and rank that both have.
    """
    sides = [_courses(side) for side in (left, right)]
    shared = [key for key in sides[0] if key in sides[1]]
    if not any(sides):  # both can be read, and neither has rows
        return Compared(0, [])
    if not shared:
        raise ComparisonError(f"{left} and {right} have no kind of rows and no rank in common.")
    rows, findings = 0, []
    for key in shared:
        number, found = _course(sides[0][key], sides[1][key])
        rows += number
        findings += found
    findings.sort(key=lambda finding: (finding.step, finding.order, finding.rank_order))
    return Compared(rows, findings)


def _courses(directory: Path) -> dict[tuple[str, int], Course]:
    try:
        courses, _ = courses_of(Request.of(directory, None, None, 1, None, directory / "unused", None, ""))
    except (ConversionError, MergeError) as error:
        raise ComparisonError(f"{directory} holds neither a precision dump nor CSV of a monitored run: {error}") from error
    return {(course.kind, course.rank): course for course in courses}


def _course(left: Course, right: Course) -> tuple[int, list[Finding]]:
    """One kind of one rank, in the steps that both have."""
    own, others = _rows(left), _rows(right)
    steps = {step for step, _ in own} & {step for step, _ in others}
    before = DATA_TYPES.index(left.kind) * MOST_ROWS
    rank, findings, compared = f"rank{left.rank}", [], 0
    for order, (key, row) in enumerate(own.items()):
        if key[0] not in steps:
            continue
        if key not in others:
            findings.append(Finding(key[0], rank, before + order, key[1], "missing", "there", ""))
            continue
        compared += 1
        findings += _differing(key, rank, before + order, row, others[key])
    added = [key for key in others if key[0] in steps and key not in own]
    return compared, findings + [Finding(step, rank, before + len(own), name, "added", "", "there") for step, name in added]


def _differing(key: Key, rank: str, order: int, left: Row, right: Row) -> Iterator[Finding]:
    shared = [op for op in left if op in right]
    for op in shared:
        if op in TEXT_OPS and left[op] != right[op]:
            yield Finding(key[0], rank, order, key[1], op, str(left[op]), str(right[op]))
    numbers = [op for op in shared if op not in TEXT_OPS]
    difference = of_numbers([(left[op], right[op]) for op in numbers]) if numbers else None
    if difference is not None and not difference.same:
        yield Finding(key[0], rank, order, key[1], "values", _shown(left, numbers), _shown(right, numbers), difference)


def _rows(course: Course) -> dict[Key, Row]:
    """By step and name, in the order in which they were measured."""
    found: dict[Key, Row] = {}
    for record in course.records:
        table, _ = read_record(record)
        for row in table.to_pylist():
            identity = {name: row.pop(name) for name in IDENTITY}
            micro_step = "" if identity["micro_step"] is None else f", micro-step {identity['micro_step']}"
            found[identity["step"], f"{course.kind}/{identity['vpp_stage']}:{identity['name']}{micro_step}"] = row
    return found


def _shown(row: Row, ops: list[str]) -> str:
    return ", ".join(f"{op} {row[op]:.9g}" for op in ops if row[op] is not None)
