"""Rows as they stand in a CSV file, each with its step, so that some of them can be kept and others not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions  # type: ignore[attr-defined]
from pyarrow.csv import read_csv as read_arrow  # type: ignore[attr-defined]

BEGINNING: Final = b"vpp_stage,name,step,"
"""Of every file of ours."""

_DIALECT: Final = ParseOptions(newlines_in_values=True)
_STEPS: Final = ConvertOptions(column_types={"step": pa.int64()}, include_columns=["step"])
_ONE_THREAD: Final = ReadOptions(use_threads=False)


@dataclass(frozen=True, slots=True)
class Written:
    """The content of a file: whole lines, each of which has a step.

    Attributes:
        header: The first line, ended by a newline.
        rows: The other lines, uint8, shape ``(bytes,)``.
        lengths: Bytes of each row, its newline included; int64, shape ``(rows,)``.
        steps: Step of each row; int64, shape ``(rows,)``.
    """

    header: bytes
    rows: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    steps: NDArray[np.int64]

    @classmethod
    def nothing(cls, header: bytes) -> Written:
        """A header and no rows."""
        none = np.empty(0, np.int64)
        return cls(header, np.empty(0, np.uint8), none, none)

    @classmethod
    def read(cls, path: Path) -> Written | None:
        """None if there is no such file, or if it is not one of ours."""
        try:
            return cls.parse(path.read_bytes())
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            return None

    @classmethod
    def parse(cls, text: bytes) -> Written | None:
        """None if it is not whole, or not one of ours."""
        ends = line_ends(text)
        if not text.startswith(BEGINNING) or ends[-1:].tolist() != [len(text)]:
            return None
        try:
            steps = _steps_of(text)
        except pa.ArrowInvalid:
            return None
        if len(ends) != 1 + len(steps):
            return None
        return cls(text[: ends[0]], np.frombuffer(text, dtype=np.uint8)[ends[0] :], np.diff(ends), steps)

    def only(self, kept: NDArray[np.bool_]) -> Written:
        """Some of the rows; ``kept`` has the shape ``(rows,)``."""
        return Written(self.header, self.rows[np.repeat(kept, self.lengths)], self.lengths[kept], self.steps[kept])

    def before(self, step: int) -> Written:
        return self.only(self.steps < step)

    def text(self) -> bytes:
        return self.header + self.rows.tobytes()

    def rows_of(self, step: int) -> bytes:
        return self.only(self.steps == step).rows.tobytes()

    def first(self) -> int | None:
        """The first of its steps; None if there are no rows."""
        return int(self.steps.min()) if len(self.steps) else None

    def last(self) -> int | None:
        return int(self.steps.max()) if len(self.steps) else None


def line_ends(text: bytes) -> NDArray[np.int64]:
    """Where each whole line ends, one past its newline. A newline after an odd number of quotes is part of a name."""
    characters = np.frombuffer(text, dtype=np.uint8)
    within_quotes = np.bitwise_xor.accumulate(characters == ord('"'))
    return np.flatnonzero((characters == ord("\n")) & ~within_quotes) + 1


def _steps_of(text: bytes) -> NDArray[np.int64]:
    table = read_arrow(pa.BufferReader(text), _ONE_THREAD, _DIALECT, _STEPS)
    if table["step"].null_count:
        raise pa.ArrowInvalid("a row has no step")
    steps: NDArray[np.int64] = table["step"].to_numpy()
    return steps
