"""What the files of the ``csv`` format are called, and which of a directory's files are theirs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

_SHARD_NAME: Final = re.compile(r"(?P<kind>.+)_(?P<first>\d+)-(?P<last>\d+)(?:\.\d+)?\.csv")
_DRAFT_NAME: Final = re.compile(r"\..+\.csv\.draft")
_PART_NAME: Final = re.compile(r"\.(?P<shard>.+)\.part")


class Steps(NamedTuple):
    """The steps from ``first`` to ``last``, both included."""

    first: int
    last: int

    @classmethod
    @lru_cache(maxsize=4)  # a step is asked for a dozen times
    def of_record(cls, step: int, steps_per_record: int) -> Steps:
        """The record that ``step`` falls in."""
        first = step - step % steps_per_record
        return cls(first, first + steps_per_record - 1)

    def holds(self, other: Steps) -> bool:
        return self.first <= other.first and other.last <= self.last

    def meets(self, other: Steps) -> bool:
        """Whether they have a step in common."""
        return self.first <= other.last and other.first <= self.last


class Named(NamedTuple):
    """A file, and what its name says of it."""

    kind: str
    steps: Steps
    path: Path


def shard_name(kind: str, steps: Steps, copy: int = 1) -> str:
    return f"{kind}_{steps.first}-{steps.last}{f'.{copy}' if copy > 1 else ''}.csv"


def part_name(shard: str) -> str:
    """Of the hidden file that is going to be ``shard``."""
    return f".{shard}.part"


def draft_name(shard: str) -> str:
    """Of the hidden file with which a shard that loses some of its rows is replaced."""
    return f".{shard}.draft"


def shards_in(directory: Path) -> Iterator[Named]:
    """The files that a reader sees."""
    for name in _names(directory):
        if (named := _named(name, directory / name)) is not None:
            yield named


def parts_in(directory: Path) -> Iterator[Named]:
    """The files in the making."""
    for name in _names(directory):
        match = _PART_NAME.fullmatch(name)
        if match and (named := _named(match["shard"], directory / name)) is not None:
            yield named


def drafts_in(directory: Path) -> list[Path]:
    return [directory / name for name in _names(directory) if _DRAFT_NAME.fullmatch(name)]


def _named(name: str, path: Path) -> Named | None:
    match = _SHARD_NAME.fullmatch(name)
    return Named(match["kind"], Steps(int(match["first"]), int(match["last"])), path) if match else None


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
