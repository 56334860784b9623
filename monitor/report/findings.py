"""What a check of a report finds, and the place that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

State = Literal["good", "bad", "not looked at"]
GOOD: Final = "good"
BAD: Final = "bad"
NOT_LOOKED_AT: Final = "not looked at"

LOG: Final = "TrainerMon.log(loss=...)"


class Place(NamedTuple):
    """What a sentence is about, as far as it names it."""

    step: int | None = None
    rank: int | None = None
    kind: str = ""
    name: str = ""


class CheckFinding(NamedTuple):
    """What a check found.

    Attributes:
        then: What to do next, if it is bad. Otherwise what the verdict of a healthy run says, too.
        listed: Entries for programs.
    """

    state: State
    says: str
    place: Place = Place()
    then: str = ""
    listed: tuple[dict[str, Any], ...] = ()


MOST_NAMED: Final = 3
"""Names in a sentence."""


def first_names(names: Sequence[str]) -> str:
    """The first names, and dots if there are more."""
    return ", ".join([*names[:MOST_NAMED], *(["..."] if len(names) > MOST_NAMED else [])])


class Verdict(NamedTuple):
    """The one sentence of a report.

    Attributes:
        state: ``not looked at`` if nothing is bad, but a needed check did not look.
        then: What to do next.
    """

    state: State
    says: str
    then: str
    place: Place
