"""Trains twelve steps; from the fifth to the eighth there is something wrong with the place of the recording.

``faulty_disk.py FAULT [for-good]``: for good it stays wrong after the eighth, too.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from small_run import SmallRun


def become_ordinary() -> None:
    """Let permissions hold for root, too: give up every capability, before there is a second thread."""
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert ctypes.CDLL(None, use_errno=True).capset(version_3, (ctypes.c_uint32 * 6)()) == 0


def recording() -> Path:
    """The directory of the rank."""
    (found,) = Path(os.environ["MONITOR_OUTPUT_DIR"]).glob("*-rank0-*")
    return found


def remove(directory: Path) -> Callable[[], None]:
    shutil.rmtree(directory)
    return lambda: None


def remove_all(directory: Path) -> Callable[[], None]:
    return remove(directory.parent)


def replace(directory: Path) -> Callable[[], None]:
    """Put a file in its place."""
    aside = directory.rename(directory.with_name("aside"))
    directory.write_text("not a directory")

    def restore() -> None:
        directory.unlink()
        aside.rename(directory)

    return restore


def forbid(directory: Path) -> Callable[[], None]:
    directory.chmod(0o500)
    return lambda: directory.chmod(0o700)


def forbid_even_to_look(directory: Path) -> Callable[[], None]:
    directory.chmod(0o000)
    return lambda: directory.chmod(0o700)


def use_up_descriptors(_directory: Path) -> Callable[[], None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)


FAULTS = {
    "removed": remove,
    "base-removed": remove_all,
    "replaced": replace,
    "read-only": forbid,
    "out-of-reach": forbid_even_to_look,
    "no-descriptors": use_up_descriptors,
}


def main(fault: str, how_long: str = "for-a-while") -> None:
    become_ordinary()
    run = SmallRun()
    run.train_to(4)
    run.delivered()
    restore = FAULTS[fault](recording()) if run.monitor is not None else lambda: None
    run.train_to(8)
    run.delivered()
    if how_long != "for-good":
        restore()
    run.train_to(12)


main(*sys.argv[1:])
