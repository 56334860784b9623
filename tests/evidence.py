"""What `make test` samples and `make prove` runs whole: cases and examples whose number is the evidence."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import cycle, product
from typing import Final, TypeVar

PROVES: Final = os.environ.get("PROVE") == "1"

T = TypeVar("T")
U = TypeVar("U")


def sampled(cases: Sequence[T], *chosen: int) -> list[T]:
    """The cases of a test: all of them under `make prove`, else the ones at positions ``chosen``, or the first."""
    return list(cases) if PROVES else [cases[position] for position in chosen or (0,)]


def in_turn(cases: Iterable[T], ways: Iterable[U]) -> list[tuple[T, U]]:
    """Each case with one of the ways, in turn: there are at least as many cases. With each of them under `make prove`."""
    return list(product(cases, ways)) if PROVES else list(zip(cases, cycle(ways)))


def examples(few: int, many: int) -> int:
    """How many examples a generated test draws: ``many`` under `make prove`."""
    return many if PROVES else few
