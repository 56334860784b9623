"""What holds after a drill, whatever happened: losses are the same, files are whole and right, missing steps are named."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from monitor import open_run
from monitor.coordinator.manifest_format import ManifestRecord, StepsRecord, read_manifest

COMMAND_S = 120.0
"""A command that takes longer hangs."""

NOT_COMPARED = frozenset({"run"})
"""Kinds with numbers that depend on the machine."""

Rows = dict[tuple[Any, ...], tuple[Any, ...]]


class DrillError(Exception):
    """A drill that was not passed, with what was wrong."""


def require(holds: object, said: str) -> None:
    if not holds:
        raise DrillError(said)


# --- Losses.


def losses(path: Path) -> list[str]:
    """A line for each step that ended, and perhaps ``end``. The last line of a killed process may be cut."""
    *lines, _ = path.read_text().split("\n") if path.exists() else [""]
    return lines


def check_losses(told: Iterable[str], expected: Iterable[str]) -> None:
    """Those of the steps that were trained are those of training alone, in every bit."""
    known = dict(line.split(" ", 1) for line in expected if line != "end")
    for line in told:
        if line != "end":
            step, loss = line.split(" ", 1)
            require(known.get(step) == loss, f"step {step} has another loss: {loss}, alone {known.get(step)}")


# --- Rows.


def rows_below(output: Path, ranks: Iterable[int]) -> Rows:
    """Every row of a run by kind, rank, name, step and micro-step. Reads every visible file."""
    run = open_run(output)
    found: Rows = {}
    for kind in set(run.kinds) - NOT_COMPARED:
        table = run.rows(kind)
        ops = [name for name in table.column_names if name in ("min", "max", "mean", "norm", "nans")]
        for row in table.to_pylist():
            key = kind, row["rank"], row["vpp_stage"], row["name"], row["step"], row.get("micro_step")
            require(key not in found, f"a row is there twice: {key}")
            found[key] = tuple(str(row[op]) for op in ops)
    for one in run._source.set_aside:  # what could not be read
        require(Path(one.path).name.startswith("."), f"a visible file is damaged: {one.path}: {one.reason}")
    require({key[1] for key in found} <= set(ranks), "rows of ranks that there are not")
    return found


def check_rows(found: Rows, healthy: Rows) -> None:
    """Each row is that of a healthy run, to the last digit."""
    for key, row in found.items():
        require(key in healthy, f"a healthy run has no such row: {key}")
        require(_same(row, healthy[key]), f"a row is another one than in a healthy run: {key}: {row}, {healthy[key]}")


def _same(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return all(a == b or math.isclose(float(a), float(b), rel_tol=1e-12) for a, b in zip(one, other, strict=True))


# --- Steps.


def manifests(output: Path) -> dict[int, list[ManifestRecord]]:
    """Those of each rank."""
    found: dict[int, list[ManifestRecord]] = {}
    for path in sorted(output.glob("*-rank*-*/manifest.json")):
        record = read_manifest(path)
        found.setdefault(record.rank, []).append(record)
    return found


def listed(*records: StepsRecord) -> set[int]:
    return {step for record in records for step in record.steps()}


def check_steps(output: Path, trained: Mapping[int, Iterable[int]], rows: Rows, gone_until: int = -1) -> int:
    """Each step that was trained has rows, or is named as missing.

    Args:
        gone_until: The rows of steps up to this one were deleted by somebody else.

    Returns:
        How many steps of all ranks are named, and have no rows in any format.
    """
    with_rows: dict[int, set[int]] = {}
    for _, rank, _, _, step, *_ in rows:
        with_rows.setdefault(rank, set()).add(step)
    known, missing = manifests(output), 0
    for rank, steps in trained.items():
        records = known.get(rank, [])
        written = listed(*(one.steps.written for one in records))
        named = _named(records, written, steps)
        absent = set(steps) - written - named
        require(not absent, f"rank {rank}: nothing is said of steps {sorted(absent)[:10]}")
        unwritten = {step for step in written - with_rows.get(rank, set()) if step > gone_until}
        require(not unwritten, f"rank {rank}: steps without rows are called written: {sorted(unwritten)[:10]}")
        missing += len(named.intersection(steps) - with_rows.get(rank, set()))
    return missing


def accounted(record: ManifestRecord) -> set[int]:
    """The steps that a manifest has as written or as missing."""
    return listed(record.steps.written) | _missing(record)


def _missing(record: ManifestRecord) -> set[int]:
    lost = (one for causes in record.lost.values() for one in causes.values())
    return listed(*record.dropped.values(), *lost, *record.thinned.steps.values())


def _named(records: Iterable[ManifestRecord], written: set[int], steps: Iterable[int]) -> set[int]:
    """The steps that manifests name as missing: one that is not closed, as nothing could be written, names all later ones."""
    named: set[int] = set()
    for record in records:
        named |= _missing(record)
        if not record.closed:
            named |= {step for step in steps if step > max(written, default=-1)}
    return named


# --- Commands.


def run_command(arguments: list[str], statuses: Iterable[int] = (0, 1, 2)) -> subprocess.CompletedProcess[str]:
    """Run ``trainermon``. It ends in time, with a status that it documents, and without a traceback."""
    command = [sys.executable, "-c", "from monitor.cli import app; app()", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        raise DrillError(f"trainermon {' '.join(arguments)} takes more than {COMMAND_S:.0f} s") from None
    said = done.stderr[-1500:]
    require("Traceback" not in done.stdout + done.stderr, f"trainermon {' '.join(arguments)}: {said}")
    require(done.returncode in set(statuses), f"trainermon {' '.join(arguments)} ended with {done.returncode}: {said}")
    return done


def check_merge(output: Path, merged: Path, missing: int) -> None:
    """A merge succeeds, and its exit status says whether steps are missing."""
    done = run_command(["merge", str(output), "-o", str(merged)], (0, 1))
    if missing:
        require(done.returncode == 1, f"{missing} steps are missing, and a merge ends with 0: {done.stdout[-800:]}")
        report = json.loads((merged / "report.json").read_text())
        about = ("dropped", "gaps", "thinned", "not_closed")
        require(any(report[what]["count"] for what in about), "the report of the merge names no missing step")
