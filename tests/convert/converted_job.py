"""Jobs to convert, written by the real sinks, and what became of them read back by other programs' means."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from recorded_job import RecordedRank
from sink_rows import Measured

from monitor.coordinator.output import RankDirectory

NAMES = ("layers.0.w", 'a,"b"\n"', "=cmd()", "", "ü\t'; DROP TABLE x; --", "l.input_0#1")
NAN, INF = float("nan"), float("inf")
VALUES = ([3.0, 4.0], [NAN, 1.0], [INF, 1.0], [-INF], [], [1e100], [0.1, 1e-30])


def everything(step: int, rank: int) -> dict[str, list[Measured]]:
    """Rows of several kinds, of every sort of value and name."""
    values = [[value * (step + 1) + rank for value in some] for some in VALUES]
    names = [NAMES[i % len(NAMES)] + str(i // len(NAMES) or "") for i in range(len(values))]
    micro_steps = [Measured(name, some, micro) for name, some in zip(names, values, strict=True) for micro in (-1, 0, 12)]
    whole = [Measured(name, some, vpp_stage=1) for name, some in zip(names, values, strict=True)]
    return {
        "actv": micro_steps,
        "grad_reduced": whole,
        "other": whole[:3],
        "replica": [Measured("grad_reduced/w", [2.0], checked=True)],
    }


def job(base: Path, ranks: int = 2, steps: Sequence[int] = range(7), **options: object) -> None:
    for rank in range(ranks):
        one = RecordedRank(base, rank, ranks, **{"format": "csv", "replica_check": True, **options})  # type: ignore[arg-type]
        for step in steps:
            one.write(step, everything(step, rank))
        one.close()


def plain(
    base: Path, rank: int = 0, steps: Sequence[int] = range(3), value: float = 1.0, world: int = 8, **options: object
) -> Path:
    """A rank with one tensor, ``w``. Its directory."""
    one = RecordedRank(base, rank, world, **{"format": "csv", **options})  # type: ignore[arg-type]
    for step in steps:
        one.write(step, {"grad_reduced": [Measured("w", [value])]})
    one.close()
    return one.directory


def at(directory: Path, timestamp: str) -> Path:
    """The directory, with another timestamp in its name."""
    known = RankDirectory.parse(directory.name)
    assert known is not None
    return directory.rename(directory.with_name(str(RankDirectory(timestamp, known.rank, known.suffix))))


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a directory: steps and values by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    run.Reload()
    return {tag: [(one.step, one.value) for one in run.Scalars(tag)] for tag in run.Tags()["scalars"]}


def in_single(value: float) -> float:
    return float(np.float32(value))


def query(database: Path, sql: str, *values: object) -> list[tuple[object, ...]]:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        found = connection.execute(sql, values).fetchall()
    connection.close()
    return found


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
