"""Access to MindSpore's tensors: reads them on the host, keeps pages on devices, and runs operations unseen by training.

Operations run later than they are called. An error in one of them surfaces in the first call that waits, for whatever tensor,
and only there. So a read may receive an error of training, which it must pass on (``EarlierFailure``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import mindspore as ms
import numpy as np
from mindspore import COOTensor, CSRTensor, Tensor, mint
from mindspore._c_expression import MixedPrecisionType

from monitor.failures import EarlierFailure
from monitor.stats.host.array_kernel import Raw, as_reals, rounded_to_bfloat16
from monitor.stats.partials import COLUMNS, Floats
from monitor.stats.table import PageCopy

SPARSE = (COOTensor, CSRTensor)


def has_data(x: Tensor) -> bool:
    """Whether ``x`` has readable elements.

    False for parameters that are not initialized yet, because reading them would draw their random numbers; for tensors of the
    device ``meta``; and for sparse ones, whose elements may be terms of sums.

    Raises:
        EarlierFailure: The operation that computes ``x`` cannot run.
    """
    if isinstance(x, SPARSE):
        return False
    try:
        return not (x.has_init or getattr(x, "is_meta", False))
    except Exception as error:
        raise EarlierFailure(error) from error


def dtype_of(x: Tensor) -> Any:
    """The type of the elements. MindSpore knows it once it has issued the operation that computes ``x``.

    Raises:
        EarlierFailure: That operation cannot run.
    """
    try:
        return x.dtype
    except Exception as error:
        raise EarlierFailure(error) from error


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
"""Makes a row of the page from the tensor's elements, on the host, or several rows."""

Place = int | range
"""A row of a page, or several."""


@dataclass(frozen=True, slots=True)
class _PageEntry:
    tensor: Tensor
    read: Read


class MindSporeDevicePage:
    """A page whose rows are kept as small tensors on the device."""

    def __init__(self, rows: int, columns: int = len(COLUMNS)) -> None:
        self.shape = rows, columns
        self._written: dict[Place, _PageEntry] = {}

    def write(self, row: Place, tensor: Tensor, read: Read) -> None:
        """Set a row, or several, to ``read(tensor)``, evaluated later. ``tensor`` has one dimension and must not change. Does
        not wait.
        """
        self._written[row] = _PageEntry(tensor, read)

    def address(self, row: int) -> int:
        del row
        return 0

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

    def __init__(self, written: dict[Place, _PageEntry]) -> None:
        by_dtype: dict[object, dict[Place, _PageEntry]] = {}
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


def _sources(group: dict[Place, _PageEntry]) -> list[tuple[Place, int, Read]]:
    """Rows and sizes without the tensors, so that their memory is free as soon as they are joined."""
    return [(row, one.tensor.size, one.read) for row, one in group.items()]


# --- Operations of the monitor must not be recorded or cast, as MindSpore does with operations during a network's call.

try:
    from mindspore.graph.api import _pynative_executor as executor
except ImportError:  # before 2.9
    from mindspore.common.api import _pynative_executor as executor


def finish_all() -> None:
    """Wait for all operations.

    Raises:
        EarlierFailure: One of them has failed.
    """
    try:
        executor.sync()
    except Exception as error:
        raise EarlierFailure(error) from error


@contextmanager
def _unrecorded(precision: MixedPrecisionType) -> Iterator[None]:
    """Operations inside are not recorded by a graph, and are cast to a precision in place of the one of the cell."""
    recorded = executor.enable_grad()
    executor.set_mixed_precision_type(precision)
    try:
        executor.set_enable_grad(False)
        yield
    finally:
        executor.set_enable_grad(recorded)  # first: a signal handler may raise in the next call, and training needs gradients
        executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)


def beneath() -> AbstractContextManager[None]:
    """Operations inside are not recorded by a graph, and run in float32 whatever precision a cell casts its operations to.

    ``Cell.to_float`` also affects every operation in the cell's hooks: a sum of squares would be computed in float16. The
    request for float32 also turns float64 into float32.
    """
    return _unrecorded(MixedPrecisionType.FP32)


def as_given() -> AbstractContextManager[None]:
    """Operations inside are not recorded by a graph, and take tensors in their own dtype."""
    return _unrecorded(MixedPrecisionType.NOTSET)


# --- Arithmetic on MindSpore's tensors: with numpy on the host, with MindSpore's operations on a device.
#
# On the host, MindSpore's operations take ten to a thousand times as long as numpy's on the same memory, and some have
# no host kernel. On a device, numpy would have to wait for the numbers. So each computation is written once, with the
# operations below, and runs in either.
#
# On the host, numbers are float32, or float64 if the tensor is; ``wide`` numbers are float64. Devices need not have
# float64, so everything is float32 there.

Array = Any
"""An operand: a numpy array or a tensor."""

Number = Any
"""A float on the host; on a device, a tensor without dimensions that may not be computed yet."""


class Arithmetic(Protocol):
    """Operations with numpy's names and meanings.

    Attributes:
        may_look: Whether reading a number is free. On a device it would wait for all earlier operations.
        block: Elements to work on at once: on the host as many as fit the cache, on a device enough to fill it.
    """

    may_look: bool
    block: int

    def of(self, x: Tensor) -> Array:
        """The elements of a tensor, read-only. On the host it waits for earlier operations.

        Raises:
            EarlierFailure: An earlier operation has failed.
        """

    def constant(self, x: np.ndarray[Any, Any]) -> Array:
        """A host array as an operand, float32."""

    def floats(self, x: Array) -> Array:
        """The elements in float32 or wider."""

    def wide(self, x: Array) -> Array:
        """The elements in the precision used for large sums."""

    def rounded(self, x: Array, dtype: Any) -> Array:
        """``floats`` after rounding to one of MindSpore's dtypes."""

    def permute(self, x: Array, places: Sequence[int]) -> Array: ...
    def part(self, x: Array, dim: int, start: int, length: int) -> Array: ...
    def take(self, x: Array, dim: int, places: Sequence[int]) -> Array: ...
    def column(self, x: Array) -> Array:
        """A vector as a column, shape ``(size, 1)``."""

    def rows(self, x: Array, shape: Sequence[int]) -> Iterator[Array]:
        """The rows of a matrix, in groups of the size of a block.

        Args:
            shape: The shape of the matrix. Asking a reshaped tensor for its shape would wait until MindSpore has dispatched all
                earlier operations.
        """

    def stack(self, parts: Sequence[Array]) -> Array:
        """The parts along a new first dimension."""

    def swapped(self, x: Array) -> Array:
        """The array with its last two dimensions exchanged."""

    def matmul(self, a: Array, b: Array) -> Array: ...
    def exp(self, x: Array) -> Array: ...
    def log(self, x: Array) -> Array: ...
    def sqrt(self, x: Array) -> Array: ...
    def abs(self, x: Array) -> Array: ...
    def maximum(self, a: Array, b: Array) -> Array: ...
    def at_least(self, x: Array, least: float) -> Array:
        """The elements, raised to ``least`` if they are below. NaN stays NaN."""

    def where(self, which: Array, a: Array | float, b: Array | float) -> Array: ...
    def sum(self, x: Array, dim: int | None = None) -> Array:
        """The sum over all dimensions, in ``wide`` precision; or over one, which stays with length 1."""

    def amax(self, x: Array, dim: int | None = None) -> Array:
        """The maximum of all elements, or over one dimension, which stays with length 1. NaN need not propagate."""

    def every(self, x: Array, distance: int) -> Array:
        """Every n-th of the first dimension, beginning with the first."""

    def largest(self, x: Array, number: int) -> Array:
        """The largest elements of a vector, in descending order."""

    def joined(self, parts: Sequence[Array]) -> Array:
        """Vectors, one after the other."""

    def number(self, x: Array) -> Number:
        """A result of one element as a ``Number``."""


class OnHost:
    """Arithmetic with numpy, in the memory that MindSpore shares with it."""

    may_look = True
    block = 1 << 16

    def of(self, x: Tensor) -> Array:
        return on_host(x)

    def constant(self, x: np.ndarray[Any, Any]) -> Array:
        return x.astype(np.float32)

    def floats(self, x: Array) -> Array:
        return as_reals(x)

    def wide(self, x: Array) -> Array:
        return np.asarray(x).astype(np.float64, copy=False)

    def rounded(self, x: Array, dtype: Any) -> Array:
        if dtype == ms.bfloat16:
            return rounded_to_bfloat16(as_reals(x))
        return as_reals(as_reals(x).astype(ms.dtype_to_nptype(dtype), copy=False))

    def permute(self, x: Array, places: Sequence[int]) -> Array:
        return x.transpose(places)

    def part(self, x: Array, dim: int, start: int, length: int) -> Array:
        return x[(*(slice(None) for _ in range(dim)), slice(start, start + length))]

    def take(self, x: Array, dim: int, places: Sequence[int]) -> Array:
        return x.take(places, axis=dim)

    def column(self, x: Array) -> Array:
        return x[:, None]

    def rows(self, x: Array, shape: Sequence[int]) -> Iterator[Array]:
        yield from _cut(self, x, shape)

    def stack(self, parts: Sequence[Array]) -> Array:
        return np.stack(parts)

    def swapped(self, x: Array) -> Array:
        return x.swapaxes(-1, -2)

    def matmul(self, a: Array, b: Array) -> Array:
        return a @ b

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def log(self, x: Array) -> Array:
        return np.log(x)

    def sqrt(self, x: Array) -> Array:
        return np.sqrt(x)

    def abs(self, x: Array) -> Array:
        return np.abs(x)

    def maximum(self, a: Array, b: Array) -> Array:
        return np.maximum(a, b)

    def at_least(self, x: Array, least: float) -> Array:
        return np.maximum(x, least)

    def where(self, which: Array, a: Array | float, b: Array | float) -> Array:
        return np.where(which, a, b)

    def sum(self, x: Array, dim: int | None = None) -> Array:
        return np.sum(x, dtype=np.float64) if dim is None else np.sum(x, axis=dim, keepdims=True)

    def amax(self, x: Array, dim: int | None = None) -> Array:
        return np.max(x) if dim is None else np.max(x, axis=dim, keepdims=True)

    def every(self, x: Array, distance: int) -> Array:
        return x[::distance]

    def largest(self, x: Array, number: int) -> Array:
        return np.sort(x)[::-1][:number]

    def joined(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def number(self, x: Array) -> Number:
        return float(x)


class OnDevice:
    """Arithmetic with operations that MindSpore has on every device and that do not wait for it.

    Each operation also has a kernel on the host, where the tests run. So ``mint.stack``, ``argmax``, ``arange``, ``mv`` and
    ``norm`` are not used.
    """

    may_look = False
    block = 1 << 22

    def of(self, x: Tensor) -> Array:
        return x

    def constant(self, x: np.ndarray[Any, Any]) -> Array:
        return Tensor(x.astype(np.float32))

    def floats(self, x: Array) -> Array:
        return x if x.dtype == ms.float32 else x.to(ms.float32)

    def wide(self, x: Array) -> Array:
        return self.floats(x)

    def rounded(self, x: Array, dtype: Any) -> Array:
        return self.floats(x if x.dtype == dtype else x.to(dtype))

    def permute(self, x: Array, places: Sequence[int]) -> Array:
        return mint.permute(x, tuple(places))

    def part(self, x: Array, dim: int, start: int, length: int) -> Array:
        return mint.narrow(x, dim, start, length)

    def take(self, x: Array, dim: int, places: Sequence[int]) -> Array:
        parts = [mint.narrow(x, dim, place, 1) for place in places]
        return parts[0] if len(parts) == 1 else mint.cat(parts, dim)

    def column(self, x: Array) -> Array:
        return mint.unsqueeze(x, 1)

    def rows(self, x: Array, shape: Sequence[int]) -> Iterator[Array]:
        yield from _cut(self, x, shape)

    def stack(self, parts: Sequence[Array]) -> Array:
        return mint.cat([mint.unsqueeze(one, 0) for one in parts])

    def swapped(self, x: Array) -> Array:
        return mint.transpose(x, -1, -2)

    def matmul(self, a: Array, b: Array) -> Array:
        return mint.matmul(a, b)

    def exp(self, x: Array) -> Array:
        return mint.exp(x)

    def log(self, x: Array) -> Array:
        return mint.log(x)

    def sqrt(self, x: Array) -> Array:
        return mint.sqrt(x)

    def abs(self, x: Array) -> Array:
        return mint.abs(x)

    def maximum(self, a: Array, b: Array) -> Array:
        return mint.maximum(a, b)

    def at_least(self, x: Array, least: float) -> Array:
        return mint.where(mint.lt(x, least), least, x)  # ``clamp`` would turn NaN into a number

    def where(self, which: Array, a: Array | float, b: Array | float) -> Array:
        return mint.where(which, a, b)

    def sum(self, x: Array, dim: int | None = None) -> Array:
        return mint.sum(x) if dim is None else mint.sum(x, dim, True)

    def amax(self, x: Array, dim: int | None = None) -> Array:
        return mint.amax(x) if dim is None else mint.amax(x, dim, True)

    def every(self, x: Array, distance: int) -> Array:
        return x[::distance]

    def largest(self, x: Array, number: int) -> Array:
        return ms.ops.topk(x, number)[0]  # sorting converts to float16 on some devices

    def joined(self, parts: Sequence[Array]) -> Array:
        return mint.cat(list(parts))

    def number(self, x: Array) -> Number:
        return x


HOST: Final = OnHost()
DEVICE: Final = OnDevice()


@cache
def on_the_host() -> bool:
    """Whether tensors are in host memory. Cached: a tensor's own device is known only after waiting for the tensor."""
    return bool(ms.get_context("device_target") == "CPU")


@contextmanager
def computing() -> Iterator[Arithmetic]:
    """The arithmetic of this process, with training unaffected: numpy does not warn, MindSpore does not record or cast."""
    if on_the_host():
        with np.errstate(all="ignore"):
            yield HOST
    else:
        with beneath():
            yield DEVICE


def _cut(arithmetic: Arithmetic, x: Array, shape: Sequence[int]) -> Iterator[Array]:
    rows, columns = shape
    at_once = max(1, arithmetic.block // max(1, columns))
    if 0 < rows <= at_once:
        yield x
        return
    for start in range(0, rows, at_once):
        yield arithmetic.part(x, 0, start, min(at_once, rows - start))
