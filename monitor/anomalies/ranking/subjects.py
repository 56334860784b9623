"""What an event is about, taken apart: the part that the series plays in a step, and the modules that it lies in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final

from monitor.series import ACTIVATION_KINDS, MOMENT_KINDS, REPLICA_KIND, Series

ROOT: Final = ""
"""The name of a chunk's root module."""

_SLOT: Final = re.compile(r"(?P<module>.*)\.(?P<slot>(?:input|output)(?:_.*?)?)(?:#(?P<call>\d{1,9}))?", re.DOTALL)


class Role(IntEnum):
    """Parts of a step, in an order in which none needs a later one's numbers of the same step and micro-step."""

    ORIGINAL_WEIGHT = 0
    FORWARD = 1
    BACKWARD = 2
    LOCAL_GRADIENT = 3
    GRADIENT = 4
    MOMENT = 5
    UPDATED_WEIGHT = 6
    OTHER = 7


_ROLES: Final = {
    "param_origin": Role.ORIGINAL_WEIGHT,
    "actv": Role.FORWARD,
    "actv_grad": Role.BACKWARD,
    "grad_unreduced": Role.LOCAL_GRADIENT,
    "grad_reduced": Role.GRADIENT,
    **dict.fromkeys(MOMENT_KINDS, Role.MOMENT),
    "param_updated": Role.UPDATED_WEIGHT,
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A series, as the ranking sees it.

    Attributes:
        series: A replica under the kind and name that it stands for.
        spelled: As it stands in files.
        module: Which the tensor goes into or comes out of; of a parameter the one that has it.
        is_input: Whether the tensor, or the one that this is the gradient of, goes into the module.
        call: How many calls of the module the micro-step had before.
    """

    series: Series
    spelled: Series
    role: Role
    module: str
    is_input: bool = False
    call: int = 0

    @property
    def is_entry(self) -> bool:
        """Whether data comes into the module with it: an input on the way forward, an output's gradient on the way back."""
        return self.role == (Role.FORWARD if self.is_input else Role.BACKWARD)

    @property
    def around(self) -> tuple[str, ...]:
        """The modules that it lies in, from within; the root is the last."""
        return modules_around(self.module)


def subject_of(series: Series) -> Subject:
    """Take a series apart. A name that no hook gives an activation is taken for one of the root."""
    meant = stands_for(series)
    role = _ROLES.get(meant.kind, Role.OTHER)
    if meant.kind not in ACTIVATION_KINDS:
        return Subject(meant, series, role, meant.name.rpartition(".")[0])
    found = _SLOT.fullmatch(meant.name)
    if found is None:
        return Subject(meant, series, role, ROOT)
    return Subject(meant, series, role, found["module"], found["slot"].startswith("input"), int(found["call"] or 0))


def stands_for(series: Series) -> Series:
    """The series itself; of a replica the one that another rank writes."""
    if series.kind != REPLICA_KIND:
        return series
    kind, slash, name = series.name.partition("/")
    return Series(kind, series.vpp_stage, name) if slash else series


@lru_cache(maxsize=100_000)
def modules_around(module: str) -> tuple[str, ...]:
    """A module and those that it lies in; the root is the last."""
    return tuple(_climb(module))


def parent(module: str) -> str:
    return module.rpartition(".")[0]


def _climb(module: str) -> Iterator[str]:
    while module != ROOT:
        yield module
        module = parent(module)
    yield ROOT
