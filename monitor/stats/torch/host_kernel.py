"""The kernel for torch tensors in host memory: the native kernel if it was built, else the numpy kernel, a piece at a time."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.stats.host import native
from monitor.stats.host.array_kernel import NumpyKernel, Row
from monitor.stats.host.native import NativeKernel, native_kernel
from monitor.stats.ops import Epsilon
from monitor.stats.partials import COLUMNS, COUNT, EMPTY, MIN, SCALED, SMALLS, WRITES, Floats, union
from monitor.stats.torch.small_tensors import Staging, reduce_segments
from monitor.stats.torch.tensors import (
    BYPASSED_KEYS,
    Readable,
    address_of,
    is_unbroken,
    pieces,
    plain_address,
    readable,
    working_precision,
)

PIECE: Final = 262_144
"""Elements that are copied or converted at a time."""

_FORMATS: Final = {
    torch.float32: native.FLOAT32,
    torch.float64: native.FLOAT64,
    torch.bfloat16: native.BFLOAT16,
    torch.float16: native.FLOAT16,
}


class _Staging(threading.local):
    """Buffers of a piece, a set for each thread: backward hooks may run on the engine's threads."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def of(self, piece: Tensor) -> NDArray[Any]:
        """The elements in their working precision, or the magnitudes of complex elements. Valid until the next call.

        Always a copy, because torch cannot resize a storage that numpy has a view of.
        """
        precision = working_precision(piece.dtype)
        if precision not in self._buffers:
            self._buffers[precision] = torch.empty(PIECE, dtype=precision, device="cpu")
        staged = self._buffers[precision][: piece.numel()].view(piece.shape)
        if piece.is_complex():
            exact = piece.to(torch.complex64) if piece.dtype is torch.complex32 else piece
            torch.abs(exact, out=staged)
        else:
            staged.copy_(piece)
        return staged.view(-1).numpy()


class TorchHostKernel:
    """Reduces host tensors to table rows.

    Args:
        with_native: Whether the native kernel is used where there is one.

    Attributes:
        plain: The native kernel for the elements at a ``plain_address``; None where it is not there. Where it is most tensors
            cost one call, and nothing is gained by reducing small ones together.
    """

    def __init__(self, eps: float, *, with_native: bool = True) -> None:
        self._native: NativeKernel | None = native_kernel(eps) if with_native else None
        self.plain = None if self._native is None else self._native.of(native.FLOAT32)
        self._numpy = NumpyKernel(eps, with_native=with_native)
        self._staging = _Staging()
        self._bound = Epsilon.of(eps, np.float32).bound
        self._zero_is_small = eps > 0

    def reduce_into(self, x: Tensor, page: Floats, row: int) -> bool:
        """Write the partials of ``x`` into ``page[row]``. False if ``x`` has no data to read; the row is then untouched."""
        if self.plain is not None and (address := plain_address(x)):
            return self.plain(address, x.numel(), page, row)
        numbers = self.reduce(x)
        if numbers is None:
            return False
        page[row] = numbers
        return True

    def staged_rows(self, staging: Staging) -> Floats:
        """The rows of the tensors in ``staging``, shape ``(len(staging), len(COLUMNS))``. Empties ``staging``."""
        numbers, lengths = staging.take()
        starts = np.cumsum(lengths) - lengths
        rows, hold = reduce_segments(numbers, starts, lengths, self._bound, np.empty(len(numbers)))
        for place in np.flatnonzero(~hold).tolist():
            rows[place] = self.reduce(torch.tensor(numbers[starts[place] : starts[place] + lengths[place]]))
        return rows

    def reduce(self, x: Tensor) -> Row | Floats | None:
        """The row of ``x``, shape ``(len(COLUMNS),)``; None if it has no data to read."""
        with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS):
            source = readable(x)
            return None if source is None else self._reduce(source)

    def _reduce(self, source: Readable) -> Row | Floats:
        x = source.dense
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        rows = self._rows(x)
        if source.implicit_zeros:
            rows.append(_zeros(source.implicit_zeros, self._zero_is_small))
        if source.repeats > 1:
            rows = [_repeated(row, source.repeats) for row in rows]
        if len(rows) == 1:
            return rows[0]
        return union(np.array(rows)) if rows else (1.0, *EMPTY[1:])

    def _rows(self, x: Tensor) -> list[Row | Floats]:
        """Rows whose union is the row of ``x``."""
        whole = self._natively(x) if x.numel() and is_unbroken(x) else None
        return [self._piece(piece) for piece in pieces(x, PIECE)] if whole is None else [whole]

    def _piece(self, piece: Tensor) -> Row | Floats:
        row = self._natively(piece) if piece.is_contiguous() else None
        return self._numpy.reduce(self._staging.of(piece)) if row is None else row

    def _natively(self, x: Tensor) -> Floats | None:
        """The row of elements without gaps; None if the native kernel cannot compute it or was not built."""
        form = _FORMATS.get(x.dtype)
        if self._native is None or form is None or not (address := address_of(x)):
            return None
        page: Floats = np.empty((1, len(COLUMNS)))
        return page[0] if self._native.reduce_into(address, x.numel(), form, page, 0) else None


def _zeros(count: int, are_small: bool) -> Floats:
    """The row of that many zeros."""
    row = np.zeros(len(COLUMNS))
    row[WRITES], row[COUNT], row[SMALLS] = 1.0, count, count * are_small
    return row


def _repeated(row: Row | Floats, times: int) -> Floats:
    """The row of a tensor with every element repeated ``times`` times: counts and sums multiply, extremes and exponent stay."""
    repeated = np.array(row)
    repeated[COUNT:MIN] *= times
    repeated[[column for column, _ in SCALED]] *= times
    return repeated
