"""The C module of ``lines.c``. It is built if there is a C compiler when the package is installed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def lines(
    columns: tuple[tuple[Any, ...], ...],
    ends: NDArray[np.int64],
    powers: NDArray[np.uint64],
    first: int,
    ndigits: int,
    fixed_from: float,
    positions: NDArray[np.int64],
    /,
) -> bytearray: ...
