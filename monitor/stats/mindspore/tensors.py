"""Access to MindSpore's tensors: reads them on the host, keeps pages on devices, and runs operations unseen by training.

Operations run later than they are called. An error in one of them surfaces in the first call that waits, for whatever tensor,
and only there. So a read may receive an error of training, which it must pass on (``EarlierFailure``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from mindspore import COOTensor, CSRTensor, Tensor, mint
from mindspore._c_expression import MixedPrecisionType
from numpy.typing import NDArray

from monitor.failures import EarlierFailure
from monitor.stats.host import array_kernel
from monitor.stats.host.array_kernel import Raw
from monitor.stats.partials import COLUMNS, Floats
from monitor.stats.table import PageCopy

SPARSE = (COOTensor, CSRTensor)


def has_data(x: Tensor) -> bool:
    """Whether ``x`` has readable elements.

    False for parameters that are not initialized yet, because reading them would draw their random numbers; for tensors of the
    device ``meta``; and for sparse ones, whose elements may be terms of sums.
    """
    return not (isinstance(x, SPARSE) or x.has_init or getattr(x, "is_meta", False))


def on_host(x: Tensor) -> Raw:
    """The elements of a tensor with data. Waits for all earlier operations.

    The array shares the memory of a contiguous tensor in host memory; of any other tensor it is a copy. Read it at once and do
    not keep it: the optimizer overwrites that memory.

    Raises:
        EarlierFailure: An earlier operation has failed.
    """
    try:
        array: Raw = x.asnumpy()
    except Exception as error:
        raise EarlierFailure(error) from error
    return array


# --- Pages on MindSpore's devices.
#
# A kernel's result is a small tensor, and a page keeps these tensors until it is sealed. So nothing is written in place,
# which not every backend can do, and nothing has to be cleared. Sealing joins the tensors into one per dtype, on the
# device; the writer waits for them and makes rows.

Read = Callable[[Raw], Floats]
"""Makes a row of the page from the tensor's elements, on the host."""


@dataclass(frozen=True, slots=True)
class _PageEntry:
    tensor: Tensor
    read: Read


class MindSporeDevicePage:
    """A page whose rows are kept as small tensors on the device."""

    def __init__(self, rows: int, columns: int = len(COLUMNS)) -> None:
        self.shape = rows, columns
        self._written: dict[int, _PageEntry] = {}

    def write(self, row: int, tensor: Tensor, read: Read) -> None:
        """Set a row to ``read(tensor)``, evaluated later. ``tensor`` has one dimension and must not change. Does not wait."""
        self._written[row] = _PageEntry(tensor, read)

    def new_copy(self) -> PageCopy:
        return MindSporeDevicePageCopy(self)

    def clear(self) -> None:
        self._written = {}

    def forget(self, row: int) -> None:
        self._written.pop(row, None)

    def rows_now(self) -> Floats:
        return _JoinedTensors(self._written).rows(self.shape)

    def taken(self) -> _JoinedTensors:
        """The rows written so far, on their way to the host. Clears the page."""
        joined = _JoinedTensors(self._written)
        self.clear()
        return joined


class MindSporeDevicePageCopy:
    """A sealed copy of a ``MindSporeDevicePage``."""

    ready = False

    def __init__(self, page: MindSporeDevicePage) -> None:
        self._page = page
        self._sealed = _JoinedTensors({})
        self.nbytes = 0

    def take(self, rows: int) -> None:
        del rows  # the page keeps only rows that were written
        self._sealed = self._page.taken()
        self.nbytes = self._sealed.nbytes

    def rows(self) -> Floats:
        """The rows on the host. Raises ``EarlierFailure`` if the wait for the device surfaces an error of training."""
        return self._sealed.rows(self._page.shape)


class _JoinedTensors:
    """The tensors of several rows joined into one per dtype: one transfer to the host instead of thousands.

    Attributes:
        nbytes: Size of all tensors.
    """

    def __init__(self, written: dict[int, _PageEntry]) -> None:
        by_dtype: dict[object, dict[int, _PageEntry]] = {}
        for row, one in written.items():
            by_dtype.setdefault(one.tensor.dtype, {})[row] = one
        self._groups = [(mint.cat([one.tensor for one in group.values()]), _sources(group)) for group in by_dtype.values()]
        self.nbytes = sum(one.tensor.size * one.tensor.itemsize for one in written.values())

    def rows(self, shape: tuple[int, int]) -> Floats:
        """A page of that shape, 0 in rows that were not written. Waits for the device."""
        numbers = np.zeros(shape)
        for joined, sources in self._groups:
            elements, start = on_host(joined), 0
            for row, size, read in sources:
                numbers[row] = read(elements[start : start + size])
                start += size
        return numbers


def _sources(group: dict[int, _PageEntry]) -> list[tuple[int, int, Read]]:
    """Rows and sizes without the tensors, so that their memory is free as soon as they are joined."""
    return [(row, one.tensor.size, one.read) for row, one in group.items()]


# --- Operations of the monitor must not be recorded or cast, as MindSpore does with operations during a network's call.

try:
    from mindspore.graph.api import _pynative_executor as executor
except ImportError:  # before 2.9
    from mindspore.common.api import _pynative_executor as executor


@contextmanager
def beneath() -> Iterator[None]:
    """Operations inside are not recorded by a graph, and run in float32 whatever precision a cell casts its operations to.

    ``Cell.to_float`` also affects every operation in the cell's hooks: a sum of squares would be computed in float16. Only a
    request for float32 overrides it. The request also turns float64 into float32.
    """
    recorded = executor.enable_grad()
    executor.set_enable_grad(False)
    executor.set_mixed_precision_type(MixedPrecisionType.FP32)
    try:
        yield
    finally:
        executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)
        executor.set_enable_grad(recorded)


def count_magnitudes(x: Tensor) -> NDArray[np.int64] | None:
    """The histogram of a tensor in host memory, shape ``(BINS,)``; None if it has no data to read.

    Raises:
        EarlierFailure: An earlier operation has failed.
    """
    return array_kernel.count_magnitudes(on_host(x)) if has_data(x) else None
