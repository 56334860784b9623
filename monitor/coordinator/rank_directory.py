"""The directory that a rank records to: a new one or, with ``append_output``, that of an earlier run, whose files are put in
order before anything is added to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from monitor.coordinator.identity import RankDirectory
from monitor.coordinator.manifest_format import MANIFEST_FILE, Watched
from monitor.coordinator.output import Claim, claim, prepare, remove_drafts
from monitor.coordinator.resume import Earlier, Span, directories, last_word, newest_step, preferred
from monitor.failures import LOGGER, Failures
from monitor.sinks import RECOVERIES
from monitor.sinks.recovery import recover_all


@dataclass(frozen=True, slots=True)
class Home:
    """Where a rank records to.

    Attributes:
        claim: What keeps others out; None where it could not be had.
        earlier: What was recorded there before.
    """

    directory: Path
    claim: Claim | None
    earlier: Earlier = field(default_factory=Earlier)


def home(
    base: Path,
    rank: int,
    timestamp: str,
    recording: int,
    span: Sequence[str],
    formats: Sequence[str],
    failures: Failures,
    watched: Watched | None = None,
) -> Home:
    """Settle where ``rank`` records to. What keeps it from an earlier directory is said, and it begins a new one.

    Args:
        timestamp: When the job began.
        recording: How many recordings this process has begun before.
        span: ``append_output``: two timestamps, or none.
        formats: What it is going to write.
        watched: What it watches.

    Raises:
        OutputError: a new directory cannot be made or written.
    """
    choose = partial(preferred, recording=recording, watched=watched)
    taken = _taken_up(base, rank, choose, (span[0], span[1]), formats, failures) if span else None
    return taken or _new(base / str(RankDirectory.new(timestamp, rank)), failures)


def _new(directory: Path, failures: Failures) -> Home:
    prepare(directory)
    try:
        return Home(directory, claim(directory))
    except OSError as error:
        failures.report("claiming the directory", error, "Another job that appends to it would not be kept out.")
        return Home(directory, None)


def _taken_up(
    base: Path, rank: int, choose: Callable[[Sequence[Path]], Path], span: Span, formats: Sequence[str], failures: Failures
) -> Home | None:
    try:
        found = directories(base, rank, span)
        if not found:
            said = "[rank %d] append_output: no directory of this rank is from %s to %s. A new one is begun."
            LOGGER.warning(said, rank, *span)
            return None
        chosen = choose(found)
        if len(found) > 1:
            LOGGER.info("[rank %d] append_output: of %d directories in the range %s is taken.", rank, len(found), chosen.name)
        return _claimed(chosen, rank, formats)
    except Exception as error:
        failures.report("going on in an earlier directory", error, "A new one is begun.")
        return None


def _claimed(directory: Path, rank: int, formats: Sequence[str]) -> Home | None:
    held = claim(directory)
    if held is None:
        said = "[rank %d] append_output: %s is being written by another process, or by this one. A new directory is begun."
        LOGGER.warning(said, rank, directory.name)
        return None
    try:
        earlier = _put_in_order(prepare(directory), rank, formats, held.before_ns)
        held.begin()
        return Home(directory, held, earlier)
    except BaseException:
        held.release()
        raise


def _put_in_order(directory: Path, rank: int, formats: Sequence[str], begun_ns: int) -> Earlier:
    remove_drafts(directory)
    record = last_word(directory)
    saved = (directory / MANIFEST_FILE).stat().st_mtime_ns if record is not None else 0
    written, first = (formats, 0) if record is None else (record.formats, record.first_step or 0)
    recoveries = {name: make() for name, make in RECOVERIES.items() if name in (*written, *formats)}
    found = recover_all(directory, recoveries, written, first, newest_step(record), saved, begun_ns)
    for path in found.aside:
        LOGGER.warning("[rank %d] %s was left by a process that was killed and is damaged: it was set aside.", rank, path)
    earlier = Earlier.of(record)
    earlier.timeline.correct(found.ranges, found.held, found.cut)
    if record is not None and not record.closed:
        said = "[rank %d] append_output: the run that recorded to %s did not end cleanly. The last step in its files is %d."
        LOGGER.warning(said, rank, directory.name, earlier.timeline.newest)
    return earlier
