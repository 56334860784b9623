"""The interface of a sink, which writes one format and is called from the writer thread only."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from monitor.series import SeriesTable
from monitor.stats.table import StepRows


class RemovedFileError(FileNotFoundError):
    """Somebody has removed the file of the open record, or its directory.

    Attributes:
        steps: The earlier steps that were in it.
    """

    def __init__(self, path: str, steps: Iterable[int]) -> None:
        super().__init__(errno.ENOENT, "the file was removed while the monitor wrote to it", path)
        self.steps = tuple(sorted(set(steps)))


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink needs to know of the rank it writes for.

    Attributes:
        directory: The rank's directory. It may not exist yet, and may be removed while training runs.
        series: The rank's series; grows while training runs.
        eps: The partial ``smalls`` counts elements whose magnitude is below this.
        world_size: The number of ranks of the job; None if it is not known.
    """

    directory: Path
    rank: int
    series: SeriesTable
    ndigits: int
    step_count_per_record: int
    eps: float
    world_size: int | None = None


class Sink(Protocol):
    """Writes steps in one format. Every method may raise.

    The writer then logs the cause once, counts the step as lost for this sink, and continues with the next step. A sink must
    stay usable after it has raised.
    """

    def write(self, rows: StepRows) -> None:
        """Write one step. The format decides when the step becomes visible; what is visible is complete."""

    def flush(self) -> None:
        """Make every step written so far visible. Later steps may follow."""

    def close(self) -> None:
        """Flush and close every file."""


@runtime_checkable
class BatchSink(Protocol):
    """A sink that is faster with several steps at once."""

    def prepare(self, steps: Sequence[StepRows]) -> None:
        """Prepare a batch. Each step is then passed to ``write``, in this order, or discarded.

        A new batch replaces the one before. If this raises, the steps are passed to ``write`` all the same.
        """


@runtime_checkable
class ThinnableSink(Protocol):
    """A sink that can remove old steps from its files, so that the rank's directory stays within ``max_output_bytes``."""

    @property
    def grown(self) -> int:
        """Bytes by which the files have grown since the sink was made, unfinished ones included. Removed bytes count down."""

    def remove(self, steps: Collection[int]) -> None:
        """Remove these steps, which are older than the open record, from the visible files.

        A reader finds the old file or the new one, also after a kill. Steps that are not there are ignored, so the call can be
        repeated after it has raised.
        """
