"""The C module of ``host_kernel.c``. It is built if there is a C compiler when the package is installed."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from monitor.stats.partials import Floats

FLOAT32: Final[int]
FLOAT64: Final[int]
BFLOAT16: Final[int]
FLOAT16: Final[int]
INT64: Final[int]
HIGHER: Final[int]
CHECK_SUMS: Final[int]

def reduce(format: int, bound: float, wanted: int, source: Any, count: int, page: Floats, row: int, /) -> bool: ...  # noqa: A002
def kernels() -> list[str]: ...
def choose(name: str, /) -> None: ...
def exponents(format: int, source: Any, count: int, counts: NDArray[np.int64], /) -> None: ...  # noqa: A002
def within(format: int, source: Any, count: int, low: int, high: int, /) -> int: ...  # noqa: A002
