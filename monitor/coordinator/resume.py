"""Resuming: finds the directory of an earlier run to append to, and continues the record of steps in its manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Final

from monitor.config import AUTO
from monitor.coordinator import manifest_format as schema, output
from monitor.coordinator.manifest import Earlier
from monitor.failures import LOGGER, Failures
from monitor.formats import FORMATS
from monitor.sinks import recovery_of
from monitor.sinks.files import recover_all

Span = tuple[str, str]
"""Two timestamps, both included. They have no year: if the first is the later one, New Year lies between them."""


BEGINNING_OF_THE_YEAR, END_OF_THE_YEAR = "Jan01_00-00-00", "Dec31_23-59-59"


def span_between(first: str | None, last: str | None) -> Span | None:
    """The span from ``first`` to ``last``. A missing end is the beginning or end of the year; None if both are missing.

    Raises:
        ValueError: an argument is not a timestamp.
    """
    if first is None and last is None:
        return None
    span = first or BEGINNING_OF_THE_YEAR, last or END_OF_THE_YEAR
    for timestamp in span:
        output.timestamp_fields(timestamp)
    return span


def in_order(timestamp: str, span: Span) -> tuple[bool, tuple[int, ...]] | None:
    """A sort key that puts timestamps within ``span`` in order of time; None for a timestamp outside."""
    moment, first, last = (output.timestamp_fields(one) for one in (timestamp, *span))
    if first <= last:
        return (False, moment) if first <= moment <= last else None
    return (moment <= last, moment) if moment >= first or moment <= last else None


def directories(base: Path, rank: int, span: Span) -> list[Path]:
    """The directories of ``rank`` with timestamps in ``span``, newest first; within one second, the last begun first.

    Raises:
        OSError: ``base`` cannot be listed.
    """
    found = [(name, output.RankDirectory.parse(name)) for name in os.listdir(base)]
    keyed = [(in_order(known.timestamp, span), base / name) for name, known in found if known and known.rank == rank]
    within = [(key, path) for key, path in keyed if key is not None and path.is_dir()]
    seconds = [key for key, _ in within]
    ordered = sorted(within, key=lambda one: (one[0], _begun(one[1]) if seconds.count(one[0]) > 1 else 0.0, one[1].name))
    return [path for _, path in reversed(ordered)]


def preferred(newest_first: Sequence[Path], recording: int, watched: schema.RecordedModel | None = None) -> Path:
    """The newest directory of a recording of the same model.

    Without one, the newest directory of the recording with the same index in its process; else the newest directory.

    Args:
        recording: How many recordings this process has begun before.
        watched: The model of this recording.
    """
    if len(newest_first) == 1:
        return newest_first[0]
    known = [(path, one) for path in newest_first if (one := _known(path)) is not None]
    same = [path for path, one in known if watched is not None and one.watched == schema.WatchedRecord.of(watched)]
    named = [path for path, one in known if watched is not None and one.watched and one.watched.names == watched.names]
    same += named if not same and len(named) == 1 else []
    same += [path for path, one in known if one.recording == recording]
    return next(iter(same), newest_first[0])


def last_manifest(directory: Path) -> schema.ManifestRecord | None:
    """The manifest of the last run in ``directory``; None if there is none. An unreadable manifest is renamed.

    Raises:
        OSError: the unreadable manifest cannot be renamed.
    """
    path = directory / schema.MANIFEST_FILE
    if not path.exists():
        return None
    try:
        return schema.read_manifest(path)
    except schema.ManifestError as error:
        names = (f"{schema.MANIFEST_FILE}.unreadable{f'.{copy}' if copy > 1 else ''}" for copy in count(1))
        target = next(target for name in names if not os.path.lexists(target := path.with_name(name)))
        os.rename(path, target)
        LOGGER.warning("%s: it was renamed to %s. The new manifest does not include its content.", error, target.name)
        return None


def _begun(directory: Path) -> float:
    """Seconds since 1970."""
    known = _known(directory)
    return directory.stat().st_mtime if known is None else moment(known.started)


def _known(directory: Path) -> schema.ManifestRecord | None:
    try:
        return schema.read_manifest(directory / schema.MANIFEST_FILE)
    except schema.ManifestError:
        return None


# --- Chooses the directory that a rank records to: a new one or, with ``append_output``, that of an earlier run.
#
# The files of the earlier run are recovered before anything is appended to them.


@dataclass(frozen=True, slots=True)
class ResolvedDirectory:
    """The directory that a rank records to.

    Attributes:
        lock: Excludes other processes; None if the directory could not be locked.
        earlier: What earlier runs recorded there.
    """

    directory: Path
    lock: output.DirectoryLock | None
    earlier: Earlier = field(default_factory=Earlier)


@dataclass(frozen=True, slots=True)
class RestartedRun:
    """A run that may continue an earlier one, and what ``"append_output": "auto"`` recognises the earlier one by.

    Every rank chooses alone. The ranks choose alike, because a job's manifests have all of this on each of its ranks.

    Attributes:
        watched: The recorded model; None if it is not known.
        groups: Ranks of the groups that this rank belongs to, by role.
        start_step: Number of the first step.
    """

    watched: schema.RecordedModel | None = None
    world_size: int = 1
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    start_step: int = 0

    def resembles(self, record: schema.ManifestRecord) -> bool:
        """Whether a manifest of the same rank is of the same model, on as many ranks, in the same groups."""
        model = None if self.watched is None else schema.WatchedRecord.of(self.watched)
        groups = {role: tuple(ranks) for role, ranks in self.groups.items()}
        return model is not None and (record.watched, record.world_size, record.groups) == (model, self.world_size, groups)

    def earlier_here(self) -> Iterator[RestartedRun]:
        """What this process has recorded before of the same model."""
        if self.watched is not None:
            yield from (replace(self, watched=replace(self.watched, number=each)) for each in range(self.watched.number))


def resolve_rank_directory(
    base: Path,
    rank: int,
    timestamp: str,
    recording: int,
    span: Sequence[str],
    formats: Sequence[str],
    failures: Failures,
    this: RestartedRun | None = None,
) -> ResolvedDirectory:
    """Choose the directory of ``rank``. If an earlier directory cannot be used, log why and make a new one.

    Args:
        timestamp: When the job began.
        recording: How many recordings this process has begun before.
        span: ``append_output``: two timestamps, ``AUTO``, or empty.
        formats: The formats to be written.
        this: What is known of this run, if anything is.

    Raises:
        OutputError: a new directory cannot be made or written.
    """
    known = this or RestartedRun()

    def choose() -> Path | None:
        if tuple(span) == AUTO:
            return _newest_alike(base, rank, known)
        return _in_span(base, rank, (span[0], span[1]), recording, known.watched)

    taken = _reuse_earlier(choose, rank, formats, failures) if span else None
    if taken is not None and this is not None:
        taken.earlier.timeline.begins = this.start_step
    return taken or _new(base / str(output.RankDirectory.new(timestamp, rank)), failures)


def _new(directory: Path, failures: Failures) -> ResolvedDirectory:
    output.prepare(directory)
    try:
        return ResolvedDirectory(directory, output.lock_directory(directory))
    except OSError as error:
        failures.report("locking the directory", error, "Another job could append to it at the same time.")
        return ResolvedDirectory(directory, None)


def _reuse_earlier(
    choose: Callable[[], Path | None], rank: int, formats: Sequence[str], failures: Failures
) -> ResolvedDirectory | None:
    try:
        chosen = choose()
        return None if chosen is None else _locked(chosen, rank, formats)
    except Exception as error:
        failures.report("appending to an earlier directory", error, "This rank begins a new one.")
        return None


def _in_span(base: Path, rank: int, span: Span, recording: int, watched: schema.RecordedModel | None) -> Path | None:
    found = directories(base, rank, span)
    if not found:
        LOGGER.warning("[rank %d] append_output: this rank has no directory from %s to %s. It begins a new one.", rank, *span)
        return None
    chosen = preferred(found, recording, watched)
    if len(found) > 1:
        LOGGER.info("[rank %d] append_output: %d directories are in the range; using %s.", rank, len(found), chosen.name)
    return chosen


def _newest_alike(base: Path, rank: int, this: RestartedRun) -> Path | None:
    """The directory that a restart continues; None, with the reason logged, if it begins a new one."""
    every = [base / name for name in os.listdir(base) if (found := output.RankDirectory.parse(name)) and found.rank == rank]
    known = [(path, record) for path in every if (record := _known(path)) is not None]
    alike = [(path, record) for path, record in known if this.resembles(record)]
    alike.sort(key=lambda one: (*order_of(one[1]), one[0].name))
    again = any(one.resembles(record) for one in this.earlier_here() for _, record in known)
    reason = _why_anew(alike, this) if alike else _AGAIN if again else _NO_OTHER if every else ""
    if alike and not reason:
        return alike[-1][0]
    say = LOGGER.warning if reason and (alike or this.start_step) else LOGGER.info
    said = "[rank %d] append_output: %sA new directory begins at step %d."
    say(said, rank, f"{reason}. " if reason else "", this.start_step)
    return None


_AGAIN: Final = "this process has recorded the same model before, and leaves the directory of that recording as it is"
_NO_OTHER: Final = "no directory of this rank has the same model, number of ranks and groups"


def _why_anew(alike: Sequence[tuple[Path, schema.ManifestRecord]], this: RestartedRun) -> str:
    """Why the last of these directories, in order of time, is not continued; "" if it is."""
    *others, (newest, record) = alike
    together = [path.name for path, other in others if moment(other.saved) > moment(record.started)]
    if together:
        both = f"{newest.name} and {together[-1]} were written at the same time, so it is not known which of them to continue"
        return f"{both}. Give each job an output directory of its own ({output.OUTPUT_VARIABLE})"
    if this.start_step:
        return ""
    last = schema.newest_step(record)
    kept = f"training starts at step 0, so {newest.name} is left as it is"
    return (
        f"{kept}. To continue after its step {last}, pass the step of the checkpoint as start_iteration" if last >= 0 else kept
    )


def moment(text: str) -> float:
    """Seconds since 1970.

    Raises:
        ValueError, OverflowError: It is not a moment in ISO 8601.
    """
    return datetime.fromisoformat(text).timestamp()


def order_in_time(begun: float, place: int, first: int | None) -> tuple[float, int, int]:
    """Puts runs in order of time, also those that began in the same second: a restart continues at a later step.

    Args:
        begun: Seconds since 1970.
        place: How many runs it continued in its directory.
        first: Its first step; None if it recorded none.
    """
    return begun, place, schema.LAST_STEP if first is None else first


def order_of(record: schema.ManifestRecord) -> tuple[float, int, int]:
    """``order_in_time`` of the run that wrote a manifest.

    Raises:
        ValueError, OverflowError: It does not say when the run began.
    """
    return order_in_time(moment(record.started), len(record.resumed), record.first_step)


def _locked(directory: Path, rank: int, formats: Sequence[str]) -> ResolvedDirectory | None:
    held = output.lock_directory(directory)
    if held is None:
        said = "[rank %d] append_output: another process, or this one, is writing %s. This rank begins a new directory."
        LOGGER.warning(said, rank, directory.name)
        return None
    try:
        earlier = _recover_files(output.prepare(directory), rank, formats, held.before_ns)
        held.begin()
        return ResolvedDirectory(directory, held, earlier)
    except BaseException:
        held.release()
        raise


def _recover_files(directory: Path, rank: int, formats: Sequence[str], begun_ns: int) -> Earlier:
    output.remove_drafts(directory)
    record = last_manifest(directory)
    saved = (directory / schema.MANIFEST_FILE).stat().st_mtime_ns if record is not None else 0
    written, first = (formats, 0) if record is None else (record.formats, record.first_step or 0)
    recoveries = {name: recovery for name in FORMATS if name in (*written, *formats) and (recovery := recovery_of(name))}
    found = recover_all(directory, recoveries, written, first, schema.newest_step(record), saved, begun_ns)
    for path in found.aside:
        LOGGER.warning("[rank %d] a process that was killed left %s damaged. The file was set aside.", rank, path)
    earlier = Earlier.of(record)
    earlier.timeline.correct(found.ranges, found.held, found.cut)
    earlier = earlier.ended() if earlier.runs else earlier
    if record is not None and not record.closed:
        said = "[rank %d] append_output: the run that recorded to %s did not end cleanly. The last step in its files is %d."
        LOGGER.warning(said, rank, directory.name, earlier.timeline.newest)
    return earlier
