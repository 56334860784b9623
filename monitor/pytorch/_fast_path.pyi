"""The C module of ``fast_path.c``. It is built if Python has a GIL, and there is a C compiler when the package is installed."""

from typing import Any, Final

from monitor.pytorch.fast_path import PythonReader, PythonReadTensor

class Reader(PythonReader): ...
class ReadTensor(PythonReadTensor): ...

MOST_LEAVES: Final[int]
KERNEL: Final[str]

def set_up(
    exchange: Any, tensor: type, parameter: type, accumulation: type, forwarding: type, is_lazy_copy: Any, sequence_nr: Any,
    backward: Any, new_hooks: type, /,
) -> bool: ...  # fmt: skip
