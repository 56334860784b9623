"""What a rank wants to be agreed on and is not yet."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Final

from monitor.dynamic.proposal import Proposal

MOST_ATTEMPTS: Final = 5


@dataclass(slots=True)
class _Wish:
    proposal: Proposal
    attempts: int = 0
    not_before: float = 0.0


class Wishes:
    """At most one wish of each origin; a later one replaces it. Safe across threads.

    Args:
        retry_s: After a proposal that was aborted, how long until it is made again; twice as long after each further one.
    """

    def __init__(self, retry_s: float) -> None:
        self._lock = Lock()
        self._retry_s = retry_s
        self._wished: dict[str, _Wish] = {}

    def ask(self, proposal: Proposal) -> None:
        with self._lock:
            self._wished[proposal.origin] = _Wish(proposal)

    def due(self, now: float) -> Proposal | None:
        """The next to propose. ``now`` is in seconds."""
        with self._lock:
            return next((wish.proposal for wish in self._wished.values() if wish.not_before <= now), None)

    def granted(self, proposal: Proposal) -> None:
        """``proposal`` was agreed on, whosever it was."""
        with self._lock:
            self._wished = {origin: wish for origin, wish in self._wished.items() if not wish.proposal.asks_what(proposal)}

    def denied(self, proposal: Proposal, now: float, *, for_good: bool = False) -> bool:
        """``proposal`` was not agreed on; whether that ends a wish of this rank, which otherwise comes up again."""
        with self._lock:
            wish = self._wished.get(proposal.origin)
            if wish is None or wish.proposal != proposal:
                return False
            wish.attempts += 1
            if not for_good and wish.attempts < MOST_ATTEMPTS:
                wish.not_before = now + self._retry_s * 2 ** (wish.attempts - 1)
                return False
            del self._wished[proposal.origin]
            return True
