"""What a comparison has found."""

from __future__ import annotations

import re
from dataclasses import dataclass

from monitor.compare.values import Difference


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not the same on both sides.

    Attributes:
        step: Its number.
        rank: The rank's directory on the left.
        order: Its place in the execution order of that rank's step.
        name: Of the tensor, or of the entry.
        what: What is wrong, in a word: ``values``, ``shape``, ``dtype``, ``missing``, ``added``, ``argument``.
        left: What the left side has, for people; likewise ``right``.
    """

    step: int
    rank: str
    order: int
    name: str
    what: str
    left: str
    right: str
    difference: Difference | None = None

    @property
    def rank_order(self) -> list[str | int]:
        """The rank, to be sorted by: the tenth comes after the second."""
        return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", self.rank)]


@dataclass(frozen=True, slots=True)
class Compared:
    """All of it.

    Attributes:
        tensors: How many were on both sides.
        arguments: How many values that are no tensors were on both sides.
        findings: In execution order: by step, then by rank, then as the left side ran, what the right alone has in between.
    """

    tensors: int
    findings: list[Finding]
    arguments: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to compare."""
        return not (self.tensors or self.arguments or self.findings)
