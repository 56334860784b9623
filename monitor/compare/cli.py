"""``monitor-compare``: where two runs part."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final
from xml.etree import ElementTree

import pyarrow as pa
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from monitor.bars import Progress, bars, silent
from monitor.cli import Command, Tolerances, Version, Whole, interruptible
from monitor.compare import dumps, runs
from monitor.compare.runs import How
from monitor.compare.tolerances import Limits
from monitor.compare.values import ALONE, Compared, ComparisonError, Finding
from monitor.coordinator.output import write_whole
from monitor.merge.execution import MergeError
from monitor.query.sources import QueryError
from monitor.terminal import CLEAN, FLAWED, NOTHING, counted, plain, say

# --- What a comparison has found, as a table of CSV and for a terminal.

COLUMNS: Final = (
    "step", "rank", "order", "name", "what", "absolute_error", "relative_error", "cosine", "left", "right", "rounding",
)  # fmt: skip

OF_A_LOG: Final = 160
"""The width of output that is not for a terminal."""
EVERY: Final = 10
"""Rows of each of the tables for a terminal."""


def write_csv(path: Path, compared: Compared) -> None:
    """Every finding, in execution order. The file appears whole.

    Raises:
        OSError: It cannot be written.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    rows.writerows(_row(finding) for finding in compared.findings)
    # JSON and file names may hold surrogates, which UTF-8 lacks.
    write_whole(path, text.getvalue().encode(errors="backslashreplace"))


def largest(compared: Compared) -> list[Finding]:
    """For each tensor, where it differs most: beyond rounding, then by relative error, the earlier first among equals."""
    numbered = [(finding.rounding, finding.difference.size, finding) for finding in compared.findings if finding.difference]
    found: dict[tuple[str, str], Finding] = {}
    for *_, finding in sorted(numbered, key=lambda one: (-one[0], -one[1])):
        found.setdefault((finding.rank, finding.name), finding)
    return list(found.values())


def table(title: str, findings: list[Finding]) -> Table:
    """Some of the findings. Names are long: they have what the others leave of a line."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    of_tensors = any(one.difference is not None and one.difference.cosine is not None for one in findings)
    for column in ("step", "rank", "absolute", "relative", "cosine" if of_tensors else "rounding", "name"):
        shown.add_column(column, overflow="fold")
    for finding in findings:
        absolute, relative, cosine = _errors(finding, 3)
        last = cosine if of_tensors else f"{finding.rounding:.3g}" if finding.rounding < math.inf else ""
        # A str would be markup to rich.
        cells = (str(finding.step), finding.rank, absolute, relative, last, finding.name)
        shown.add_row(*(Text(plain(one)) for one in cells))
    return shown


def described(finding: Finding) -> str:
    """In a line or two: what is not the same, and where."""
    where = f"step {finding.step}, {finding.rank}: {finding.name}"
    if finding.what in ALONE and {finding.left, finding.right} == {"there", ""}:
        return f"{where}: {ALONE[finding.what]}"
    if finding.difference is None:
        return f"{where}: {finding.what}: {finding.left or 'nothing'} against {finding.right or 'nothing'}"
    row = _row(finding)
    cosine = f", cosine {row[7]}" if row[7] else ""
    errors = f"absolute error {row[5]}, relative error {row[6]}{cosine}"
    if finding.op:
        errors = f"{finding.op}: {errors}"
    if finding.rounding < math.inf:
        errors += f", {finding.rounding:.3g} times the rounding of one step"
    return f"{where}: {errors}\n  left  {finding.left}\n  right {finding.right}"


def _row(finding: Finding) -> list[str]:
    place = [str(finding.step), finding.rank, str(finding.order), finding.name, finding.what]
    return [*place, *_errors(finding, 6), finding.left, finding.right, f"{finding.rounding:.6g}"]


def _errors(finding: Finding, digits: int) -> list[str]:
    """Absolute, relative and cosine, which is closest to 1 where it matters and has three more digits."""
    difference = finding.difference
    if difference is None:
        return ["", "", ""]
    cosine = "" if difference.cosine is None else f"{difference.cosine:.{digits + 3}f}"
    return [f"{difference.absolute:.{digits}g}", f"{difference.relative:.{digits}g}", cosine]


# --- What it has found, as a JUnit report.

MOST_OF_A_CASE: Final = 10
"""Findings of a case."""

_NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_of(compared: Compared, name: str) -> bytes:
    """A report that build servers show, in UTF-8: a test suite of this name, with a case for each kind of rows."""
    found: Mapping[str, list[Finding]] = defaultdict(list)
    for finding in compared.findings:
        found[finding.kind].append(finding)
    kinds = dict.fromkeys([*found, *compared.counted])  # what parts first comes first
    suite = ElementTree.Element("testsuite", name=_text(name))
    for kind in kinds:
        _case(suite, kind, [described(one) for one in found[kind]])
    _case(suite, "everything is there", list(compared.not_compared))
    if compared.is_empty:
        _case(suite, "something was compared", ["there is no tensor that both sides have in the same step"])
    failed = sum(len(case) > 0 for case in suite)
    suite.attrib |= {"tests": str(len(suite)), "failures": str(failed), "errors": "0", "skipped": "0"}
    report: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return report


def _case(suite: ElementTree.Element, name: str, wrong: list[str]) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="trainermon.compare", name=_text(name))
    if wrong:
        more = f"\nand {len(wrong) - MOST_OF_A_CASE:,} more" if len(wrong) > MOST_OF_A_CASE else ""
        failure = ElementTree.SubElement(case, "failure", message=_text(wrong[0].partition("\n")[0]))
        failure.text = _text("\n".join(wrong[:MOST_OF_A_CASE]) + more)


def _text(text: str) -> str:
    """Without characters that XML cannot hold."""
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)


# --- The command.

app: Final = Command()


@app.command()
def monitor_compare(
    sides: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B", help="Two dumps, or the output directories of two runs. With --calibrate, two or more runs."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write what is reported to this CSV file."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a JUnit report, in which each kind of rows is a case.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Relative differences up to this are not reported [default: 0 for dumps; for runs, rounding]."
        ),
    ] = None,
    limits: Tolerances = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write to this file by how much healthy repeats of a run differ. Nothing is judged."),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="FROM=TO", help="What a tensor of A is called in B, such as 'model.*=*'. May be repeated."
        ),
    ] = None,
    jobs: Annotated[
        list[str] | None,
        typer.Option(
            "--job",
            metavar="ID",
            help="The id of the job, or its beginning, if a side contains several jobs. Twice: of A, then of B.",
        ),
    ] = None,
    whole: Whole = None,
    _version: Version = False,
) -> None:
    """Compare two precision dumps, or two monitored runs.

    Runs may have any format. It shows the first tensor in execution order that differs by more than rounding explains,
    and the largest differences. With --tolerance 0 it shows every difference. Rows that only one of two runs has are
    named, too.

    Exit status: 0 they are the same, 1 they differ, something is missing on one side or there is no tensor to compare, 2
    nothing was compared.
    """
    try:
        _check(sides, output, junit, calibrate)
        _check_tolerances(tolerance, limits, calibrate)
        how = How(tolerance is not None, whole, names or (), None if limits is None else Limits.read(limits), jobs or ())
        if calibrate is not None:
            _calibrate(sides, calibrate, how)
            return
        with interruptible(), bars() as progress:
            found = within(compare(sides[0], sides[1], how, progress), tolerance or 0.0)
        if output is not None:
            write_csv(output, found)
        if junit is not None:
            write_whole(junit, junit_of(found, f"{sides[0]} and {sides[1]}"))
    except (ComparisonError, OSError) as error:
        said = f"Nothing was compared: {error}"
        say(Console(stderr=True), said, style="red")
        if junit is not None and junit.resolve().parent.is_dir() and not junit.is_dir():  # not the report of an earlier one
            write_whole(junit, junit_of(Compared(0, [], not_compared=(said,)), " and ".join(map(str, sides))))
        raise typer.Exit(NOTHING) from error
    _show(found)
    raise typer.Exit(FLAWED if found.findings or found.not_compared or found.is_empty else CLEAN)


def _check(sides: Sequence[Path], output: Path | None, junit: Path | None, calibrate: Path | None) -> None:
    """Refuse what cannot be done before anything is read."""
    if len(sides) < 2 or (calibrate is None and len(sides) > 2):
        more = "Name two of them, or --calibrate FILE and two or more healthy runs."
        raise ComparisonError(f"{len(sides)} directories are named. {more}")
    if calibrate is not None and (output is not None or junit is not None):
        raise ComparisonError("--calibrate judges nothing. Leave -o and --junit out.")
    for path in (one for one in (output, junit, calibrate) if one is not None):
        if not path.resolve().parent.is_dir():
            raise ComparisonError(f"there is no directory for {path}.")
        if path.is_dir():
            raise ComparisonError(f"{path} is a directory. Name a file.")


def _check_tolerances(tolerance: float | None, limits: Path | None, calibrate: Path | None) -> None:
    if tolerance is not None and not math.isfinite(tolerance):
        raise ComparisonError(f"--tolerance is {tolerance}. Give a finite number.")
    if [tolerance, limits, calibrate].count(None) < 2:
        raise ComparisonError("--tolerance, --tolerances and --calibrate exclude each other. Choose one of them.")


def _calibrate(runs: Sequence[Path], path: Path, how: How) -> None:
    """Learn from all pairs of some runs."""
    with interruptible(), bars() as progress:
        found = [_compared_runs(left, right, how, progress) for left, right in itertools.combinations(runs, 2)]
    if any(pair.is_empty for pair in found):
        raise ComparisonError("two of the runs have no tensor in the same step.")
    limits = Limits.learned(found, len(runs))
    limits.write(path)
    console = Console()
    entries = counted(len(limits.allowed), "entry", "entries")
    say(console, f"{path}: {entries}, from steps {limits.first} to {limits.last} of {len(runs)} runs")
    seen = {name: max(sizes) for pair in found for name, sizes in pair.seen.items()}
    if seen:
        kind, name = max(seen, key=lambda one: seen[one])
        say(console, f"largest: {kind}/{name}: {seen[kind, name]:.3g} times the rounding of one step")
    for line in dict.fromkeys(line for pair in found for line in pair.not_compared):
        say(console, f"Not compared: {line}")
    if never := [one for pair in found for one in pair.findings if not math.isfinite(one.rounding)]:
        say(console, f"{counted(len(never), 'difference')} that no tolerance allows, the first: {described(never[0])}")


def compare(left: Path, right: Path, how: How = How(), progress: Progress = silent) -> Compared:  # noqa: B008 - frozen
    """Dumps as dumps, and anything else as runs.

    Raises:
        ComparisonError: There is nothing that could be compared.
    """
    if not any(dumps.is_dump(side) for side in (left, right)):
        return _compared_runs(left, right, how, progress)
    if how != How(exact=how.exact):
        raise ComparisonError("--map, --job, --whole, --ranks and --tolerances are for runs, and a side is a precision dump.")
    return dumps.compare(left, right)


def _compared_runs(left: Path, right: Path, how: How, progress: Progress) -> Compared:
    try:
        return runs.compare(left, right, how, progress=progress)
    except (MergeError, QueryError) as error:
        raise ComparisonError(str(error)) from error
    except pa.ArrowException as error:
        raise ComparisonError(f"a file is damaged: {str(error).partition(chr(10))[0]}") from error


def within(compared: Compared, tolerance: float) -> Compared:
    """Without the differences that are no larger. One that is no number is larger than any."""
    kept = [one for one in compared.findings if one.difference is None or one.difference.size > tolerance or not tolerance]
    return replace(compared, findings=kept)


def _show(found: Compared) -> None:
    console = Console()
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = OF_A_LOG
    for line in _summary(found):
        say(console, line)
    if found.first is not None:
        say(console, f"first: {described(found.first)}", style="bold")
    if worst := largest(found)[:EVERY]:
        console.print(table("largest", worst))
    for line in found.not_compared:
        say(console, f"Not compared: {line}")
    for line in found.notes:
        say(console, f"Note: {line}")


def _summary(found: Compared) -> Iterator[str]:
    if alone := len(found.findings) - found.different:
        yield f"on one side alone: {alone:,}"
    if found.is_empty or not (found.tensors or found.arguments or found.different):
        yield "Not looked at: there is no tensor that both sides have in the same step."
    elif found.different:
        yield f"{counted(found.different, 'difference')} among {counted(found.tensors, found.unit)}"
    else:
        both = " that both sides have" if alone or found.not_compared else ""
        yield f"the same: {counted(found.tensors, found.unit)}{both}"
    if found.rounded and found.different:
        differ = counted(found.rounded, f"more {found.unit} differs", f"more {found.unit}s differ")
        yield f"{differ} by no more than rounding explains after so many steps"
    elif found.rounded:
        most = f"at most {found.most_rounded:.2g} times that of one step"
        yield f"{counted(found.rounded, f'{found.unit} differs', f'{found.unit}s differ')} by rounding: {most}"
