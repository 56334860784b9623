"""What commands say and how they end: text with names from files, control characters escaped, and exit statuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the training process formats alerts with `plain`, and must not import rich
    from rich.console import Console

CLEAN, FLAWED, NOTHING = 0, 1, 2
"""Exit statuses of all commands: done, and all is well; done, but something is missing, differs or is wrong; not done."""


def plain(text: str) -> str:
    """One line, in which control characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: float, one: str, several: str = "") -> str:
    """``1 row`` or ``2 rows``. ``several`` is the plural if an s does not make it, as in ``1 row has`` and ``2 rows have``."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def first_of(names: Sequence[object], most: int) -> str:
    """The first names, and dots if there are more."""
    return ", ".join(map(str, names[:most])) + (", …" if len(names) > most else "")


def say(console: Console, text: str, style: str = "") -> None:
    """Print lines without wrapping them at the console's width: a truncated path would be useless."""
    lines = "\n".join(map(plain, text.split("\n")))
    console.print(lines, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


def in_json(value: Any) -> Any:
    """A value as JSON takes it, also within a list or a struct: ``nan``, ``inf`` and ``-inf`` are texts.

    DuckDB's sums of integers are decimal numbers.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list | tuple):
        return [in_json(one) for one in value]
    return {name: in_json(one) for name, one in value.items()} if isinstance(value, dict) else value
