"""What commands say and how they end: text with names from files, control characters escaped, and exit statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the training process formats alerts with `plain`, and must not import rich
    from rich.console import Console

CLEAN, FLAWED, NOTHING = 0, 1, 2
"""Exit statuses of all commands: done, and all is well; done, but something is missing, differs or is wrong; not done."""


def plain(text: str) -> str:
    """One line, in which control characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(console: Console, text: str, style: str = "") -> None:
    """Print lines without wrapping them at the console's width: a truncated path would be useless."""
    lines = "\n".join(map(plain, text.split("\n")))
    console.print(lines, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
