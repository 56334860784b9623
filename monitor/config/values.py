"""The values that fields hold: what each may be, and how it reads from JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from monitor.formats import FORMATS

# --- Which tensors of a module's inputs or outputs a target asks for: ``tensor``, ``tuple[2]`` or ``tuple[2]:0``.

_NUMBER: Final = r"(0|[1-9][0-9]{0,5})"
_TUPLE: Final = re.compile(rf"tuple\[{_NUMBER}\](?::{_NUMBER})?")

SPELLINGS: Final = '"tensor", "tuple[N]" or "tuple[N]:i" with i below N'


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The structure that one side of a module is expected to have, and what to record of it.

    Attributes:
        length: Number of tensors, or None for a tensor that stands alone.
        index: The one element to record, where the spelling names one; without it, a tuple stands for its first.
    """

    length: int | None = None
    index: int | None = None

    @classmethod
    def parse(cls, text: object) -> TensorSpec:
        """Read a spelling. A value that already is a spec is passed on.

        Raises:
            ValueError: It is none of the spellings, or the index lies outside the tuple.
        """
        if isinstance(text, TensorSpec):
            return text
        if text == "tensor":
            return cls()
        match = _TUPLE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"expected {SPELLINGS}")
        length, index = int(match[1]), None if match[2] is None else int(match[2])
        if index is not None and index >= length:
            raise ValueError(f"a tuple of {length} has no element {index}, elements are counted from 0")
        return cls(length, index)

    def __str__(self) -> str:
        if self.length is None:
            return "tensor"
        return f"tuple[{self.length}]" + ("" if self.index is None else f":{self.index}")


INT64_MAX: Final = 2**63 - 1
DAY_SECONDS: Final = 86_400

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIMESTAMP: Final = re.compile(r"([A-Z][a-z]{2})([0-9]{2})_([0-9]{2})-([0-9]{2})-([0-9]{2})")


def _timestamp(text: str) -> str:
    if not _is_timestamp(text):
        raise ValueError("expected a timestamp like Dec03_21-34-40, with an English month")
    return text


def _is_timestamp(text: str) -> bool:
    """Read by hand, since ``strptime`` knows month names in the language of the locale only."""
    match = _TIMESTAMP.fullmatch(text)
    if match is None or match[1] not in _MONTHS:
        return False
    day, hour, minute, second = (int(part) for part in match.groups()[1:])
    try:
        # The year is not written; a leap year has every day that a timestamp can name.
        datetime(2000, _MONTHS.index(match[1]) + 1, day, hour, minute, second)
    except ValueError:
        return False
    return True


def _none_or_two(range_: tuple[str, ...]) -> tuple[str, ...]:
    if len(range_) not in (0, 2):
        raise ValueError("expected [] or two timestamps, the first and the last to continue")
    return range_


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not a regular expression: {error}") from None
    return text


_FORMATS_ALLOWED: Final = ", ".join([*(f'"{name}"' for name in FORMATS), "or a list of some of them"])


def _formats(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or any(name not in tuple(FORMATS) for name in names):
        raise ValueError(f"expected {_FORMATS_ALLOWED}")
    if len(set(names)) < len(names):
        raise ValueError("a format stands there twice")
    return tuple(names)


Step = Annotated[int, Field(ge=0, le=INT64_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT64_MAX)]
Rank = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Field(ge=0, le=DAY_SECONDS)]

# JSON has lists where the model has tuples; `strict=False` admits them here and reaches no element.
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Ranks = Annotated[
    tuple[Rank, ...],
    Field(strict=False, json_schema_extra={"or": "null"}),
    BeforeValidator(lambda value: () if value is None else value),
]
Patterns = Annotated[tuple[Annotated[str, AfterValidator(_regular_expression)], ...], Field(strict=False)]
TimestampRange = Annotated[
    tuple[Annotated[str, AfterValidator(_timestamp)], ...],
    Field(strict=False, json_schema_extra={"allowed": "[] or two timestamps like Dec03_21-34-40"}),
    AfterValidator(_none_or_two),
]
Formats = Annotated[
    tuple[str, ...],
    BeforeValidator(_formats),
    WithJsonSchema({"type": "string or list", "allowed": _FORMATS_ALLOWED}),
]
Side = Annotated[
    TensorSpec | None,
    PlainValidator(TensorSpec.parse),
    WithJsonSchema({"type": "string", "allowed": SPELLINGS}),
]
