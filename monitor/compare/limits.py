"""By how much healthy runs of a pipeline differ: learned from repeats, kept in a file, and allowed in comparisons.

    {"runs": 3, "first": 0, "last": 99, "allowed": {
        "actv": {"first": 0.6, "later": 7.1},
        "grad_reduced": {"first": 0.9, "later": 11.0},
        "run/tokens_per_second": {"first": 40000.0, "later": 52000.0}}}

Numbers are multiples of what rounding explains in one step. ``first`` holds in the first step of a comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from monitor.compare.values import Compared, ComparisonError
from monitor.series import RUN_KIND

MARGIN: Final = 2.0
"""How many times what repeats have shown is allowed: a few of them do not show the most that there can be."""

OF_ITS_OWN: Final = 16.0
"""A tensor that differs by so many times what nine tenths of its kind do has an entry of its own."""

Multiple = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Allowed(BaseModel):
    """For a kind, or for tensors of one: how large differences may be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    first: Multiple
    later: Multiple


class Limits(BaseModel):
    """What is allowed.

    Attributes:
        runs: How many it was learned from; 0 if somebody has written it.
        first, last: The steps that it holds for; later ones are held to how rounding grows.
        allowed: By kind, or by ``kind/name``, where ``*`` is any text. The longest entry that fits counts.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    runs: int = 0
    first: int = 0
    last: int = 2**63 - 1
    allowed: dict[str, Allowed]

    @classmethod
    def read(cls, path: Path) -> Limits:
        """From a file.

        Raises:
            ComparisonError: It is no file of limits. The message names the entry.
            OSError: It cannot be read.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ComparisonError(f"{path} has no limits that can be used: {where}: {first['msg']}.") from error

    @classmethod
    def learned(cls, pairs: Sequence[Compared], runs: int) -> Limits:
        """From all pairs of healthy runs."""
        most: dict[str, dict[str, tuple[float, float]]] = {kind: {} for pair in pairs for kind in sorted(pair.counted)}
        for (kind, name), found in (one for pair in pairs for one in pair.seen.items()):
            before = most[kind].get(name, (0.0, 0.0))
            most[kind][name] = max(before[0], found[0]), max(before[1], found[1])
        allowed: dict[str, Allowed] = {}
        for kind, series in most.items():
            own = _of_their_own(kind, series)
            allowed[kind] = _allowed([found for name, found in series.items() if name not in own])
            allowed |= {f"{kind}/{name}": _allowed([series[name]]) for name in sorted(own)}
        first, last = min(pair.steps[0] for pair in pairs), max(pair.steps[1] for pair in pairs)
        return cls(runs=runs, first=first, last=last, allowed=allowed)

    def write(self, path: Path) -> None:
        """Raises: OSError: It cannot be written."""
        entries = ",\n".join(f"    {json.dumps(key)}: {one.model_dump_json()}" for key, one in self.allowed.items())
        about = json.dumps({"runs": self.runs, "first": self.first, "last": self.last})[1:-1]
        path.write_text(f'{{{about}, "allowed": {{\n{entries}\n}}}}\n')

    def of(self, kind: str, name: str, step: int, *, is_first: bool) -> float | None:
        """How large the difference of a row may be; None if nothing says so."""
        if not self.first <= step <= self.last:
            return None
        fitting = [key for key in self.allowed if key == kind or fnmatchcase(f"{kind}/{name}", key)]
        if not fitting:
            return None
        found = self.allowed[max(fitting, key=len)]
        return found.first if is_first else found.later


def _usual(sizes: list[float]) -> float:
    """What nine tenths are at most."""
    return sorted(sizes)[math.ceil(0.9 * len(sizes)) - 1]


def _of_their_own(kind: str, series: Mapping[str, tuple[float, float]]) -> set[str]:
    """The names that get entries of their own. Numbers of the run are nothing like each other."""
    usual = [_usual([found[at] for found in series.values()]) for at in (0, 1)] if series else []
    odd = (any(found[at] > OF_ITS_OWN * max(1.0, usual[at]) for at in (0, 1)) for found in series.values())
    return {name for name, is_odd in zip(series, odd, strict=True) if is_odd or kind == RUN_KIND}


def _allowed(found: Iterable[tuple[float, float]]) -> Allowed:
    first, later = (MARGIN * max(sizes) for sizes in zip((0.0, 0.0), *found, strict=True))
    return Allowed(first=float(f"{first:.4g}"), later=float(f"{later:.4g}"))
