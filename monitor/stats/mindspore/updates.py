"""Numbers of several MindSpore tensors, such as sign agreement and update norms: by numpy on the host, without waits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from numpy.typing import NDArray

from monitor.stats.histograms import UNIT_BINS
from monitor.stats.host.array_kernel import Chunks, NumpyKernel, Raw, Reals
from monitor.stats.mindspore.kernels import union_of_unscaled, unscaled_part
from monitor.stats.mindspore.tensors import Array, Number, computing
from monitor.stats.ops import Epsilon
from monitor.stats.partials import COLUMNS, COUNT, EMPTY, NANS, NEGINFS, POSINFS, SMALLS, SUM, SUMSQ, Floats, union

PIECE: Final = 1 << 22
"""Elements of a piece on a device: enough to fill it, and few enough for exact counts in float32."""

_HALF: Final = UNIT_BINS // 2

Numbers = Mapping[int, Number]
"""Numbers by column of partials."""

TensorSnapshot = Any
"""A copy of a tensor: an array on the host, a tensor on a device."""


def snapshot(x: Tensor) -> TensorSnapshot:
    """A copy of a tensor's current elements, to be compared with later.

    Raises:
        EarlierFailure: An earlier operation has failed.
    """
    with computing() as on:
        return np.array(on.of(x)) if on.may_look else mint.mul(x, 1.0)


def agreement(gradient: Tensor, momentum: Tensor, *, uphill: bool = False) -> Number:
    """The number of elements with equal signs in tensors of one shape. Two zeros agree; NaN agrees with nothing.

    Args:
        uphill: The optimizer maximizes, so it uses the negated gradient.

    Raises:
        EarlierFailure: An earlier operation has failed.
    """
    with computing() as on:
        if on.may_look:
            return sum(_agreeing(g, m, uphill=uphill) for g, m in _chunks(on.of(gradient), on.of(momentum)))
        total: Any = Tensor(0, ms.int64)
        for g, m in _pieces(gradient, momentum):
            sign = mint.sign(mint.neg(g) if uphill else g)
            alike = mint.logical_and(mint.eq(sign, mint.sign(m)), mint.logical_and(mint.eq(g, g), mint.eq(m, m)))
            total = total + mint.sum(alike, dtype=ms.float32).to(ms.int64)
        return total


def _agreeing(g: Reals, m: Reals, *, uphill: bool) -> int:
    # numpy vectorizes comparisons, but not ``sign``.
    up, down = (m < 0, m > 0) if uphill else (m > 0, m < 0)
    differing = np.count_nonzero(((g > 0) != up) | ((g < 0) != down) | (g != g) | (m != m))
    return len(g) - int(differing)


def squares_of_update(after: Tensor, before: TensorSnapshot) -> tuple[Number, Number]:
    """The squares of the norms of ``after - before`` and of ``before``, a ``snapshot`` of the same shape.

    On a device they are float32, which limits norms to between 1e-19 and 1e19.

    Raises:
        EarlierFailure: An earlier operation has failed.
    """
    update: Any = 0.0
    weight: Any = 0.0
    with computing() as on:
        if not on.may_look:
            for a, b in _pieces(after, before):
                difference = mint.sub(a, b)
                update, weight = (total + mint.sum(mint.mul(x, x)) for total, x in ((update, difference), (weight, b)))
            return update, weight
        for a, b in _chunks(on.of(after), before):
            wide = b.astype(np.float64)
            weight += float(np.dot(wide, wide))
            np.subtract(a, wide, out=wide)
            update += float(np.dot(wide, wide))
        return update, weight


TINY: Final = float(np.finfo(np.float32).tiny)


def swallowed(after: Tensor, before: TensorSnapshot, due: Tensor, rate: Any) -> dict[int, Number]:
    """How many elements have an update, and how many of these have the same value after the step as before.

    Args:
        before: A ``snapshot`` of the same shape.
        due: Not zero where an element has an update; of the same shape.
        rate: The learning rate, a number or a tensor; None if it is unknown. With 0 no element has an update.

    Returns:
        Numbers by column of partials, as the kind ``optimizer_health`` has them.

    Raises:
        EarlierFailure: An earlier operation has failed.
    """
    updated: Any = 0.0
    same: Any = 0.0
    with computing() as on:
        if on.may_look:
            if rate is not None and not float(on.of(rate) if isinstance(rate, Tensor) else rate):
                return {NEGINFS: 0.0, SMALLS: 0.0}
            for a, b, g in _chunks(on.of(after), before, on.of(due)):
                has_update = g != 0
                updated += float(np.count_nonzero(has_update))
                same += float(np.count_nonzero((a == b) & has_update))
            return {NEGINFS: updated, SMALLS: same}
        for a, b, g in _pieces(after, before, due):
            there = mint.ne(g, 0.0)
            updated = updated + mint.sum(there, dtype=ms.float32)
            same = same + mint.sum(mint.logical_and(there, mint.eq(a, b)), dtype=ms.float32)
        steps = mint.ne(rate, 0.0).to(ms.float32).reshape(()) if isinstance(rate, Tensor) else float(rate is None or rate != 0)
        return {NEGINFS: updated * steps, SMALLS: same * steps}


def staleness(
    gradient: Tensor, square: Tensor, bias: Number, lowest: Number, weight: TensorSnapshot, divisor: float, decay: Number
) -> dict[int, Number]:
    """The sum of g² / v with the second moment v without its bias, and how many elements have a ``square`` below ``lowest``.

    Args:
        square: The second moment after the step.
        bias: The divisor that takes the bias away.
        lowest: A smaller ``square`` counts as this.
        weight: A ``snapshot`` of the weight before the step.
        divisor: The loss scale of ``gradient``.
        decay: The multiple of the weight that belongs to the gradient.

    Returns:
        Numbers by column of partials, as the kind ``optimizer_health`` has them. No element has a known second moment if that
        of any element is too small for float32, and its gradient is not 0.

    Raises:
        EarlierFailure: An earlier operation has failed.
    """
    total: Any = 0.0
    below: Any = 0.0
    lost: Any = 0.0
    with computing() as on:
        if on.may_look:
            given = bias, lowest, decay
            unbiased, least, added = (float(on.of(one)) if isinstance(one, Tensor) else one for one in given)
            for g, v, w in _chunks(on.of(gradient), on.of(square), weight):
                used = g.astype(np.float64) / divisor + added * w
                below += float(np.count_nonzero(v < least))
                lost += float(np.count_nonzero((np.maximum(v, least) < TINY) & (used != 0)))
                total += float(np.sum(used * used / np.maximum(v, max(least, TINY))))
            return {SUM: total * unbiased, SUMSQ: 0.0 if lost else float(square.size), POSINFS: below}
        for g, v, w in _pieces(gradient, square, weight):
            used, is_below = mint.add(g / divisor, w * decay), mint.lt(v, lowest)
            below = below + mint.sum(is_below, dtype=ms.float32)
            divisors = mint.where(is_below, lowest, v)
            vanished = mint.logical_and(mint.lt(divisors, TINY), mint.ne(used, 0.0))
            lost = lost + mint.sum(vanished, dtype=ms.float32)
            total = total + mint.sum(mint.mul(used, used) / mint.clamp(divisors, TINY))
        return {SUM: total * bias, SUMSQ: mint.eq(lost, 0.0).to(ms.float32) * float(square.size), POSINFS: below}


class MindSporeSigned(Protocol):
    """Partials and a histogram of a tensor given in chunks, of signed numbers that are mostly between -1 and 1.

    Bins as in ``UNIT_UPPER``.
    """

    def add(self, chunk: Array) -> None:
        """Add a chunk, an array or tensor of one dimension."""

    def numbers(self) -> Numbers:
        """The partials of all chunks."""

    def histogram(self) -> Any:
        """Elements in each bin, shape ``(UNIT_BINS + 2,)``: int64 on the host, float32 on a device."""


def adam_vectors(
    mean: Tensor,
    square: Tensor,
    mean_correction: Number,
    square_correction: Number,
    adam_eps: float,
    eps: float,
    *,
    eps_on_root: bool = False,
    higher: bool = False,
) -> tuple[MindSporeSigned, MindSporeSigned]:
    """Adam's update directions: ``m / (sqrt(v) + adam_eps)`` and ``m / sqrt(v)``, which is 0 where both are 0.

    Args:
        eps_on_root: ``adam_eps`` is added to the root of ``square`` before the bias correction.
        mean_correction: The divisor that corrects the bias of ``mean``.
        square_correction: The divisor for ``square``, which has the shape of ``mean``.
        eps: Magnitudes below this count as zeros.
        higher: Whether to measure the higher moments (``partials``).

    Raises:
        EarlierFailure: An earlier operation has failed.
    """
    with computing() as on:
        if on.may_look:
            given = mean_correction, square_correction
            corrections = [float(on.of(one)) if isinstance(one, Tensor) else one for one in given]
            added = adam_eps / math.sqrt(corrections[1]) if eps_on_root else adam_eps
            return _vectors_seen(on.of(mean), on.of(square), corrections, added, NumpyKernel(eps, higher=higher))
        updates, ratios = (MindSporeDeviceSigned(eps, higher=higher) for _ in range(2))
        there: Number = adam_eps * (square_correction**-0.5) if eps_on_root else adam_eps
        for m, v in _pieces(mean, square):
            m, root = m / mean_correction, mint.sqrt(v / square_correction)
            updates.add(m / (root + there))
            neither = mint.logical_and(mint.eq(m, 0.0), mint.eq(root, 0.0))
            ratios.add(mint.where(neither, 0.0, m / root))
        return updates, ratios


def _vectors_seen(
    mean: Raw, square: Raw, corrections: list[float], adam_eps: float, kernel: NumpyKernel
) -> tuple[MindSporeSigned, MindSporeSigned]:
    updates, ratios = MindSporeHostSigned(kernel), MindSporeHostSigned(kernel)
    for given_mean, given_square in _chunks(mean, square):
        m = given_mean / given_mean.dtype.type(corrections[0])
        root = given_square / given_square.dtype.type(corrections[1])
        np.sqrt(root, out=root)
        vector = root + root.dtype.type(adam_eps)
        updates.add(np.divide(m, vector, out=vector))
        np.divide(m, root, out=vector)
        if not root.all():
            vector[(m == 0) & (root == 0)] = 0.0
        ratios.add(vector)
    return updates, ratios


class MindSporeHostSigned:
    """The version for the host, where reading a value is free."""

    def __init__(self, kernel: NumpyKernel) -> None:
        self._kernel = kernel
        self._rows: list[Floats] = []
        self._counts = np.zeros(UNIT_BINS + 2, dtype=np.int64)

    def add(self, chunk: Reals) -> None:
        row = np.asarray(self._kernel.reduce(chunk))
        self._rows.append(row)
        finite = chunk if not row[NANS : NEGINFS + 1].any() else chunk[np.isfinite(chunk)]
        # Multiplying by a power of two does not round, so no element changes its bin.
        bins = np.ceil(finite * finite.dtype.type(_HALF))
        np.clip(bins, -_HALF, _HALF + 1, out=bins)
        bins += _HALF
        self._counts += np.bincount(bins.astype(np.int64), minlength=UNIT_BINS + 2)

    def numbers(self) -> Numbers:
        row = union(np.array(self._rows)) if self._rows else np.array(EMPTY)
        return {column: float(row[column]) for column in range(COUNT, len(COLUMNS))}

    def histogram(self) -> NDArray[np.int64]:
        return self._counts


class MindSporeDeviceSigned:
    """The version for any device, which reads no value: each number is a float32 tensor.

    Such numbers need no scaling before squaring. Counting into bins waits until MindSpore has dispatched all earlier
    operations, but not for the device: no other counting operation has a kernel on the host.
    """

    def __init__(self, eps: float, *, higher: bool = False) -> None:
        self._higher = higher
        self._bound = Tensor(Epsilon.of(eps, np.float32).bound, ms.float32)
        self._counts: Any = mint.zeros(UNIT_BINS + 2, dtype=ms.float32)
        self._parts: list[Tensor] = []
        self._elements = 0

    def add(self, chunk: Tensor) -> None:
        finite = mint.isfinite(chunk)
        kept_ones = mint.where(finite, chunk, 0.0)
        bins = mint.clamp(mint.ceil(mint.mul(kept_ones, float(_HALF))), -_HALF, _HALF + 1).to(ms.int32) + _HALF
        self._counts = self._counts + ops.unsorted_segment_sum(finite.to(ms.float32), bins, UNIT_BINS + 2)
        self._elements += chunk.size
        self._parts.append(unscaled_part(chunk, kept_ones, finite, self._bound, higher=self._higher))

    def numbers(self) -> Numbers:
        return union_of_unscaled(self._parts, self._elements, higher=self._higher)

    def histogram(self) -> Tensor:
        return self._counts


def _chunks(*arrays: Raw) -> Iterator[tuple[Reals, ...]]:
    """Corresponding elements of arrays of one shape, a chunk of each at a time."""
    yield from zip(*(Chunks().of(one) for one in arrays), strict=True)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding elements of tensors on a device, in float32, a piece of each at a time."""
    size = tensors[0].size
    if not size:
        return
    flat = [one.reshape(-1) for one in tensors]
    pieces = [(one,) if size <= PIECE else mint.split(one, PIECE) for one in flat]
    for some in zip(*pieces, strict=True):
        yield tuple(one if one.dtype == ms.float32 else one.to(ms.float32) for one in some)
