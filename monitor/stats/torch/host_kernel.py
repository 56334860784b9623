"""The kernel for torch tensors in host memory: the native kernel if it was built, else the numpy kernel, a piece at a time.

Small tensors are copied together and reduced at once.
"""

from __future__ import annotations

import threading
from ctypes import string_at
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.stats import partials
from monitor.stats.histograms import BINS, Counts
from monitor.stats.host import array_kernel
from monitor.stats.host.array_kernel import NativeKernel, NumpyKernel, Row, native_kernel, word_sums
from monitor.stats.ops import Epsilon
from monitor.stats.partials import Floats, Words
from monitor.stats.torch.tensors import (
    BYPASSED_KEYS,
    Readable,
    address_of,
    is_unbroken,
    magnitudes_of,
    pieces,
    plain_address,
    readable,
    words_in,
    working_precision,
)

PIECE: Final = 262_144
"""Elements that are copied or converted at a time; they stay in the cache."""

_FORMATS: Final = {
    torch.float32: array_kernel.FLOAT32,
    torch.float64: array_kernel.FLOAT64,
    torch.bfloat16: array_kernel.BFLOAT16,
    torch.float16: array_kernel.FLOAT16,
    torch.int64: array_kernel.INT64,
}


class _PieceBuffers(threading.local):
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
        higher, check_sums: Whether to measure the higher moments, and the check sums (``partials``). Tensors that wait to be
            reduced together get no check sums, nor do those that repeat elements.

    Attributes:
        plain: The native kernel for the elements at a ``plain_address``; None where it is not there. Where it is most tensors
            cost one call, and nothing is gained by reducing small ones together.
    """

    def __init__(self, eps: float, *, with_native: bool = True, higher: bool = False, check_sums: bool = False) -> None:
        self.higher, self._check_sums = higher, check_sums
        native = native_kernel(eps, higher=higher, check_sums=check_sums) if with_native else None
        self._native: NativeKernel | None = native
        self.plain = None if self._native is None else self._native.of(array_kernel.FLOAT32)
        self._numpy = NumpyKernel(eps, with_native=with_native, higher=higher)
        self._staging = _PieceBuffers()
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
        rows, hold = reduce_segments(numbers, starts, lengths, self._bound, np.empty(len(numbers)), higher=self.higher)
        for place in np.flatnonzero(~hold).tolist():
            rows[place] = self.reduce(torch.from_numpy(numbers[starts[place] : starts[place] + lengths[place]]))
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
            rows.append(self._zeros(source.implicit_zeros))
        if source.repeats > 1:
            rows = [_repeated(row, source.repeats) for row in rows]
        if len(rows) == 1:
            return rows[0]
        return partials.union(np.array(rows), words_in(x.dtype)) if rows else (1.0, *partials.EMPTY[1:])

    def _rows(self, x: Tensor) -> list[Row | Floats]:
        """Rows whose union is the row of ``x``."""
        whole = self._natively(x) if x.numel() and is_unbroken(x) else None
        return [self._piece(piece) for piece in pieces(x, PIECE)] if whole is None else [whole]

    def _piece(self, piece: Tensor) -> Row | Floats:
        row = self._natively(piece) if piece.is_contiguous() else None
        if row is None:
            row = np.array(self._numpy.reduce(self._staging.of(piece)))
            if self._check_sums:
                row[partials.BITS_LOW :] = partials.check_columns(_check_sums(piece))[:, 0]
        return row

    def _natively(self, x: Tensor) -> Floats | None:
        """The row of elements without gaps; None if the native kernel cannot compute it or was not built."""
        form = _FORMATS.get(x.dtype)
        if self._native is None or form is None or not (address := address_of(x)):
            return None
        page: Floats = np.empty((1, len(partials.COLUMNS)))
        return page[0] if self._native.reduce_into(address, x.numel(), form, page, 0) else None

    def _zeros(self, count: int) -> Floats:
        """The row of that many zeros."""
        row = np.zeros(len(partials.COLUMNS))
        row[partials.WRITES], row[partials.COUNT], row[partials.SMALLS] = 1.0, count, count * self._zero_is_small
        if self._check_sums:
            row[partials.BITS_LOW :] = partials.check_columns(np.array([[count], [0]], dtype=np.uint64))[:, 0]
        return row


def _check_sums(piece: Tensor) -> Words:
    """``bits`` and ``places`` (``partials``) of a piece, shape ``(2, 1)``."""
    elements = piece.contiguous().as_strided((piece.numel(),), (1,))
    words = np.frombuffer(elements.view(torch.uint8).numpy().tobytes(), dtype=f"u{min(piece.itemsize, 4)}")
    return word_sums(words, piece.numel())[:, np.newaxis]


def _repeated(row: Row | Floats, times: int) -> Floats:
    """The row of a tensor with every element repeated ``times`` times: counts and sums multiply, extremes and exponent stay."""
    repeated = np.array(row)
    repeated[partials.COUNT : partials.MIN] *= times
    repeated[[column for column, _ in partials.SCALED]] *= times
    repeated[partials.BITS_LOW :] = 0.0
    return repeated


# --- Histograms of magnitudes, from the bits (``host.array_kernel``).


def count_magnitudes(x: Tensor) -> Counts | None:
    """The histogram of a tensor on the host, shape ``(BINS,)``; None if it has no data to read."""
    with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS):
        source = readable(x)
        return None if source is None else _of_source(source)


def _of_source(source: Readable) -> Counts:
    x = source.dense
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    whole = _natively(x) if x.numel() and is_unbroken(x) else None
    counts = np.zeros(BINS, dtype=np.int64) if whole is None else whole
    for piece in pieces(x, PIECE) if whole is None else ():
        counts += _of_piece(piece)
    counts *= source.repeats
    counts[0] += source.implicit_zeros
    return counts


def _natively(x: Tensor) -> Counts | None:
    """The histogram of elements without gaps; None where the native kernel cannot compute it or is not used."""
    form, address = _FORMATS.get(x.dtype), address_of(x)
    return array_kernel.count_natively(address, x.numel(), form) if form is not None and address else None


def _of_piece(piece: Tensor) -> Counts:
    """The histogram of a copy: the bits are overwritten, and torch cannot resize a storage that numpy has a view of."""
    exact = magnitudes_of(piece) if piece.is_complex() or working_precision(piece.dtype) is torch.float64 else piece
    single = torch.empty(exact.shape, dtype=torch.float32, device="cpu").copy_(exact).view(-1)
    counts = array_kernel.of_singles(single.numpy(), _counted)
    if exact.dtype is torch.float64:
        lost = int(((exact != 0) & (single == 0)).sum())
        array_kernel.restore_rounded(counts, lost, int((torch.isfinite(exact) & torch.isinf(single)).sum()))
    return counts


def _counted(bins: NDArray[np.int32]) -> Counts:
    """Count with torch, whose ``bincount`` accepts int32."""
    counts: Counts = torch.bincount(torch.from_numpy(bins), minlength=array_kernel.EXPONENT_BINS).numpy()
    return counts


# --- Many small tensors, reduced at once: biases, norms, their gradients and moments.
#
# Reducing a thousand elements takes less time than the call itself, and a model has hundreds of such tensors. So they
# are copied end to end into a buffer, and each statistic of all of them is one segmented reduction in float64, where
# squares of float32 neither overflow nor vanish.

SMALL: Final = 1024
"""Greatest number of elements of a tensor that is cheaper to reduce together with others."""

BATCH: Final = 98_304
"""Elements of a buffer: so few that the reduction's data stay in the second-level cache."""

SMALL_BYTES: Final = 4 * SMALL
BATCH_BYTES: Final = 4 * BATCH

SegmentRows = tuple[Floats, NDArray[np.bool_]]
"""Rows, shape ``(tensors, len(COLUMNS))``, and which of them are valid; the others must be reduced one by one."""


class Staging:
    """Copies of small tensors that wait to be reduced together.

    A copy is a ``bytes`` of the tensor's memory: during communication, with cold caches, it costs a fifth of ``clone``. It is
    never a numpy view of the tensor: torch could no longer resize the storage, as FSDP does.
    """

    def __init__(self) -> None:
        self._copies: list[bytes] = []
        self._bytes = 0

    def __len__(self) -> int:
        """The number of waiting tensors."""
        return len(self._copies)

    @property
    def is_half_full(self) -> bool:
        return 2 * self._bytes > BATCH_BYTES

    def add(self, x: Tensor) -> bool:
        """Copy ``x``. False, without a copy, if it is not small, not plain, not in memory, or if there is no room."""
        size = 4 * x.numel()
        if size > SMALL_BYTES or self._bytes + size > BATCH_BYTES or not (address := plain_address(x)):
            return False
        self._copies.append(string_at(address, size))
        self._bytes += size
        return True

    def cut(self, tensors: int) -> None:
        """Drop all but the first ``tensors`` copies."""
        self._bytes -= sum(map(len, self._copies[tensors:]))
        del self._copies[tensors:]

    def take(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """All copied elements end to end, and the number of elements of each tensor. Empties the staging."""
        lengths = np.array([len(copy) // 4 for copy in self._copies], dtype=np.int64)
        numbers = np.frombuffer(bytearray().join(self._copies), dtype=np.float32)  # torch warns of memory that is read-only
        self.cut(0)
        return numbers, lengths


def reduce_segments(
    narrow: NDArray[np.float32],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    bound: float,
    wide: Floats,
    *,
    higher: bool = False,
) -> SegmentRows:
    """The rows of tensors that are stored end to end.

    Args:
        narrow: The elements of all tensors.
        starts: The index of each tensor's first element, ascending from 0.
        lengths: The number of elements of each tensor, at least 1.
        bound: ``zeros`` counts ``|x| < bound``, exact for float32.
        wide: Scratch memory of the size of ``narrow``.
        higher: Whether to measure the higher moments (``partials``).

    Returns:
        Rows, shape ``(len(starts), len(COLUMNS))``, and which of them are valid. Rows of tensors with NaN or Inf are not, nor
        those whose mean is so large compared with the spread that even float64 loses the spread.
    """
    np.copyto(wide, narrow)
    rows = np.zeros((len(starts), len(partials.COLUMNS)))
    rows[:, partials.WRITES] = 1.0
    rows[:, partials.COUNT] = lengths
    with np.errstate(invalid="ignore"):
        low = rows[:, partials.MIN] = np.minimum.reduceat(narrow, starts)
        high = rows[:, partials.MAX] = np.maximum.reduceat(narrow, starts)
        below = np.abs(narrow) < np.float32(bound)
        if below.any():
            rows[:, partials.SMALLS] = np.add.reduceat(below, starts, dtype=np.int64)
        total = rows[:, partials.SUM] = np.add.reduceat(wide, starts)
        np.multiply(wide, wide, out=wide)
        sumsq = rows[:, partials.SUMSQ] = np.add.reduceat(wide, starts)
        m2 = rows[:, partials.M2] = sumsq - total * total / lengths
    # For a constant tensor, such as a new norm's weight, the difference is a rounding error: its spread is zero.
    constant = low == high
    rows[constant, partials.M2] = 0.0
    valid = np.isfinite(sumsq) & (constant | (m2 > 1e-8 * sumsq))
    if higher:
        with np.errstate(invalid="ignore"):
            rows[:, partials.M3], rows[:, partials.M4] = _higher_of_segments(narrow, starts, lengths, total, wide)
            rows[:, partials.ABSSUM], rows[:, partials.LEAST] = _magnitudes_of_segments(narrow, starts)
        rows[constant | ~valid, partials.M3 : partials.M4 + 1] = 0.0
    return rows, valid


def _magnitudes_of_segments(narrow: NDArray[np.float32], starts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """``abssum`` and ``least`` (``partials``) of each tensor."""
    magnitudes = np.abs(narrow)
    least = np.minimum.reduceat(np.where(magnitudes > 0, magnitudes, np.float32(np.inf)), starts).astype(np.float64)
    return np.add.reduceat(magnitudes, starts, dtype=np.float64), np.where(np.isfinite(least), least, 0.0)


def _higher_of_segments(
    narrow: NDArray[np.float32], starts: NDArray[np.int64], lengths: NDArray[np.int64], total: Floats, wide: Floats
) -> tuple[Floats, Floats]:
    """Σ (x - mean)³ and Σ (x - mean)⁴ of each tensor. The mean is that of float64, so its rounding does not matter."""
    np.subtract(narrow, np.repeat(total / lengths, lengths), out=wide)
    squares = np.square(wide)
    np.multiply(squares, wide, out=wide)
    m3 = np.add.reduceat(wide, starts)
    return m3, np.add.reduceat(np.square(squares, out=squares), starts)
