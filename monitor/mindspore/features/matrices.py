"""Matrices read in blocks of rows: their norms, and how alike their rows are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from mindspore import Tensor

from monitor.recording.features import krylov
from monitor.recording.features.krylov import CERTAIN, FARTHEST, MOST, SQUARINGS, UNCERTAIN, UNREAD, Tridiagonal
from monitor.recording.features.reading import Norms, Similarity
from monitor.stats.mindspore.arithmetic import Arithmetic, Array, computing


def norms_of(matrix: Tensor) -> Norms:
    """The norms of a floating-point matrix. With NaN or Inf in it, the spectral norm is NaN.

    On a device squares are float32: the Frobenius norm is known between 1e-19 and 1e19.

    Raises:
        EarlierFailure: Something that was called before has failed.
    """
    if 0 in matrix.shape:
        return Norms(0.0, 0.0, CERTAIN)
    with computing() as on:
        work = _Scaled(on, on.of(matrix), matrix.shape)
        largest, matrices = _lanczos(work) if on.may_look else _lanczos_unread(work)
        spectral = on.where(work.finite, on.sqrt(largest) * work.back, math.nan)
        return Norms(on.number(work.sum_of_squares()), on.number(spectral), on.number(matrices))


def _lanczos(work: _Scaled) -> tuple[float, float]:
    """The largest eigenvalue of A = W^T W, scaled, and of how many matrices the row is: products until it is certain."""
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
    """As ``_lanczos``, by a fixed number of products."""
    on, products = work.on, min(UNREAD, work.columns)
    vector = on.constant(krylov.start(work.columns))
    basis: Array = 0.0  # it has all of its rows from the first on: operations on a new shape are prepared anew
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
    """Take away from a vector what lies along the rows of ``space``, of which ``last`` is the last, twice.

    Returns:
        The part along the last of them, the length after the first time, what is left, and its length.
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
    """As ``Tridiagonal`` evaluates its polynomial, from a corner of the resolvent, ``Σ_j (T / s)^j``, whose terms are positive.

    Returns:
        ``s / p(s)`` for s, the largest eigenvalue that is allowed.
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
    """Of a small symmetric matrix without negative eigenvalues, by squaring it: that waits for no device.

    All columns of the power are multiples of the eigenvector by then. That one is taken which has the greatest number on the
    diagonal, and of several the first.
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
    """A matrix times a number that brings its greatest magnitude near 1, so that no product and no square of an element
    overflows, or vanishes beside the others.

    Attributes:
        finite: Whether all elements are.
        back: What undoes the scaling.
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
        """``W^T W v``, of the matrix as it is scaled."""
        result: Array = 0.0
        for block in self._blocks():
            scaled = self._scaled(block)
            result = result + self.on.matmul(self.on.matmul(scaled, vector), scaled)
        return result

    def sum_of_squares(self) -> Array:
        """Of the matrix as it is."""
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
    """A power of two, which rounds nothing; none where nothing can go wrong without."""
    exponent = math.frexp(greatest)[1] if math.isfinite(greatest) else 0
    if abs(exponent) <= FARTHEST // 6:
        return 1.0, None
    exponent = max(-FARTHEST, min(FARTHEST, exponent))
    return math.ldexp(1.0, exponent), math.ldexp(1.0, -exponent)


def _scale_unseen(on: Arithmetic, greatest: Array) -> tuple[Array, Array]:
    """The greatest magnitude itself, within what has a normal reciprocal in float32: that may round in the last digit."""
    within = on.where(greatest < 2.0**FARTHEST, on.at_least(greatest, 2.0**-FARTHEST), 2.0**FARTHEST)
    back = on.where(greatest > 0, within, 1.0)
    return back, 1.0 / back


def similarity_of_rows(matrix: Tensor) -> Similarity:
    """The sum of the cosines of all pairs of rows, from Σ_ij cos_ij = |Σ_i row_i / |row_i||².

    A row of zeros has no direction and counts as similar to none. Of NaN or Inf, the sum is NaN.

    Raises:
        EarlierFailure: Something that was called before has failed.
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
        return Similarity(rows * (rows - 1), on.number(on.sum(total * total) - directed))
