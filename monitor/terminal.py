"""What is shown to people, with names in it that come from files: nothing in it steers the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # alerts are spelled in the training process, which has no use for it
    from rich.console import Console


def plain(text: str) -> str:
    """One line, in which what a terminal would obey is spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(console: Console, text: str, style: str = "") -> None:
    """Print lines as they are, however narrow the console: a path that is cut short would not say where to look."""
    lines = "\n".join(map(plain, text.split("\n")))
    console.print(lines, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
