"""Which recordings of the ranks of a job belong together: those that watch the same model, whatever else a rank watches.

A rank may watch more than the others (an average of the weights, a teacher). Ranks do not wait for each other: each decides
alone which of its recordings is which. It goes by what is the same on every rank that trains a model (the role), and among
recordings of one role by the order in which they began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final


@dataclass(frozen=True, slots=True)
class Watched:
    """What a recording watches.

    Attributes:
        role: What the ranks that watch the same model have in common, for people to read.
        names: Digest of the names of all parameters of this rank, which stages of a pipeline do not share.
        number: How many recordings of the role this process had begun before.
        ordinal: How many recordings of any role.
    """

    role: str
    names: str
    number: int = 0
    ordinal: int = 0

    @property
    def key(self) -> str:
        """What ranks agree on a name under."""
        return f"{_digest([self.role])}/{self.number}"


class Recordings:
    """Counts the recordings of a process."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()

    def begin(self, role: str, names: Iterable[str]) -> Watched:
        """One more recording."""
        watched = Watched(role, _digest(names), self._begun[role], self._begun.total())
        self._begun[role] += 1
        return watched


RECORDINGS: Final = Recordings()
"""Of this process."""


def _digest(texts: Iterable[str]) -> str:
    return sha256("\0".join(texts).encode("utf-8", "backslashreplace")).hexdigest()[:16]
