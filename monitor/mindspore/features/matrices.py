"""Computes features of weight matrices and routers in MindSpore, in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from monitor.mindspore.features.attention import OUT_OF_SIGHT
from monitor.mindspore.features.choices import ComputedLogits
from monitor.recording.features import krylov, reading
from monitor.recording.features.krylov import CERTAIN, FARTHEST, MOST, SQUARINGS, UNCERTAIN, UNREAD, Tridiagonal
from monitor.stats.mindspore.tensors import Arithmetic, Array, computing

# --- Matrices, read in blocks of rows: their norms, and the similarity of their rows.


def norms_of(matrix: Tensor) -> reading.Norms:
    """The norms of a floating-point matrix. With NaN or Inf in it, the spectral norm is NaN.

    On a device squares are float32: the Frobenius norm is accurate between 1e-19 and 1e19.

    Raises:
        EarlierFailure: An earlier operation of training has failed.
    """
    if 0 in matrix.shape:
        return reading.Norms(0.0, 0.0, CERTAIN)
    with computing() as on:
        work = _Scaled(on, on.of(matrix), matrix.shape)
        largest, matrices = _lanczos(work) if on.may_look else _lanczos_unread(work)
        spectral = on.where(work.finite, on.sqrt(largest) * work.back, math.nan)
        return reading.Norms(on.number(work.sum_of_squares()), on.number(spectral), on.number(matrices))


def _lanczos(work: _Scaled) -> tuple[float, float]:
    """The largest eigenvalue of A = W^T W, scaled, and its certainty: multiplies until the value is certain."""
    found, vector = Tridiagonal(work.columns), krylov.start(work.columns)
    basis = vector[None]
    while work.finite:
        along, before, rest, length = _beyond(work.on, basis, vector, work.times(vector))
        if found.add(float(along), float(before), float(length)) or len(basis) == min(MOST, work.columns):
            break
        vector = rest / length
        basis = np.concatenate([basis, vector[None]])
    return found.largest, CERTAIN if found.certain or not work.finite else UNCERTAIN


def _lanczos_unread(work: _Scaled) -> tuple[Array, Array]:
    """``_lanczos`` with a fixed number of products, which reads no value from the device."""
    on, products = work.on, min(UNREAD, work.columns)
    vector = on.constant(krylov.start(work.columns))
    basis: Array = 0.0  # full size from the start: a new shape would make MindSpore prepare its operations again
    diagonal, beside = list[Array](), list[Array]()
    for product in range(products):
        basis = on.column(on.constant(np.eye(products)[product])) * vector + basis
        along, before, rest, length = _beyond(on, basis, vector, work.times(vector))
        diagonal.append(along)
        beside.append(on.where(length > krylov.NOISE * before, length, 0.0))
        vector = on.where(beside[-1] > 0, rest / length, 0.0)
    projected = _tridiagonal(on, on.stack(diagonal), on.stack(beside))
    best = _largest_eigenvector(on, projected)
    largest = on.at_least(on.sum(best * on.matmul(projected, best)), 0.0)
    if products == work.columns:
        return largest, on.where(largest >= 0, CERTAIN, CERTAIN)
    certain = _growth(on, projected, beside[-1], largest) * krylov.growth_needed(work.columns) <= largest * krylov.ALLOWED
    return largest, on.where(certain, CERTAIN, on.where(work.finite, UNCERTAIN, CERTAIN))


def _beyond(on: Arithmetic, space: Array, last: Array, vector: Array) -> tuple[Array, Array, Array, Array]:
    """Subtract, twice, a vector's projection onto the rows of ``space``, of which ``last`` is the last.

    Returns:
        The component along ``last``, the length after the first subtraction, the remainder, and its length.
    """
    rest = vector - on.matmul(on.matmul(space, vector), space)
    before = _norm(on, rest)
    rest = rest - on.matmul(on.matmul(space, rest), space)
    return on.floats(on.sum(last * vector)), before, rest, _norm(on, rest)


def _tridiagonal(on: Arithmetic, diagonal: Array, beside: Array) -> Array:
    size = diagonal.shape[0]
    lower = on.constant(np.eye(size, k=-1)) * beside  # column j holds what lies below the diagonal there
    return on.constant(np.eye(size)) * diagonal + lower + on.swapped(lower)


def _growth(on: Arithmetic, projected: Array, beyond: Array, largest: Array) -> Array:
    """Evaluate the polynomial of ``Tridiagonal`` from a corner of the resolvent, ``Σ_j (T / s)^j``, whose terms are positive.

    Returns:
        ``s / p(s)`` for s, the largest allowed eigenvalue.
    """
    size = projected.shape[0]
    power = projected / on.where(largest > 0, largest * krylov.ALLOWED, 1.0)
    total = on.constant(np.eye(size)) + power
    for _ in range(SQUARINGS):
        power = on.matmul(power, power)
        total = total + on.matmul(total, power)
    corner = np.zeros((size, size))
    corner[0, -1] = 1.0
    return beyond * on.floats(on.sum(total * on.constant(corner)))


def _norm(on: Arithmetic, vector: Array) -> Array:
    return on.sqrt(on.floats(on.sum(vector * vector)))


def _largest_eigenvector(on: Arithmetic, projected: Array) -> Array:
    """The eigenvector of a small symmetric matrix without negative eigenvalues, by squaring it. Waits for no device.

    All columns of the power are then multiples of the eigenvector. The column with the greatest diagonal element is taken, or
    the first of several.
    """
    size = projected.shape[0]
    identity, up_to_here = on.constant(np.eye(size)), on.constant(np.tri(size))
    power = projected
    for _ in range(SQUARINGS):
        trace = on.floats(on.sum(power * identity))
        power = power / on.where(trace > 0, trace, 1.0)
        power = on.matmul(power, power)
    diagonal = on.matmul(power * identity, on.constant(np.ones(size)))
    greatest = on.where(diagonal == on.amax(diagonal), on.constant(np.ones(size)), 0.0)
    first = on.where(on.matmul(up_to_here, greatest) == 1.0, greatest, 0.0)
    column = on.matmul(power, first)
    length = _norm(on, column)
    return column / on.where(length > 0, length, 1.0)


class _Scaled:
    """A matrix scaled so that its greatest magnitude is near 1. Then no product and no square of an element overflows, or
    vanishes beside the others.

    Attributes:
        finite: Whether all elements are finite.
        back: The factor that undoes the scaling.
    """

    def __init__(self, on: Arithmetic, matrix: Array, shape: Sequence[int]) -> None:
        self.on, self.columns = on, shape[1]
        self._matrix, self._shape = matrix, shape
        greatest = on.amax(on.stack([on.amax(on.abs(on.floats(block))) for block in self._blocks()]))
        self.finite = greatest - greatest == 0
        self.back: Array
        self._by: Array
        self.back, self._by = _scale_seen(float(greatest)) if on.may_look else _scale_unseen(on, greatest)

    def times(self, vector: Array) -> Array:
        """``W^T W v`` of the scaled matrix."""
        result: Array = 0.0
        for block in self._blocks():
            scaled = self._scaled(block)
            result = result + self.on.matmul(self.on.matmul(scaled, vector), scaled)
        return result

    def sum_of_squares(self) -> Array:
        """The sum of squares of the unscaled matrix."""
        total: Array = 0.0
        for block in self._blocks():
            scaled = self._scaled(block)
            total = total + self.on.sum(scaled * scaled)
        return total * self.back * self.back

    def _blocks(self) -> Iterator[Array]:
        return self.on.rows(self._matrix, self._shape)

    def _scaled(self, block: Array) -> Array:
        numbers = self.on.floats(block)
        return numbers if self._by is None else numbers * self._by


def _scale_seen(greatest: float) -> tuple[float, float | None]:
    """A power of two, which causes no rounding; no scale if nothing can overflow without one."""
    exponent = math.frexp(greatest)[1] if math.isfinite(greatest) else 0
    if abs(exponent) <= FARTHEST // 6:
        return 1.0, None
    exponent = max(-FARTHEST, min(FARTHEST, exponent))
    return math.ldexp(1.0, exponent), math.ldexp(1.0, -exponent)


def _scale_unseen(on: Arithmetic, greatest: Array) -> tuple[Array, Array]:
    """The greatest magnitude, limited to numbers with a normal reciprocal in float32. It may round in the last digit."""
    within = on.where(greatest < 2.0**FARTHEST, on.at_least(greatest, 2.0**-FARTHEST), 2.0**FARTHEST)
    back = on.where(greatest > 0, within, 1.0)
    return back, 1.0 / back


def similarity_of_rows(matrix: Tensor) -> reading.Similarity:
    """The sum of the cosines of all pairs of rows, from Σ_ij cos_ij = |Σ_i row_i / |row_i||².

    A row of zeros has no direction and counts as similar to none. With NaN or Inf, the sum is NaN.

    Raises:
        EarlierFailure: An earlier operation of training has failed.
    """
    rows = matrix.shape[0]
    with computing() as on:
        total: Array = 0.0
        directed: Array = 0.0
        for block in on.rows(on.of(matrix), matrix.shape):
            numbers = on.wide(on.floats(block))
            greatest = on.amax(on.abs(numbers), -1)
            numbers = numbers / on.where(greatest == 0, 1.0, greatest)
            length = on.sqrt(on.sum(numbers * numbers, -1))
            total = total + on.sum(numbers / on.where(length == 0, 1.0, length), 0)
            directed = directed + on.sum(on.where(length == 0, 0.0, 1.0))
        return reading.Similarity(rows * (rows - 1), on.number(on.sum(total * total) - directed))


# --- The entropy of a router.

DTYPES: Final = {"fp32": ms.float32, "fp64": ms.float64}
"""The names in the configurations of Megatron and MindSpeed."""

CAST_TO: Final = {"FP16": ms.float16, "BF16": ms.bfloat16, "FP32": ms.float32}
"""The names that ``Cell.to_float`` sets."""


def entropy_of(logits: Tensor) -> reading.Routing:
    """The entropy of logits of any shape whose last dimension is the experts.

    Raises:
        EarlierFailure: An earlier operation of training has failed.
    """
    with computing() as on:
        return _entropy(on, _parts_of(on, logits), math.prod(logits.shape[:-1]))


def entropy_from(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: Any) -> reading.Routing:
    """The entropy of the logits ``tokens @ weight^T + bias``, computed in the router's precision, in blocks of tokens.

    Args:
        tokens: The last dimension is the hidden size.
        weight: Shape ``(experts, hidden size)``.

    Raises:
        EarlierFailure: An earlier operation of training has failed.
    """
    with computing() as on:
        return _entropy(on, _parts_from(on, tokens, weight, bias, dtype), math.prod(tokens.shape[:-1]))


def logit_sums_of(logits: Tensor) -> reading.Logits:
    """The sums for z-loss and the greatest of logits, whose last dimension is the experts."""
    with computing() as on:
        return _logit_sums(on, _parts_of(on, logits), math.prod(logits.shape[:-1]))


def logit_sums_from(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: Any) -> reading.Logits:
    """The same of logits that are computed, as in ``entropy_from``."""
    with computing() as on:
        return _logit_sums(on, _parts_from(on, tokens, weight, bias, dtype), math.prod(tokens.shape[:-1]))


def logits_from(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: Any) -> ComputedLogits:
    """The logits of ``entropy_from``."""
    with computing() as on:
        parts = list(_parts_from(on, tokens, weight, bias, dtype))
        shape = math.prod(tokens.shape[:-1]), weight.shape[0]
        return ComputedLogits(parts[0] if len(parts) == 1 else on.joined(parts), shape, dtype)


def _parts_of(on: Arithmetic, logits: Tensor) -> Iterator[Array]:
    return (on.floats(block) for block in _tokens(on, logits))


def _parts_from(on: Arithmetic, tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: Any) -> Iterator[Array]:
    transposed = on.swapped(on.rounded(on.of(weight), dtype))
    added = None if bias is None else on.rounded(on.of(bias), dtype)
    for block in _tokens(on, tokens):
        logits = on.matmul(on.rounded(block, dtype), transposed)
        yield on.rounded(logits if added is None else logits + added, dtype)


def _entropy(on: Arithmetic, parts: Iterator[Array], tokens: int) -> reading.Routing:
    total: Array = 0.0
    for logits in parts:
        total = total + on.sum(_entropies(on, logits))
    return reading.Routing(tokens, on.number(total))


def _logit_sums(on: Arithmetic, parts: Iterator[Array], tokens: int) -> reading.Logits:
    total: Array = 0.0
    greatest: Array | None = None
    for logits in parts:
        of_token = on.amax(logits, -1)
        below = on.where(logits == of_token, 0.0, logits - of_token)  # of infinite logits the difference is NaN
        exponents = on.sum(on.exp(on.at_least(below, OUT_OF_SIGHT)), -1)
        exact = on.wide(of_token + on.log(exponents))
        total = total + on.sum(exact * exact)
        here, nans = on.amax(of_token), on.sum(on.floats(logits != logits))
        here = on.where(nans == 0, here, nans * math.nan)  # NaN need not reach a maximum
        greatest = here if greatest is None else on.maximum(greatest, here)
    return reading.Logits(tokens, on.number(total), -math.inf if greatest is None else on.number(greatest))


def dtype_of_routing(cell: nn.Cell, tokens: Tensor, weight: Tensor) -> Any:
    """The precision of a router's logits: from its configuration or ``to_float``, otherwise from its inputs."""
    said = DTYPES.get(str(getattr(getattr(cell, "config", None), "moe_router_dtype", None)))
    if said is not None:
        return said
    cast = CAST_TO.get(getattr(getattr(cell, "mixed_precision_type", None), "name", ""))
    if cast is not None:
        return cast
    given = {tokens.dtype, weight.dtype}
    return given.pop() if len(given) == 1 else (ms.float64 if ms.float64 in given else ms.float32)


def _tokens(on: Arithmetic, x: Tensor) -> Iterator[Array]:
    shape = math.prod(x.shape[:-1]), x.shape[-1]
    return on.rows(on.of(x).reshape(shape), shape)


def _entropies(on: Arithmetic, logits: Array) -> Array:
    """Shape (tokens, 1). An expert that a token cannot reach has a logit of -Inf and the share 0."""
    below = on.at_least(logits - on.amax(logits, -1), OUT_OF_SIGHT)
    weights = on.exp(below)
    total = on.sum(weights, -1)
    return on.log(total) - on.sum(below * weights, -1) / total
