"""What a rank proposes to all: another configuration from some step on, or some fields of it for some steps."""

from __future__ import annotations

import json
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
    """A change that is to be agreed on.

    Attributes:
        origin: What it came from, ``FROM_FILE`` or ``FROM_ALERT``. A rank has at most one wish of each origin.
        rank: Whose wish it is.
        fields: All fields of the configuration or, where ``steps`` are given, those that change.
        steps: For how many steps; None: until the next change.
    """

    origin: str
    rank: int
    fields: Fields
    steps: int | None = None

    def spelled(self) -> str:
        """One line of ASCII, never empty."""
        return json.dumps({"origin": self.origin, "rank": self.rank, "fields": self.fields, "steps": self.steps})

    @classmethod
    def parse(cls, spelled: str) -> Proposal:
        return cls(**json.loads(spelled))

    def asks_what(self, other: Proposal) -> bool:
        """Whether it wants the same, whosever wish it is."""
        return (self.origin, self.fields, self.steps) == (other.origin, other.fields, other.steps)

    def over(self, base: Fields) -> Fields:
        """The whole configuration that it asks for, where ``base`` is the one in force."""
        return self.fields if self.steps is None else {**base, **self.fields}


@dataclass(frozen=True, slots=True)
class Switch(Generic[C]):
    """From a step on, a configuration holds.

    Attributes:
        from_step: The step that was agreed on, the same on all ranks.
        number: Of the agreement, the same on all ranks; 0 for the configuration that training begins with.
        origin: ``FROM_START``, ``FROM_FILE``, ``FROM_ALERT``, or ``RETURN`` where the steps asked for are over.
    """

    from_step: int
    config: C
    number: int
    origin: str


# --- The course of configurations: what each agreement makes of those before. It goes by the agreements alone, in their
# order, so it is the same on all ranks.


class Course(Generic[C]):
    """Where the agreements so far lead.

    Args:
        prepare: Makes a configuration of its fields; raises where this rank cannot use it.

    Attributes:
        base: The fields that hold until the next change, without what holds for some steps only.
    """

    def __init__(self, base: Fields, prepare: Callable[[Fields], C]) -> None:
        self.base = base
        self._prepare = prepare

    def prepared(self, proposal: Proposal) -> C:
        """The configuration that ``proposal`` leads to. Raises what ``prepare`` raises."""
        return self._prepare(proposal.over(self.base))

    def after(self, number: int, from_step: int, proposal: Proposal, config: C) -> list[Switch[C]]:
        """What agreement ``number`` on ``proposal`` brings, in the order of steps. It replaces all that was to come from
        ``from_step`` on.
        """
        switches = [Switch(from_step, config, number, proposal.origin)]
        if proposal.steps is None:
            self.base = proposal.fields
        else:
            switches.append(Switch(from_step + proposal.steps, self._prepare(self.base), number, RETURN))
        return switches


# --- What a rank wants to be agreed on and is not yet.

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
