"""Reads and checks the files in ``anomaly_detected``: the events of each rank as columns, and the files with flaws."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from monitor.anomalies.events import EVENTS_FOLDER, JUDGED_LIMIT, Event, ScanSummary, events_file, judged_file
from monitor.coordinator.manifest_format import ManifestError, content_of, known_version, parsed
from monitor.merge.discovery import leads_out
from monitor.merge.execution import engine, run_in_order
from monitor.series import Series

EVENTS_LIMIT: Final = 2**30
"""Largest size of a rank's event file, in bytes."""

WORTH_A_POOL: Final = 32 * 2**20
"""Bytes below which starting processes takes longer than reading in one."""

MOST_WORKERS: Final = 8

MOST_CHUNKS: Final = 100_000
"""Upper bound on model chunks of a rank, so that a damaged number does not cost hours of counting."""

_RANK: Final = re.compile(r"rank(0|[1-9][0-9]{0,8})")
_FILE: Final = re.compile(r"(?:judged|anomaly)(?:-([1-9][0-9]{0,5}))?\.json")
_EVENTS: Final = TypeAdapter(dict[str, Event])

Columns = NDArray[np.int64]


class NothingReadError(Exception):
    """There is nothing to rank. The message says which files were expected, and where."""


@dataclass(frozen=True, slots=True)
class RecordingFiles:
    """The paths of one recording of one rank, whether or not the files exist."""

    folder: Path
    rank: int
    recording: int

    @property
    def events(self) -> Path:
        return self.folder / events_file(self.recording)

    @property
    def label(self) -> str:
        """The event file's name in messages."""
        return f"{self.folder.name}/{self.events.name}"

    @property
    def judged(self) -> Path:
        return self.folder / judged_file(self.recording)


@dataclass(frozen=True, slots=True, eq=False)
class RecordingEvents:
    """The events of one recording of one rank, in columns. Texts are listed once each; columns hold their indices.

    Attributes:
        mates: Ranks of its pipeline group; empty without an event.
        step, micro_step, call_id: One number per event.
        series: Index into ``all_series``; ``op`` and ``rule`` likewise index their lists.
        mean: The running mean that the value was compared with; NaN without one.
    """

    files: RecordingFiles
    judged: ScanSummary
    mates: tuple[int, ...]
    step: Columns
    micro_step: Columns
    call_id: Columns
    series: Columns
    op: Columns
    rule: Columns
    value: NDArray[np.float64]
    mean: NDArray[np.float64]
    all_series: tuple[Series, ...]
    all_ops: tuple[str, ...]
    all_rules: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True)
class Flaw:
    """A file that is missing, truncated or of another kind."""

    rank: int
    path: str
    reason: str


def folder_of(path: Path) -> Path:
    """The directory of events: ``path``, or ``anomaly_detected`` in it.

    Raises:
        NothingReadError: there is no such directory.
    """
    within = path / EVENTS_FOLDER
    folder = within if within.is_dir() else path
    if not folder.is_dir():
        raise NothingReadError(f"{path} is not a directory. Name the one that ranks wrote events to, such as {EVENTS_FOLDER}.")
    return folder


def files_in(folder: Path) -> list[RecordingFiles]:
    """The files of all ranks, in the order of ranks.

    Raises:
        NothingReadError: the folder has no files of a rank, or cannot be listed.
    """
    try:
        found = [files for name in os.listdir(folder) for files in _files_of_rank(folder / name)]
    except OSError as error:
        raise NothingReadError(f"{folder} cannot be read: {error.strerror or error}.") from error
    if not found:
        raise NothingReadError(
            f"{folder} holds no events of any rank. Ranks write events if the configuration has `alert` with rules and "
            '`"dump": true`.'
        )
    return sorted(found, key=lambda files: (files.rank, files.recording))


def read_all(files: Sequence[RecordingFiles]) -> Iterator[RecordingEvents | Flaw]:
    """Read all files in order; in several processes if they are large."""
    size = sum(one.events.stat().st_size for one in files if one.events.is_file())
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if size > WORTH_A_POOL else 1
    with engine(workers) as (executor, count):
        yield from run_in_order(executor, count, read, files)


def read(files: RecordingFiles) -> RecordingEvents | Flaw:
    """The events of one recording, or the flaw that prevents reading them."""
    try:
        judged = _judged(files)
        return _columns(files, judged, entries(files) if judged.events or files.events.exists() else {})
    except (ManifestError, OSError) as error:
        return Flaw(files.rank, files.label, str(error))


def entries(files: RecordingFiles) -> dict[str, Event]:
    """The entries of an event file by their keys.

    Raises:
        ManifestError: the file is missing, truncated, or not an event file.
    """
    content = _content(files.events, EVENTS_LIMIT)
    try:
        return _EVENTS.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ManifestError(f"{files.events} is torn or not a file of events: {place}: {first['msg']}") from error


def _files_of_rank(folder: Path) -> Iterator[RecordingFiles]:
    rank = _RANK.fullmatch(folder.name)
    if rank is None or not folder.is_dir():
        return
    numbers = {int(match[1] or 0) for name in os.listdir(folder) if (match := _FILE.fullmatch(name))}
    yield from (RecordingFiles(folder, int(rank[1]), number) for number in numbers)


def _judged(files: RecordingFiles) -> ScanSummary:
    judged = parsed(ScanSummary, _content(files.judged, JUDGED_LIMIT), files.judged)
    try:
        known_version(judged.schema_version)
    except ValueError as error:
        raise ManifestError(f"{files.judged}: {error}") from error
    if (judged.rank, judged.recording) != (files.rank, files.recording):
        raise ManifestError(f"{files.judged} is that of recording {judged.recording} of rank {judged.rank}")
    return judged


def _content(path: Path, limit: int) -> bytes:
    if leads_out(path):
        raise ManifestError(f"{path} leads to another directory")
    if os.path.lexists(path) and not path.is_file():
        raise ManifestError(f"{path} is not a file")
    return content_of(path, limit, "such file")


def _columns(files: RecordingFiles, judged: ScanSummary, found: dict[str, Event]) -> RecordingEvents:
    every = list(found.values())
    mates = _mates(files, every)
    parts = _Parts()
    try:
        for event in every:
            parts.add(event)
        numbers = np.array([(e.step, e.micro_step, e.call_id) for e in every], dtype=np.int64).reshape(-1, 3)
    except (ValueError, OverflowError) as error:
        raise ManifestError(f"{files.events} is damaged: {error}") from error
    step, micro_step, call_id = numbers.T.copy()
    series, op, rule = (np.array(pointers, dtype=np.int64) for pointers in (parts.series, parts.ops, parts.rules))
    texts = tuple(parts.all_series), tuple(parts.all_ops), tuple(parts.all_rules)
    value, mean = (np.array(numbers, dtype=np.float64) for numbers in (parts.values, parts.means))
    return RecordingEvents(files, judged, mates, step, micro_step, call_id, series, op, rule, value, mean, *texts)


def _mates(files: RecordingFiles, every: Iterable[Event]) -> tuple[int, ...]:
    groups = {(event.rank, event.pp_stage, event.group_mates) for event in every}
    if not groups:
        return ()
    rank, stage, mates = groups.pop()
    if groups or rank != files.rank or mates[stage : stage + 1] != (rank,) or len(set(mates)) < len(mates):
        raise ManifestError(f"{files.events} is damaged: its events are not all of rank {files.rank} and its pipeline group")
    return mates


class _Parts:
    """Parses the texts of events. Results are cached, since tags and rules repeat."""

    def __init__(self) -> None:
        self.series: list[int] = []
        self.ops: list[int] = []
        self.rules: list[int] = []
        self.values: list[float] = []
        self.means: list[float] = []
        self.all_series: dict[Series, int] = {}
        self.all_ops: dict[str, int] = {}
        self.all_rules: dict[str, int] = {}
        self._of_tag: dict[tuple[str, int], int] = {}

    def add(self, event: Event) -> None:
        """Add an event. Raises ``ValueError`` if its texts are not those of an event."""
        key = event.tag_name, event.micro_step
        number = self._of_tag.get(key)
        if number is None:
            series = event.series
            if event.vpp_stage > MOST_CHUNKS:
                raise ValueError(f"no model has a chunk {event.vpp_stage}")
            if series.vpp_stage != event.vpp_stage or series.tag(event.rank, event.micro_step) != event.tag_name:
                raise ValueError(f"{event.tag_name!r} is not the tag of chunk {event.vpp_stage} of rank {event.rank}")
            number = self._of_tag[key] = self.all_series.setdefault(series, len(self.all_series))
        signal = event.signal
        self.series.append(number)
        self.ops.append(self.all_ops.setdefault(signal.op, len(self.all_ops)))
        self.rules.append(self.all_rules.setdefault(signal.rule, len(self.all_rules)))
        self.values.append(signal.value)
        self.means.append(math.nan if signal.mean is None else signal.mean)
