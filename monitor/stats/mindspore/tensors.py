"""What there is to read in a tensor of MindSpore, and whose an error is that reading meets.

Operations run later than they are called, and what goes wrong in one surfaces in the first call that waits, whatever it waits
for; then it is gone. So a read that waits may be handed an error of training's, which it must not keep to itself.
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
    """False for what only pretends to have any: parameters that are yet to be initialized (reading them would draw their
    random numbers), tensors of the device ``meta``, and sparse ones, whose elements may be terms of sums.
    """
    return not (isinstance(x, SPARSE) or x.has_init or getattr(x, "is_meta", False))


def on_host(x: Tensor) -> Raw:
    """The elements of a tensor with data. Waits for all that was called before.

    The array shares the memory of a contiguous tensor in host memory; of any other it is a copy. It is read at once and not
    kept: an optimizer writes where it stands.

    Raises:
        EarlierFailure: Something that was called before has failed.
    """
    try:
        array: Raw = x.asnumpy()
    except Exception as error:
        raise EarlierFailure(error) from error
    return array


# --- Pages on the devices of MindSpore.
#
# What a kernel made of a tensor is a small tensor of its own, and a page keeps these until it is sealed: nothing is
# written in place, which not every backend can do, and nothing has to be cleared. Sealing joins them into one tensor
# for each dtype, which the device does when it comes to it; the writer waits for that, and makes rows of them.

Read = Callable[[Raw], Floats]
"""Makes a row of the page, on the host, of what the tensor holds."""


@dataclass(frozen=True, slots=True)
class _PageEntry:
    tensor: Tensor
    read: Read


class MindSporeDevicePage:
    """A page of which the device holds what its rows are made of."""

    def __init__(self, rows: int, columns: int = len(COLUMNS)) -> None:
        self.shape = rows, columns
        self._written: dict[int, _PageEntry] = {}

    def write(self, row: int, tensor: Tensor, read: Read) -> None:
        """Let a row be what ``read`` makes of ``tensor``, of one dimension, which nobody changes. Does not wait."""
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
        """What was written, on its way to the host; the page is empty from then on."""
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
        del rows  # only what was written is kept
        self._sealed = self._page.taken()
        self.nbytes = self._sealed.nbytes

    def rows(self) -> Floats:
        """Raises ``EarlierFailure`` where waiting for the device meets what went wrong in training."""
        return self._sealed.rows(self._page.shape)


class _JoinedTensors:
    """Tensors of several rows as one of each dtype: one transfer to the host instead of thousands.

    Attributes:
        nbytes: Their size.
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
    """Rows and sizes without the tensors, whose memory is free as soon as they are joined."""
    return [(row, one.tensor.size, one.read) for row, one in group.items()]


# --- What an operation of MindSpore's does beyond what it is asked for, while a network is called: none of it in ours.

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


# --- Histograms of magnitudes of MindSpore's tensors in host memory.


def count_magnitudes(x: Tensor) -> NDArray[np.int64] | None:
    """The histogram of a tensor on the host, shape ``(BINS,)``; None if it has no data to read.

    Raises:
        EarlierFailure: Something that was called before has failed.
    """
    return array_kernel.count_magnitudes(on_host(x)) if has_data(x) else None
