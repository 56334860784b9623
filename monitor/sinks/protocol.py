"""The contract of a sink: one format, written from the writer thread and from nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from monitor.series import SeriesTable
from monitor.stats.rows import StepRows


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink needs to know of the rank it writes for.

    Attributes:
        directory: The rank's directory. It may not exist yet, and may vanish while training runs.
        series: The rank's series, growing while training runs.
        eps: What the partial ``smalls`` counts is below this.
    """

    directory: Path
    rank: int
    series: SeriesTable
    ndigits: int
    step_count_per_record: int
    eps: float


class Sink(Protocol):
    """Raising is allowed everywhere: the writer logs the cause once, counts the step as lost for this sink, and goes on with
    the next step. A sink must stay usable after it has raised.
    """

    def write(self, rows: StepRows) -> None:
        """Take in one step. What becomes visible, and when, is the format's business; what is visible is complete."""

    def flush(self) -> None:
        """Make everything taken in so far visible. Writing may go on afterwards."""

    def close(self) -> None:
        """Flush and let go of every file."""


@runtime_checkable
class BatchSink(Protocol):
    """A sink that does better what it does for several steps at once."""

    def prepare(self, steps: Sequence[StepRows]) -> None:
        """These are about to be written, in this order, each by a call of its own, or come to nothing. Whatever was foreseen
        before counts no longer. Where this raises, they are written all the same.
        """
