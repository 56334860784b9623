"""Trains twelve steps, of which the disk is full from the fifth to the eighth; ``full_disk.py RESULT PAGES [for-good]``.

The disk is there for this process alone, and so is what was recorded on it: at its very end it is copied to ``RESULT``.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import sys
from pathlib import Path

from small_run import SmallRun

from monitor.anomalies import listeners

PAGE = 4096


def fill(path: Path, leave: int) -> None:
    """Write until nothing more fits, and give ``leave`` pages back."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(file.tell() - leave * PAGE)


def main(result: str, leave: str, how_long: str = "for-a-while") -> None:
    vars(listeners)["SHARE"] = 0.0  # on a busy machine a slow write would put the next off until there is room again
    disk = Path(os.environ["MONITOR_OUTPUT_DIR"])
    atexit.register(shutil.copytree, disk, result, ignore=shutil.ignore_patterns("ballast"))
    run = SmallRun()
    run.train_to(4)
    run.delivered()
    fill(disk / "ballast", int(leave))
    run.train_to(8)
    run.delivered()
    if how_long != "for-good":
        (disk / "ballast").unlink()
    run.train_to(12)


main(*sys.argv[1:])
