"""The thread of the one rank that watches the configuration file, and switches it off when monitoring has ended by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Final

from monitor.config import ConfigError, MonitorConfig
from monitor.dynamic.settings_file import FileWatch, Refused, change_file
from monitor.failures import LOGGER, Failures

INTERVAL_S: Final = 1.0
JOIN_S: Final = 1.0
LAST_WORD_S: Final = 5.0
"""How long closing waits for the file to be switched off."""


class Watching:
    """Looks at the file about once a second, on a daemon thread: a file system that hangs holds up nobody.

    Args:
        changed: Called on that thread with each new configuration.

    Attributes:
        retired: Set to end the thread after its next turn, without waking it.
    """

    def __init__(
        self,
        path: str,
        known: MonitorConfig,
        changed: Callable[[MonitorConfig], None],
        failures: Failures,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._path, self._changed, self._failures, self._interval_s = path, changed, failures, interval_s
        self.retired = False
        self._watch = FileWatch(path, known)
        self._ended: MonitorConfig | None = None
        self._looking = Lock()
        self._wake, self._stopped, self._idle = Event(), Event(), Event()
        self._thread = Thread(target=self._run, name="monitor-settings", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def switch_off(self, ended: MonitorConfig) -> None:
        """Set ``dynamic_on`` to false in the file soon, if it still says what has ``ended``. Does not wait."""
        self._ended = ended
        self._idle.clear()
        self._wake.set()

    def stop(self) -> None:
        """End, within seconds; what is to be written is, unless the file system hangs."""
        if self._ended is not None:
            self._idle.wait(LAST_WORD_S)
        self._stopped.set()
        self._wake.set()
        self._thread.join(JOIN_S)

    def turn(self) -> None:
        """Look once, now."""
        with self._looking:
            self._look()
            self._write()
        self._idle.set()

    def _run(self) -> None:
        turn = self._failures.guarded("watching the configuration file", self.turn)
        while not (self._stopped.is_set() or self.retired):
            turn()
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def _look(self) -> None:
        found = self._watch.look(time.time_ns())
        if isinstance(found, Refused):
            said = f"{found.reason}\nThe configuration was changed to what cannot be used: the one before stays in force."
            self._failures.warn(f"configuration refused ({found.content[:8]})", said)
        elif found is not None:
            self._changed(found)

    def _write(self) -> None:
        ended, self._ended = self._ended, None
        if ended is None or not ended.dynamic_on or self._watch.known != ended:
            return
        try:
            written = change_file(self._path, {("dynamic_on",): False}, self._watch.holds)
        except (ConfigError, OSError) as error:
            advice = "Monitoring has ended and the file still says dynamic_on: true. Change anything else in it to begin again."
            self._failures.report("switching dynamic_on off", error, advice)
            return
        if written is not None:
            self._watch.wrote(*written)
            LOGGER.info("[rank %d] %s: dynamic_on is false now", self._failures.rank, self._path)
