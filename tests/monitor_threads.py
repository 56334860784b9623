"""The threads that the monitors of this process run, in tests of those that end with theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

OF_THE_PROCESS: Final = {"monitor-signals", "monitor-dump-writer"}
"""The one listens to signals for all monitors. A debugger that was made last is kept with its writer, for its class."""


def threads_of_monitors() -> set[threading.Thread]:
    """Those that each monitor has of its own."""
    threads = threading.enumerate()
    return {one for one in threads if one.name.startswith("monitor-") and one.name not in OF_THE_PROCESS}


@contextmanager
def no_thread_left() -> Iterator[None]:
    """The monitors that were made within have ended their threads. Those of an earlier test may still run."""
    before = threads_of_monitors()
    yield
    assert threads_of_monitors() <= before
