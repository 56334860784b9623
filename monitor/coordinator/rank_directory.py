"""Chooses the directory that a rank records to: a new one or, with ``append_output``, that of an earlier run.

The files of the earlier run are recovered before anything is appended to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from monitor.coordinator.identity import RankDirectory
from monitor.coordinator.manifest_format import MANIFEST_FILE, RecordedModel
from monitor.coordinator.output import DirectoryLock, lock_directory, prepare, remove_drafts
from monitor.coordinator.resume import Earlier, Span, directories, last_manifest, newest_step, preferred
from monitor.failures import LOGGER, Failures
from monitor.formats import FORMATS
from monitor.sinks import recovery_of
from monitor.sinks.recovery import recover_all


@dataclass(frozen=True, slots=True)
class ResolvedDirectory:
    """The directory that a rank records to.

    Attributes:
        lock: Excludes other processes; None if the directory could not be locked.
        earlier: What earlier runs recorded there.
    """

    directory: Path
    lock: DirectoryLock | None
    earlier: Earlier = field(default_factory=Earlier)


def resolve_rank_directory(
    base: Path,
    rank: int,
    timestamp: str,
    recording: int,
    span: Sequence[str],
    formats: Sequence[str],
    failures: Failures,
    watched: RecordedModel | None = None,
) -> ResolvedDirectory:
    """Choose the directory of ``rank``. If an earlier directory cannot be used, log why and make a new one.

    Args:
        timestamp: When the job began.
        recording: How many recordings this process has begun before.
        span: ``append_output``: two timestamps, or None.
        formats: The formats to be written.
        watched: The recorded model.

    Raises:
        OutputError: a new directory cannot be made or written.
    """
    choose = partial(preferred, recording=recording, watched=watched)
    taken = _reuse_earlier(base, rank, choose, (span[0], span[1]), formats, failures) if span else None
    return taken or _new(base / str(RankDirectory.new(timestamp, rank)), failures)


def _new(directory: Path, failures: Failures) -> ResolvedDirectory:
    prepare(directory)
    try:
        return ResolvedDirectory(directory, lock_directory(directory))
    except OSError as error:
        failures.report("locking the directory", error, "Another job could append to it at the same time.")
        return ResolvedDirectory(directory, None)


def _reuse_earlier(
    base: Path, rank: int, choose: Callable[[Sequence[Path]], Path], span: Span, formats: Sequence[str], failures: Failures
) -> ResolvedDirectory | None:
    try:
        found = directories(base, rank, span)
        if not found:
            said = "[rank %d] append_output: this rank has no directory from %s to %s. It begins a new one."
            LOGGER.warning(said, rank, *span)
            return None
        chosen = choose(found)
        if len(found) > 1:
            LOGGER.info("[rank %d] append_output: %d directories are in the range; using %s.", rank, len(found), chosen.name)
        return _locked(chosen, rank, formats)
    except Exception as error:
        failures.report("appending to an earlier directory", error, "This rank begins a new one.")
        return None


def _locked(directory: Path, rank: int, formats: Sequence[str]) -> ResolvedDirectory | None:
    held = lock_directory(directory)
    if held is None:
        said = "[rank %d] append_output: another process, or this one, is writing %s. This rank begins a new directory."
        LOGGER.warning(said, rank, directory.name)
        return None
    try:
        earlier = _recover_files(prepare(directory), rank, formats, held.before_ns)
        held.begin()
        return ResolvedDirectory(directory, held, earlier)
    except BaseException:
        held.release()
        raise


def _recover_files(directory: Path, rank: int, formats: Sequence[str], begun_ns: int) -> Earlier:
    remove_drafts(directory)
    record = last_manifest(directory)
    saved = (directory / MANIFEST_FILE).stat().st_mtime_ns if record is not None else 0
    written, first = (formats, 0) if record is None else (record.formats, record.first_step or 0)
    recoveries = {name: recovery for name in FORMATS if name in (*written, *formats) and (recovery := recovery_of(name))}
    found = recover_all(directory, recoveries, written, first, newest_step(record), saved, begun_ns)
    for path in found.aside:
        LOGGER.warning("[rank %d] a process that was killed left %s damaged. The file was set aside.", rank, path)
    earlier = Earlier.of(record)
    earlier.timeline.correct(found.ranges, found.held, found.cut)
    if record is not None and not record.closed:
        said = "[rank %d] append_output: the run that recorded to %s did not end cleanly. The last step in its files is %d."
        LOGGER.warning(said, rank, directory.name, earlier.timeline.newest)
    return earlier
