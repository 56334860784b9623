"""What a benchmark says: its progress while it runs, its tables when it is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table in Markdown with its columns aligned for reading as it is.

    Args:
        names: That many columns from the left hold names and are aligned to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width if i < names else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = [_line(header, widths, names), f"| {' | '.join(rule)} |", *(_line(row, widths, names) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], names: int) -> str:
    padded = [f"{cell:<{w}}" if i < names else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(cells, widths, strict=True))]
    return f"| {' | '.join(padded)} |"


class Progress:
    """How far a benchmark is, on standard error: on a terminal in one line that is written over, elsewhere a line a stage."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._stage = ""

    def show(self, stage: str, detail: str = "") -> None:
        if self._terminal:
            print(f"\r\033[K{stage} {detail}", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            print(stage, file=sys.stderr, flush=True)
        self._stage = stage

    def end(self) -> None:
        """Leave an empty line for what follows."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def save(path: Path | None, results: object) -> None:
    """Write ``results`` as JSON, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")
