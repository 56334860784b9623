"""What is done about bits that are wrong: a warning, a note in the manifest, an event, and the alarm."""

from __future__ import annotations

import logging
import socket
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from monitor.anomalies.events import Signal
from monitor.anomalies.listeners import EventFiles
from monitor.anomalies.scanner import RuleFinding
from monitor.config.model import CHECKSUM
from monitor.coordinator.manifest_format import WrongBits
from monitor.failures import LOGGER
from monitor.series import NO_MICRO_STEP
from monitor.terminal import plain

ODD_COPY: Final = "OddCopy"
UNLIKE_COPIES: Final = "UnlikeCopies"
CHANGED_BETWEEN: Final = "ChangedBetweenSteps"
"""What events name in the place of an alert rule."""

_SEE: Final = "(docs/silent-corruption.md)"
ADVICE: Final = {
    ODD_COPY: f"Most ranks hold other bits: take this host out of the job and test it {_SEE}.",
    UNLIKE_COPIES: f"Ranks hold different bits, and nothing says which are wrong: test their hosts, first that of a rank with "
    f"an event {CHANGED_BETWEEN} {_SEE}.",
    CHANGED_BETWEEN: f"Look at what writes to it between steps. If nothing does, test this host's memory {_SEE}.",
}


class BitsJournal(Protocol):
    """Keeps what was found: the rank's manifest."""

    def note(self, key: str, value: str, /) -> None:
        """Add a note. Any thread; never waits."""

    def found_wrong(self, bits: WrongBits, /) -> None:
        """Add wrong bits, to be saved soon. Any thread; never waits."""


class CorruptionAlerts:
    """Tells people and files of what was found on this rank.

    Args:
        ring: The alarm, called for each alert. Any thread; must not wait.

    Attributes:
        events: The event files of the alert rules; None if there are none.
    """

    def __init__(self, rank: int, journal: BitsJournal, ring: weakref.WeakMethod[Callable[[], object]] | None = None) -> None:
        self.events: EventFiles | None = None
        self.rank = rank
        self._journal, self._ring = journal, ring

    def alarm(self) -> None:
        """Ring the alarm. Any thread."""
        if self._ring is not None and (ring := self._ring()) is not None:
            ring()

    def say(self, found: WrongBits) -> None:
        """Warn, keep what was found, and ring the alarm. Any thread."""
        LOGGER.warning("[rank %d] %s", self.rank, plain(found.said))
        self._journal.found_wrong(found.model_copy(update={"host": socket.gethostname()}))
        self.alarm()

    def note(self, about: str, what: str, level: int = logging.INFO) -> None:
        """Log what is no alert, and note it. Any thread."""
        LOGGER.log(level, "[rank %d] %s", self.rank, plain(what))
        self._journal.note(about, what)

    def event(self, rule: str, step: int, series: int, call_id: int) -> None:
        """Add an event to the event files. On the writer thread."""
        if self.events is not None:
            signal = Signal(rule, CHECKSUM, float("nan"))
            self.events.add(step, RuleFinding(call_id, series, NO_MICRO_STEP, signal, nonfinite=False))
