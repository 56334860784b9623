"""What an operation of MindSpore's does beyond what it is asked for, while a network is called: none of it in ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindspore._c_expression import MixedPrecisionType

try:
    from mindspore.graph.api import _pynative_executor as executor
except ImportError:  # before 2.9
    from mindspore.common.api import _pynative_executor as executor


@contextmanager
def beneath() -> Iterator[None]:
    """What is computed inside is recorded by no graph, and in float32 whatever a cell casts its operations to.

    ``Cell.to_float`` holds in the cell's hooks, too, and for every operation there: a sum of squares would be formed in
    float16. Nothing but asking for float32 takes that back. It holds for float64 as well, which becomes float32.
    """
    recorded = executor.enable_grad()
    executor.set_enable_grad(False)
    executor.set_mixed_precision_type(MixedPrecisionType.FP32)
    try:
        yield
    finally:
        executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)
        executor.set_enable_grad(recorded)
