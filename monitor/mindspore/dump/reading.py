"""Tensors of MindSpore as a dump keeps them.

On a host memory is shared with numpy: a tensor is reduced where it is caught, which waits for the operation that makes it, and
copied if its elements are wanted. On a device the kernel's rows stay there until the writer asks for them.
"""

from __future__ import annotations

from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from monitor.dump.values import Leaf, Reading
from monitor.failures import EarlierFailure
from monitor.mindspore.tensors import computing
from monitor.stats.host.array_kernel import NumpyKernel, Raw, is_readable
from monitor.stats.mindspore.arithmetic import on_the_host
from monitor.stats.mindspore.kernels import DeviceKernel, combined
from monitor.stats.mindspore.tensors import beneath, has_data, on_host
from monitor.stats.partials import Floats

EPS: Final = 0.0
"""No element is counted as small."""

_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Reader:
    """Reads tensors, each whenever it is met: nothing tells whether one was changed in place since."""

    def __init__(self, *, checksums: bool) -> None:
        self._checksums = checksums
        self._kernel = NumpyKernel(EPS)
        self._there = None if on_the_host() else DeviceKernel(EPS)

    def leaf(self, x: Tensor, file: str | None) -> Leaf:
        described, readable = _described(x)
        if not readable:
            return Leaf(described, None, None, None)
        wanted = file is not None or self._checksums
        array = on_host(x) if wanted or self._there is None else None
        copy = _Copied(array) if wanted and array is not None else None
        return Leaf(described, self._reading(x, array), copy, file)

    def _reading(self, x: Tensor, array: Raw | None) -> Reading | None:
        if array is not None:
            return _HostRow(self._kernel.reduce(array)) if is_readable(array) else None
        assert self._there is not None
        # Beneath, float64 would become float32.
        with computing() if x.dtype == ms.float64 else beneath():
            rows = self._there.reduce(x)
        return None if rows is None else _DeviceRow(rows)


def _described(x: Tensor) -> tuple[dict[str, Any], bool]:
    """And whether there is something to read. Asking may wait, and be told of an error of training's."""
    try:
        return {"type": "mindspore.Tensor", "dtype": str(x.dtype), "shape": list(x.shape)}, has_data(x)
    except Exception as error:
        raise EarlierFailure(error) from error


class _HostRow:
    """What the host's kernel has found."""

    __slots__ = ("_row",)

    def __init__(self, row: Any) -> None:
        self._row = row

    def row(self) -> Floats:
        found: Floats = self._row
        return found


class _DeviceRow:
    """What the device's kernel will have found."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def row(self) -> Floats:
        return combined(on_host(self._rows))


class _Copied:
    """A copy in host memory: an optimizer writes where the tensor stands."""

    def __init__(self, array: Raw) -> None:
        self.dtype = array.dtype.name if array.dtype.kind == "V" else None
        bits = array if self.dtype is None else array.view(_UNSIGNED[array.dtype.itemsize])
        self._copy: NDArray[Any] = bits.copy()
        self.nbytes = self._copy.nbytes

    def array(self) -> NDArray[Any]:
        return self._copy
