"""The directory of a rank's step, and what stands in it when it is begun."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from monitor.dump.assembly import MAIN
from monitor.dump.records import FILE, Records, is_written
from monitor.failures import Failures


def begun(directory: Path, failures: Failures) -> Records:
    """The directory is there, with records that are this process's own. What another process has left is set aside.

    Raises:
        BlockingIOError: Another process writes there.
        OSError: It cannot be made.
    """
    try:
        _set_aside(directory, failures)
        directory.mkdir(parents=True, exist_ok=True)
        return Records(directory / FILE)
    except BlockingIOError:
        said = f"another process writes to {directory}: give each process a number of its own, start(rank_id=...)"
        raise BlockingIOError(said) from None


def _set_aside(directory: Path, failures: Failures) -> None:
    records = directory / FILE
    left = os.path.lexists(records)
    if left and is_written(records):
        raise BlockingIOError
    if not left and not any(os.path.lexists(directory / name) for name in MAIN):
        return
    aside = _free(directory)
    aside.parent.mkdir(exist_ok=True)
    directory.rename(aside)
    directory.mkdir()  # where what is said is written, too
    held = "what a process had recorded that was killed" if left else "the dump of an earlier run"
    todo = ": trainermon dump-recover makes its files." if left else "."
    failures.warn(f"set aside {aside}", f"{directory} held {held}. It is in {aside} now{todo}")


def _free(directory: Path) -> Path:
    """``step0.left1/rank0`` for ``step0/rank0``: no step of the dump."""
    step = directory.parent
    places = (step.with_name(f"{step.name}.left{n}") / directory.name for n in itertools.count(1))
    return next(place for place in places if not os.path.lexists(place))
