"""What a comparison has found, as a table of CSV and for a terminal."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from monitor.compare.findings import Compared, Finding
from monitor.coordinator.output import write_whole
from monitor.terminal import plain

COLUMNS: Final = (
    "step", "rank", "order", "name", "what", "absolute_error", "relative_error", "cosine", "left", "right",
)  # fmt: skip

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
    write_whole(path, text.getvalue().encode())


def largest(compared: Compared) -> list[Finding]:
    """Those whose values differ most: by relative error, the earlier first among equals."""
    numbered = [finding for finding in compared.findings if finding.difference is not None]
    return sorted(numbered, key=lambda finding: -finding.difference.size if finding.difference else 0.0)


def table(title: str, findings: list[Finding]) -> Table:
    """Some of the findings. Names are long: they have what the others leave of a line."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in ("step", "rank", "absolute", "relative", "cosine", "what", "name"):
        shown.add_column(column, overflow="fold")
    for finding in findings:
        place = [str(finding.step), finding.rank]
        shown.add_row(*map(plain, [*place, *_errors(finding, 3), finding.what, finding.name]))
    return shown


def described(finding: Finding) -> str:
    """In a line or two: what is not the same, and where."""
    where = f"step {finding.step}, {finding.rank}: {finding.name}"
    if finding.difference is None:
        return f"{where}: {finding.what}: {finding.left or 'nothing'} against {finding.right or 'nothing'}"
    row = _row(finding)
    cosine = f", cosine {row[7]}" if row[7] else ""
    errors = f"absolute error {row[5]}, relative error {row[6]}{cosine}"
    return f"{where}: {errors}\n  left  {finding.left}\n  right {finding.right}"


def _row(finding: Finding) -> list[str]:
    place = [str(finding.step), finding.rank, str(finding.order), finding.name, finding.what]
    return [*place, *_errors(finding, 6), finding.left, finding.right]


def _errors(finding: Finding, digits: int) -> list[str]:
    """Absolute, relative and cosine, which is closest to 1 where it matters and has three more digits."""
    difference = finding.difference
    if difference is None:
        return ["", "", ""]
    cosine = "" if difference.cosine is None else f"{difference.cosine:.{digits + 3}f}"
    return [f"{difference.absolute:.{digits}g}", f"{difference.relative:.{digits}g}", cosine]
