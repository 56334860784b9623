"""What lines are made of, column by column. All columns of some rows are aligned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monitor.sinks.cells import Cells
from monitor.stats.partials import Floats


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts that were spelled before, each found by its number.

    Attributes:
        of: The texts.
        index: Which of them each row has; int64, shape ``(rows,)``.
    """

    of: Cells[Any]
    index: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers, written as ``monitor.sinks.python_lines`` says.

    Attributes:
        values: float64, shape ``(rows,)``.
        valid: Which of them were measured, shape ``(rows,)``; the others have empty cells.
    """

    values: Floats
    valid: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Counts(Numbers):
    """Numbers that are integers."""


Column = Texts | Numbers

Join = Callable[[Sequence[Column], Sequence[int], int], Iterator[memoryview]]
"""Takes columns, how many rows each text is to have, and ``ndigits``: makes lines, each ended by a newline."""
