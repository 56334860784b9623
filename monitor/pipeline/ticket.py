"""A request to the writer that somebody waits for."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Final

SHORTEST_PAUSE: Final = 20e-6
LONGEST_PAUSE: Final = 5e-3

WRITERS_SHARE: Final = 0.75
"""The part of a time limit that the writer has for itself; the rest is for doing without it what can be done."""


class Ticket:
    """Settled once by the writer, waited for by anyone, also in a signal handler.

    The wait looks at a plain attribute again and again. ``threading.Event`` has a lock inside: a handler that waits for an
    event while the code it interrupted is in the same wait never returns.
    """

    def __init__(self) -> None:
        self.done = False
        self.ok = False

    def settle(self, ok: bool) -> None:
        self.ok = ok
        self.done = True

    def wait(self, seconds: float) -> bool:
        """Whether it was settled within ``seconds``."""
        deadline, pause = monotonic() + seconds, SHORTEST_PAUSE
        while not self.done and monotonic() < deadline:
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return self.done
