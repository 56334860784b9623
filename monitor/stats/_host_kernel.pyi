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

def reduce(
    format: int,  # noqa: A002
    bound: float,
    wanted: int,
    source: Any,
    count: int,
    page: Floats,
    row: int,
    bins: Floats | None = None,
    /,
) -> bool: ...
def kernels() -> list[str]: ...
def choose(name: str, /) -> None: ...
def magnitudes(format: int, source: Any, count: int, bins: Floats, /) -> None: ...  # noqa: A002
def divide(ends: NDArray[np.uint32], /) -> None: ...
