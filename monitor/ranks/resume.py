"""Which of the directories that are there a rank goes on in, and what its manifest knows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from itertools import count
from pathlib import Path

from monitor.failures import LOGGER
from monitor.ranks.names import RankDirectory, timestamp_fields
from monitor.ranks.records import MANIFEST_FILE, ManifestError, ManifestRecord, WatchedRecord, read_manifest
from monitor.ranks.roles import Watched

Span = tuple[str, str]
"""Two timestamps and all between. They have no year: where the first is the later one, New Year lies between."""


BEGINNING_OF_THE_YEAR, END_OF_THE_YEAR = "Jan01_00-00-00", "Dec31_23-59-59"


def span_between(first: str | None, last: str | None) -> Span | None:
    """A span that is open where a moment is not given, to the year's beginning or end; None where neither is.

    Raises:
        ValueError: one of them is not a timestamp.
    """
    if first is None and last is None:
        return None
    span = first or BEGINNING_OF_THE_YEAR, last or END_OF_THE_YEAR
    for timestamp in span:
        timestamp_fields(timestamp)
    return span


def in_order(timestamp: str, span: Span) -> tuple[bool, tuple[int, ...]] | None:
    """A key by which timestamps within ``span`` are in order of time; None for one outside."""
    moment, first, last = (timestamp_fields(one) for one in (timestamp, *span))
    if first <= last:
        return (False, moment) if first <= moment <= last else None
    return (moment <= last, moment) if moment >= first or moment <= last else None


def directories(base: Path, rank: int, span: Span) -> list[Path]:
    """Those of ``rank`` whose timestamps lie in ``span``, the newest first; of one second, that which was begun last.

    Raises:
        OSError: ``base`` cannot be listed.
    """
    found = [(name, RankDirectory.parse(name)) for name in os.listdir(base)]
    keyed = [(in_order(known.timestamp, span), base / name) for name, known in found if known and known.rank == rank]
    within = [(key, path) for key, path in keyed if key is not None and path.is_dir()]
    seconds = [key for key, _ in within]
    ordered = sorted(within, key=lambda one: (one[0], _begun(one[1]) if seconds.count(one[0]) > 1 else 0.0, one[1].name))
    return [path for _, path in reversed(ordered)]


def preferred(newest_first: Sequence[Path], recording: int, watched: Watched | None = None) -> Path:
    """The newest one of a recording that watched the same; where none did, the newest that holds the same of its process's
    recordings, and where none does, the newest.

    Args:
        recording: How many recordings this process has begun before.
        watched: What it watches.
    """
    if len(newest_first) == 1:
        return newest_first[0]
    known = [(path, one) for path in newest_first if (one := _known(path)) is not None]
    same = [path for path, one in known if watched is not None and one.watched == WatchedRecord.of(watched)]
    named = [path for path, one in known if watched is not None and one.watched and one.watched.names == watched.names]
    same += named if not same and len(named) == 1 else []
    same += [path for path, one in known if one.recording == recording]
    return next(iter(same), newest_first[0])


def last_word(directory: Path) -> ManifestRecord | None:
    """The manifest of the run that recorded here last; None if it left none. One that cannot be read is set aside.

    Raises:
        OSError: it cannot be set aside.
    """
    path = directory / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        return read_manifest(path)
    except ManifestError as error:
        names = (f"{MANIFEST_FILE}.unreadable{f'.{copy}' if copy > 1 else ''}" for copy in count(1))
        target = next(target for name in names if not os.path.lexists(target := path.with_name(name)))
        os.rename(path, target)
        LOGGER.warning("%s: it was renamed to %s, and what it said is not carried on.", error, target.name)
        return None


def _begun(directory: Path) -> float:
    """Seconds since 1970."""
    known = _known(directory)
    return directory.stat().st_mtime if known is None else datetime.fromisoformat(known.started).timestamp()


def _known(directory: Path) -> ManifestRecord | None:
    try:
        return read_manifest(directory / MANIFEST_FILE)
    except ManifestError:
        return None
