"""What a process that was killed had recorded, made into files afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from monitor.coordinator.output import remove_drafts
from monitor.dump.assembly import OtherDumpError, finish
from monitor.dump.records import FILE, is_written
from monitor.dump.safe_files import is_directory
from monitor.dump.writer import DATA


class Recovered(NamedTuple):
    """What became of one rank's step.

    Attributes:
        entries: How many its files have now; None where nothing was done.
        reason: Why not.
        damaged: Lines of the records that could not be read. The records were kept if there are any.
    """

    directory: Path
    entries: int | None
    reason: str = ""
    damaged: int = 0


def recover(directory: Path) -> Iterator[Recovered]:
    """Complete every step below ``directory`` that was left behind. Links are not followed."""
    for records in sorted(directory.rglob(FILE)):
        yield _recovered(records)


def _recovered(records: Path) -> Recovered:
    directory = records.parent
    try:
        if is_written(records):
            return Recovered(directory, None, "a process is still writing to it")
        for place in (directory, directory / DATA):
            if is_directory(place):
                remove_drafts(place)
        entries, damaged = finish(directory, check=True)
        return Recovered(directory, entries, damaged=damaged)
    except (OSError, OtherDumpError) as error:
        return Recovered(directory, None, str(error))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        return Recovered(directory, None, f"it holds what no dump does: {error!r}")
