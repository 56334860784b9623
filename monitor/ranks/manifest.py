"""``Manifest``: what a rank has written, lost and noticed, gathered while it runs and saved whole beside its shards.

Two sides meet in it: the training thread leaves notes, the writer thread records steps and saves. Notes take no lock, and the
lock that keeps the steps is held only while numbers are changed or copied, never during I/O.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any, Final

from monitor.failures import Failures
from monitor.ranks.job import JobIdentity
from monitor.ranks.output import write_whole
from monitor.ranks.ranges import StepRanges, StepsByCause
from monitor.ranks.records import MANIFEST_FILE, SCHEMA_VERSION, ManifestRecord, RecordedSteps, SeriesReference, StepsRecord
from monitor.ranks.series_file import Measured, SeriesFile
from monitor.series import SeriesTable
from monitor.stats.rows import StepRows

MOST_NOTES: Final = 256
MOST_FAILURES: Final = 100
MOST_CHARACTERS: Final = 1000
MORE_NOTES: Final = "more notes were left out"

Note = str | int | float | bool


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What is known of a rank when it begins to record, and does not change.

    Attributes:
        groups: Ranks of the groups that this rank belongs to, by role: ``{"dp": [0, 1]}``.
        versions: Of what computes and what records: ``{"torch": "2.13.0"}``.
        config: The configuration as used. What JSON cannot hold is spelled by ``str``.
    """

    identity: JobIdentity
    rank: int
    world_size: int
    groups: Mapping[str, Sequence[int]]
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    config_path: str
    formats: Sequence[str]


class Manifest:
    """The journal of one rank. Only ``save`` and ``close`` raise (``OSError``); a forked child's are without effect.

    Its size is bounded by that of the configuration and the groups, not by the length of the run.
    """

    def __init__(self, directory: Path, facts: RankFacts, series: SeriesTable, failures: Failures) -> None:
        self._directory = directory
        self._failures = failures
        self._pid = os.getpid()
        self._fixed = _fixed(facts)
        self._notes: dict[str, Note] = {}
        self._recorded = _Recorded(series)
        self._closed = False
        self._series_on_disk = ""

    def written(self, rows: StepRows) -> None:
        """Every sink has taken in the step."""
        self._recorded.add(rows)

    def dropped(self, step: int, reason: str) -> None:
        """No sink has the step."""
        self._recorded.drop(step, reason)

    def lost(self, step: int, sink: str, reason: str) -> None:
        """One sink does not have the step."""
        self._recorded.lose(step, sink, reason)

    def note(self, key: str, value: Note) -> None:
        """Leave word of what the numbers do not say; a later note under the same key replaces it. Any thread; never waits."""
        key = key[:MOST_CHARACTERS]
        if key not in self._notes and len(self._notes) >= MOST_NOTES:
            key, value = MORE_NOTES, True
        self._notes[key] = _plain(value)

    def save(self) -> None:
        """Rewrite the files. They are replaced whole: a reader finds this state or the one before.

        Raises:
            OSError: they could not be written; the state before still stands.
        """
        self._save(durable=False)

    def close(self) -> None:
        """Save for the last time, marked as ended cleanly, and wait for the disk. Raises like ``save``."""
        self._closed = True
        self._save(durable=True)

    def _save(self, *, durable: bool) -> None:
        if os.getpid() != self._pid:
            return
        told, table = self._recorded.copy()
        content = self._record(told, table).spelled()
        self._directory.mkdir(parents=True, exist_ok=True)
        if table is not None and not (self._directory / table.name).exists():
            write_whole(self._directory / table.name, table.content, durable=durable)
        write_whole(self._directory / MANIFEST_FILE, content, durable=durable)
        self._let_go_of_the_table_before(table)

    def _let_go_of_the_table_before(self, table: SeriesFile | None) -> None:
        """Series are still being found in the first steps; only the last table is kept. No manifest points at the others."""
        if table is None or table.name == self._series_on_disk:
            return
        if self._series_on_disk:
            with suppress(OSError):
                (self._directory / self._series_on_disk).unlink()
        self._series_on_disk = table.name

    def _record(self, told: dict[str, Any], table: SeriesFile | None) -> ManifestRecord:
        return ManifestRecord(
            **self._fixed,
            **told,
            saved=_now(),
            closed=self._closed,
            series=SeriesReference(file=table.name, count=table.count) if table else None,
            failures=_most_frequent(self._failures),
            notes=dict(self._notes),
        )


class _Recorded:
    """What became of each step, and which series have been measured. Safe across threads."""

    def __init__(self, series: SeriesTable) -> None:
        self._lock = Lock()
        self._written, self._skipped, self._incomplete = StepRanges(), StepRanges(), StepRanges()
        self._dropped = StepsByCause()
        self._lost: dict[str, StepsByCause] = {}
        self._measured = Measured(series)

    def add(self, rows: StepRows) -> None:
        with self._lock:
            self._written.add(rows.step)
            if rows.status == "skipped":
                self._skipped.add(rows.step)
            elif rows.status == "incomplete":
                self._incomplete.add(rows.step)
            self._measured.see(rows)

    def drop(self, step: int, reason: str) -> None:
        with self._lock:
            self._dropped.add(step, reason)

    def lose(self, step: int, sink: str, reason: str) -> None:
        with self._lock:
            self._lost.setdefault(sink, StepsByCause()).add(step, reason)

    def copy(self) -> tuple[dict[str, Any], SeriesFile | None]:
        """Fields of the record as they are now, and the series table."""
        with self._lock:
            written, skipped, incomplete = (StepsRecord.of(s) for s in (self._written, self._skipped, self._incomplete))
            told = {
                "steps": RecordedSteps(written=written, skipped=skipped, incomplete=incomplete),
                "dropped": _by_cause(self._dropped),
                "lost": {sink: _by_cause(causes) for sink, causes in self._lost.items()},
            }
            return told, self._measured.file()


def _fixed(facts: RankFacts) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "job_id": facts.identity.job_id,
        "job_agreed": facts.identity.agreed,
        "timestamp": facts.identity.timestamp,
        "started": _now(),
        "rank": facts.rank,
        "world_size": facts.world_size,
        "groups": {role: tuple(ranks) for role, ranks in facts.groups.items()},
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": dict(facts.versions),
        "config_path": facts.config_path,
        "config": json.loads(json.dumps(facts.config, default=str)),
        "formats": tuple(facts.formats),
    }


def _by_cause(steps: StepsByCause) -> dict[str, StepsRecord]:
    return {cause: StepsRecord.of(ranges) for cause, ranges in steps.items()}


def _most_frequent(failures: Failures) -> dict[str, int]:
    """``dict`` copies in one step, so that a failure reported meanwhile does no harm."""
    counts = sorted(dict(failures.counts).items(), key=lambda item: -item[1])
    return {cause[:MOST_CHARACTERS]: count for cause, count in counts[:MOST_FAILURES]}


def _plain(value: Note) -> Note:
    """As JSON holds it: text of bounded length, and NaN and Inf, for which it has no number, as text."""
    if isinstance(value, str):
        return value[:MOST_CHARACTERS]
    return value if math.isfinite(value) else str(value)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
