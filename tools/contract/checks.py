"""Runs the checks of a contract, one after the other, and prints a line for each.

A line begins with ``ok``, ``skipped``, ``FAILED`` or ``note``, followed by the name of the check, the reason or the
remark. ``tools/versions.py`` reads these lines.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

Check = Callable[[Path], "str | None"]
"""Checks something in an empty directory. Returns a remark or None. Raises an exception if the contract is broken."""


class SkippedError(Exception):
    """The framework cannot do under this Python what the check needs; the message says what."""


def run_checks(*checks: Check) -> int:
    """Run ``checks``, each in a directory of its own: those whose names have a word of the command line, or all without one.

    Returns:
        The exit status: 1 if a check failed.
    """
    words = sys.argv[1:]
    chosen = [check for check in checks if not words or any(word in name_of(check).split() for word in words)]
    failed = [check for check in chosen if not passes(check)]  # a list: all are run
    return int(bool(failed))


def name_of(check: Check) -> str:
    """The name as a sentence."""
    return check.__name__.replace("_", " ")


def passes(check: Check) -> bool:
    """Run one check and print its line. False if it failed."""
    name = name_of(check)
    with tempfile.TemporaryDirectory(prefix="trainermon-contract-") as directory:
        os.environ["MONITOR_OUTPUT_DIR"] = str(Path(directory) / "monitor_output")
        try:
            remark = check(Path(directory))
        except SkippedError as reason:
            print(f"skipped {name}: {reason}", flush=True)
        except Exception as error:  # the other checks still run
            traceback.print_exc(file=sys.stderr)
            print(f"FAILED {name}: {type(error).__name__}: {first_line(error)}", flush=True)
            return False
        else:
            print(f"ok {name}" if remark is None else f"ok {name}\nnote {remark}", flush=True)
    return True


def first_line(error: Exception) -> str:
    """The first line of a message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


class Heard(logging.Handler):
    """Listens to the warnings of the monitor."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def __enter__(self) -> Heard:
        logging.getLogger("monitor").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("monitor").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())
