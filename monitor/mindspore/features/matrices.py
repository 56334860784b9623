"""Matrices read in blocks of rows: their norms, and how alike their rows are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from mindspore import Tensor

from monitor.capture.features.power_iteration import FARTHEST, FIRST, LATER, LATER_THERE, SEED, SQUARINGS, STAYS
from monitor.capture.features.results import Norms, Similarity
from monitor.stats.mindspore_arithmetic import Arithmetic, Array, computing

ROUNDING: Final = 1e-5
"""What of a vector is left beside others that it is a combination of."""


class FollowedMatrix:
    """A matrix whose norms are asked for again and again, while its elements change.

    The spectral norm is found by power iteration with W^T W, and what it has come to is where it goes on the next time, so
    that one product serves a matrix that changes little. The start is drawn from a generator of its own. The first row, and
    one that moves, takes what is best in the space of all the vectors on the way (Lanczos).
    """

    def __init__(self) -> None:
        self._vector: Array | None = None
        self._last: float | None = None

    def norms(self, matrix: Tensor) -> Norms:
        """The norms of a floating-point matrix. With NaN or Inf in it, the spectral norm is NaN.

        On a device squares are float32: the Frobenius norm is told between 1e-19 and 1e19.

        Raises:
            EarlierFailure: Something that was called before has failed.
        """
        with computing() as on:
            work = _Scaled(on, on.of(matrix))
            vector = self._start(on, matrix.shape[1])
            spectral = self._followed(work, vector) if on.may_look else self._followed_unseen(work, vector)
            return Norms(on.number(work.sum_of_squares()), on.number(spectral))

    def _start(self, on: Arithmetic, columns: int) -> Array:
        if self._vector is None or self._vector.shape[0] != columns:
            drawn = np.random.Generator(np.random.PCG64(SEED)).standard_normal(columns)
            self._vector, self._last = on.constant(drawn / np.linalg.norm(drawn)), None
        return self._vector

    def _followed(self, work: _Scaled, vector: Array) -> float:
        """Until the estimate stays, which on the host can be looked at for nothing."""
        if not work.finite:
            return math.nan
        last = self._last
        for products in (FIRST,) if last is None else LATER:
            estimate, vector = _estimated(work, vector, products)
            found = float(estimate * work.back)
            stays = last is not None and abs(found - last) <= STAYS * found
            last = found
            if stays:
                break
        self._vector, self._last = vector, found
        return found

    def _followed_unseen(self, work: _Scaled, vector: Array) -> Array:
        on = work.on
        estimate, found = _estimated(work, vector, FIRST if self._last is None else LATER_THERE)
        self._vector, self._last = on.where(work.finite, found, vector), 0.0
        return on.where(work.finite, estimate * work.back, math.nan)


def _estimated(work: _Scaled, vector: Array, products: int) -> tuple[Array, Array]:
    """What so many products with A = W^T W make known of its largest eigenvector, from a vector of norm 1.

    Returns:
        The root of |A v| for the best v, no greater than the spectral norm of W whatever v is; and A v, normalized.
    """
    on = work.on
    basis, images = [vector], [work.times(vector)]
    while len(basis) < min(products, vector.shape[0]):
        basis.append(_beyond(on, on.stack(basis), images[-1]))
        images.append(work.times(basis[-1]))
    space, image = on.stack(basis), on.stack(images)
    reached = on.matmul(_largest_eigenvector(on, on.matmul(space, on.swapped(image))), image)
    length = _norm(on, reached)
    return on.sqrt(length), on.where(length > 0, reached / length, vector)


def _beyond(on: Arithmetic, space: Array, vector: Array) -> Array:
    """What of a vector lies in none of the directions of ``space``, normalized; zeros if that is nothing but rounding."""
    rest = vector
    for _ in range(2):
        rest = rest - on.matmul(on.matmul(space, rest), space)
    length = _norm(on, rest)
    return on.where(length > ROUNDING * _norm(on, vector), rest / length, 0.0)


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

    def __init__(self, on: Arithmetic, matrix: Array) -> None:
        self.on = on
        self._matrix = matrix
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
        return self.on.rows(self._matrix, self._matrix.shape)

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
