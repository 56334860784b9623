"""Which tensors of a module's inputs or outputs a target asks for: ``tensor``, ``tuple[2]`` or ``tuple[2]:0``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

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
