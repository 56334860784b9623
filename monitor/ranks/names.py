"""How a job's timestamp and a rank's directory are spelled: ``Dec03_21-34-40-rank0-1a2b3c4d``."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Final

MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_LEAP_YEAR: Final = 2000
"""A timestamp has no year; in this one each of its days exists, February 29 too."""

_TIMESTAMP: Final = re.compile(r"([A-Z][a-z]{2})([0-9]{2})_([0-9]{2})-([0-9]{2})-([0-9]{2})")
_DIRECTORY: Final = re.compile(
    rf"(?P<timestamp>{_TIMESTAMP.pattern})-rank(?P<rank>0|[1-9][0-9]{{0,8}})-(?P<suffix>[0-9a-f]{{8}})"
)


def timestamp_of(moment: datetime) -> str:
    """``Dec03_21-34-40``, with the month in English whatever the locale."""
    return f"{MONTHS[moment.month - 1]}{moment:%d_%H-%M-%S}"


def timestamp_fields(timestamp: str) -> tuple[int, int, int, int, int]:
    """Month, day, hour, minute, second: in order of time within one year.

    Raises:
        ValueError: ``timestamp`` is not one.
    """
    match = _TIMESTAMP.fullmatch(timestamp)
    if match is None or match[1] not in MONTHS:
        raise ValueError(f"{timestamp!r} is not a timestamp like 'Dec03_21-34-40'")
    day, hour, minute, second = (int(field) for field in match.groups()[1:])
    try:
        moment = datetime(_LEAP_YEAR, MONTHS.index(match[1]) + 1, day, hour, minute, second)
    except ValueError as error:
        raise ValueError(f"{timestamp!r} is not a timestamp like 'Dec03_21-34-40': {error}") from None
    return moment.month, moment.day, moment.hour, moment.minute, moment.second


@dataclass(frozen=True, slots=True)
class RankDirectory:
    """The name of the directory that one rank of one run writes into.

    Attributes:
        timestamp: When the job began, the same on all of its ranks, local time of the rank that proposed it.
        suffix: Eight hexadecimal characters that keep two runs of the same second apart.
    """

    timestamp: str
    rank: int
    suffix: str

    @classmethod
    def new(cls, timestamp: str, rank: int) -> RankDirectory:
        """A name that no other run has. The suffix comes from the system, not from the training's random state."""
        return cls(timestamp, rank, secrets.token_hex(4))

    @classmethod
    def parse(cls, name: str) -> RankDirectory | None:
        """The parts of a directory's name, None where it is not a rank's directory."""
        match = _DIRECTORY.fullmatch(name)
        if match is None:
            return None
        try:
            timestamp_fields(match["timestamp"])
        except ValueError:
            return None
        return cls(match["timestamp"], int(match["rank"]), match["suffix"])

    def __str__(self) -> str:
        return f"{self.timestamp}-rank{self.rank}-{self.suffix}"
