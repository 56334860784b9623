"""The C module of ``host_kernel.c``. It is built if there is a C compiler when the package is installed."""

from typing import Any, Final

from monitor.stats.partials import Floats

FLOAT32: Final[int]
FLOAT64: Final[int]
BFLOAT16: Final[int]
FLOAT16: Final[int]

def reduce(format: int, bound: float, source: Any, count: int, page: Floats, row: int, /) -> bool: ...  # noqa: A002
def reduce_higher(format: int, bound: float, source: Any, count: int, page: Floats, row: int, /) -> bool: ...  # noqa: A002
def kernels() -> list[str]: ...
def choose(name: str, /) -> None: ...
