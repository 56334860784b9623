"""What a rank proposes to all: another configuration from some step on, or some fields of it for some steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
