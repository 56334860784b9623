"""Proposed configuration changes: the proposal, the queue of this rank's pending ones, and the timeline of agreed ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Generic, TypeVar

C = TypeVar("C")

Fields = Mapping[str, Any]
"""Fields of a configuration, as JSON holds them."""

FROM_START: Final = "start"
FROM_FILE: Final = "file"
FROM_ALERT: Final = "alert"
RETURN: Final = "return"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change of the configuration that the ranks have to agree on.

    Attributes:
        origin: ``FROM_FILE`` or ``FROM_ALERT``. A rank has at most one pending proposal of each origin.
        rank: The proposing rank.
        fields: All fields of the configuration or, if ``steps`` is given, only the fields that change.
        steps: The number of steps that the change lasts; None: until the next change.
    """

    origin: str
    rank: int
    fields: Fields
    steps: int | None = None

    def serialized(self) -> str:
        """One line of ASCII, never empty."""
        return json.dumps({"origin": self.origin, "rank": self.rank, "fields": self.fields, "steps": self.steps})

    @classmethod
    def parse(cls, text: str) -> Proposal:
        return cls(**json.loads(text))

    def is_same_change(self, other: Proposal) -> bool:
        """Equality that ignores the proposing rank."""
        return (self.origin, self.fields, self.steps) == (other.origin, other.fields, other.steps)

    def over(self, base: Fields) -> Fields:
        """All fields of the proposed configuration, where ``base`` is the one in force."""
        return self.fields if self.steps is None else {**base, **self.fields}


@dataclass(frozen=True, slots=True)
class Switch(Generic[C]):
    """A configuration comes into force at a step.

    Attributes:
        from_step: The agreed step, the same on all ranks.
        number: The agreement's number, the same on all ranks; 0 for the configuration that training begins with.
        origin: ``FROM_START``, ``FROM_FILE``, ``FROM_ALERT``, or ``RETURN`` at the end of a change for some steps.
    """

    from_step: int
    config: C
    number: int
    origin: str


# --- The timeline of configurations. It depends only on the agreements and their order, so it is the same on all ranks.


class ConfigTimeline(Generic[C]):
    """The configurations that result from the agreements so far.

    Args:
        prepare: Makes a configuration from its fields; raises if this rank cannot use it.

    Attributes:
        base: The fields in force until the next change, without changes that last for some steps only.
    """

    def __init__(self, base: Fields, prepare: Callable[[Fields], C]) -> None:
        self.base = base
        self._prepare = prepare

    def prepared(self, proposal: Proposal) -> C:
        """The configuration that results from ``proposal``. Raises what ``prepare`` raises."""
        return self._prepare(proposal.over(self.base))

    def after(self, number: int, from_step: int, proposal: Proposal, config: C) -> list[Switch[C]]:
        """The switches of agreement ``number``, in the order of steps. They replace all switches from ``from_step`` on."""
        switches = [Switch(from_step, config, number, proposal.origin)]
        if proposal.steps is None:
            self.base = proposal.fields
        else:
            switches.append(Switch(from_step + proposal.steps, self._prepare(self.base), number, RETURN))
        return switches


# --- Pending proposals of this rank.

MOST_ATTEMPTS: Final = 5


@dataclass(slots=True)
class _PendingProposal:
    proposal: Proposal
    attempts: int = 0
    not_before: float = 0.0


class ProposalQueue:
    """At most one pending proposal of each origin; a later one replaces it. Safe across threads.

    Args:
        retry_s: How long until an aborted proposal is made again; the time doubles after each further abort.
        now: A clock, in seconds.
    """

    def __init__(self, retry_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._lock = Lock()
        self._retry_s, self._now = retry_s, now
        self._pending: dict[str, _PendingProposal] = {}

    def ask(self, proposal: Proposal) -> None:
        with self._lock:
            self._pending[proposal.origin] = _PendingProposal(proposal)

    def due(self) -> Proposal | None:
        """The next to propose."""
        now = self._now()
        with self._lock:
            return next((one.proposal for one in self._pending.values() if one.not_before <= now), None)

    def accepted(self, proposal: Proposal) -> None:
        """The ranks agreed on ``proposal``, of this rank or another."""
        with self._lock:
            self._pending = {origin: one for origin, one in self._pending.items() if not one.proposal.is_same_change(proposal)}

    def rejected(self, proposal: Proposal, *, for_good: bool = False) -> bool:
        """``proposal`` was aborted or refused. Returns whether this rank drops its proposal instead of retrying it."""
        with self._lock:
            pending = self._pending.get(proposal.origin)
            if pending is None or pending.proposal != proposal:
                return False
            pending.attempts += 1
            if not for_good and pending.attempts < MOST_ATTEMPTS:
                pending.not_before = self._now() + self._retry_s * 2 ** (pending.attempts - 1)
                return False
            del self._pending[proposal.origin]
            return True
