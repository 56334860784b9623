"""A job of two ranks for the tests of queries: a sharded weight, a replica, activations of each rank, shares and calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recorded_job import RecordedRank, merged
from sink_rows import Measured

from monitor.series import Placement, Shard

STEPS = 6
VALUES = ((3.0, 4.0), (-12.0, 0.0, 0.5))
"""The part of ``w`` of each rank in step 0."""


def record(
    base: Path,
    format: str | Sequence[str] = "hdf5",  # noqa: A002
    steps: int = STEPS,
    without: Sequence[tuple[int, int]] = (),
) -> Path:
    """Args: without: Ranks and steps of which no row is written."""
    for rank, held in enumerate(VALUES):
        one = RecordedRank(base, rank, 2, format, {"dp": (0, 1)}, steps_per_record=2, counted_kinds=("other",))
        one.place("grad_reduced", "w", Placement(shard=Shard((0, 1), (5,), (rank * 2,))))
        one.place("grad_reduced", "b", Placement(replicas=(0, 1)))
        for step in range(steps):
            if (rank, step) not in without:
                one.write(step, _rows(rank, step, held))
        one.close()
    return base


def _rows(rank: int, step: int, held: Sequence[float]) -> dict[str, list[Measured]]:
    gradients = [Measured("w", [value * (step + 1) for value in held])]
    return {
        "actv": [
            Measured(name, [float(rank + 1), step], micro_step=micro) for name in ("a.output", "b.output") for micro in (0, 1)
        ],
        "grad_reduced": [*gradients, Measured("b", [float(step)])] if rank == 0 else gradients,
    }


def merged_into(base: Path, format: str) -> Path:  # noqa: A002
    merged(base, f"merged-{format}", format=format)
    return base / f"merged-{format}"
