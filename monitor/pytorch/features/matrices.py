"""Matrices read in blocks of rows: their norms, and how alike their rows are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from monitor.stats.torch_tensors import working_precision

BLOCK: Final = 1 << 18
"""Elements that are converted at once: a tensor of low precision has no copy of its size made."""

TOLERANCE: Final = 1e-3
"""The power iteration ends when what is still to come is reckoned to be below this part of the norm."""

MOST: Final = 200
"""Iterations for one row, if it does not end before."""

FIRST_THERE, LATER_THERE = 100, 4
"""Iterations on an accelerator, where nobody may wait to see how far it has come: for the first row, for any other."""

SEED: Final = 20_251_207
FARTHEST: Final = 126
"""Powers of two that elements are scaled by reach so far: 2^-126 is the smallest normal float32."""


class Norms(NamedTuple):
    """Of a matrix, float64 scalars: the square of the Frobenius norm, and an estimate of the spectral norm from below."""

    squares: Tensor
    spectral: Tensor


class FollowedMatrix:
    """A matrix whose norms are asked for again and again, while its elements change.

    The spectral norm is found by power iteration with W^T W. The vector it has come to is where it goes on the next time, so
    that few iterations serve a matrix that changes little. The start is drawn from a generator of its own.
    """

    def __init__(self) -> None:
        self._vector: Tensor | None = None
        self._last: float | None = None

    def norms(self, matrix: Tensor) -> Norms:
        """The norms of a floating-point matrix. With NaN or Inf in it, the spectral norm is NaN."""
        work = _Scaled(matrix)
        vector = self._start(matrix, work.dtype)
        if matrix.is_cpu:
            spectral = self._iterated(work, vector) if work.is_finite else torch.tensor(math.nan, dtype=torch.float64)
        else:
            spectral = self._iterated_unseen(work, vector)
        return Norms(work.sum_of_squares(), spectral)

    def _start(self, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        vector = self._vector
        if vector is None or vector.shape[0] != matrix.shape[1] or vector.device != matrix.device or vector.dtype != dtype:
            generator = torch.Generator(matrix.device).manual_seed(SEED)
            vector = torch.randn(matrix.shape[1], generator=generator, dtype=dtype, device=matrix.device)
            self._vector, self._last = vector / torch.linalg.vector_norm(vector), None
            return self._vector
        return vector

    def _iterated(self, work: _Scaled, vector: Tensor) -> Tensor:
        """Until it has come near enough, which on the host can be looked at for nothing."""
        found, moved = -math.inf, math.inf
        for _ in range(MOST):
            estimate, vector = work.iterate(vector)
            before, found = found, estimate.item()
            if self._is_where_it_was(found, work.exponent) or _is_near(found, moved, found - before):
                break
            moved = found - before
        self._vector, self._last = vector, math.ldexp(found, work.exponent)
        return torch.tensor(self._last, dtype=torch.float64)

    def _is_where_it_was(self, found: float, exponent: int) -> bool:
        return self._last is not None and abs(math.ldexp(found, exponent) - self._last) <= TOLERANCE * self._last

    def _iterated_unseen(self, work: _Scaled, vector: Tensor) -> Tensor:
        start = vector
        for _ in range(FIRST_THERE if self._last is None else LATER_THERE):
            estimate, vector = work.iterate(vector)
        self._vector, self._last = torch.where(work.finite, vector, start), 0.0
        return torch.where(work.finite, estimate.double() / work.factor, math.nan)


def _is_near(found: float, moved_before: float, moved: float) -> bool:
    """Whether what is to come, if each step goes on to be the same part of the one before, is little.

    A step alone says less: where singular values lie close together steps are small long before the end.
    """
    if not math.isfinite(moved_before):
        return found == 0
    part = moved / moved_before if moved_before > 0 else 0.0
    return moved <= 0 or (part < 1 and moved * part / (1 - part) <= TOLERANCE * found)


class _Scaled:
    """A matrix times the power of two that brings its greatest magnitude to between a half and 1, so that no product and no
    square of an element overflows, or vanishes beside the others.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self.dtype = working_precision(matrix.dtype)
        greatest = torch.stack([_greatest(block) for block in self._blocks()]).amax()
        self.exponent = 0
        if matrix.is_cpu:
            self.is_finite = math.isfinite(greatest.item())
            self.exponent = max(-FARTHEST, min(FARTHEST, math.frexp(greatest.item())[1])) if self.is_finite else 0
            # Within this range nothing can go wrong, and the multiplication is saved.
            self.exponent = self.exponent if abs(self.exponent) > FARTHEST // 6 else 0
            self._by: float | Tensor = math.ldexp(1.0, -self.exponent)
        else:
            self.finite = torch.isfinite(greatest)
            power = torch.frexp(greatest).exponent.clamp(-FARTHEST, FARTHEST)
            self.factor = torch.ldexp(torch.ones((), dtype=torch.float64, device=matrix.device), -power)
            self._by = self.factor.to(self.dtype)

    def iterate(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """One step of power iteration from a vector of norm 1: what is now known of the spectral norm, and the next vector.

        ``|W^T y| / |y|`` for any y is no greater than the norm, and for ``y = W v`` no smaller than ``|W v|``.
        """
        result, squares = torch.zeros_like(vector), torch.zeros((), dtype=torch.float64, device=vector.device)
        for block in self._blocks():
            scaled = block if self._by == 1.0 and self._matrix.is_cpu else block * self._by
            image = torch.mv(scaled, vector)
            squares += torch.dot(image, image)
            result.addmv_(scaled.t(), image)
        length = torch.linalg.vector_norm(result, dtype=torch.float64)
        there = squares > 0
        estimate = torch.where(there, length / squares.sqrt(), 0.0)
        return estimate, torch.where(there & (length > 0), (result / length).to(self.dtype), vector)

    def sum_of_squares(self) -> Tensor:
        """Of the matrix as it is."""
        total = torch.zeros((), dtype=torch.float64, device=self._matrix.device)
        for block in self._blocks():
            flat = (block if self._by == 1.0 and self._matrix.is_cpu else block * self._by).flatten()
            total += torch.dot(flat, flat)
        return total / (self._by**2 if self._matrix.is_cpu else self.factor.square())

    def _blocks(self) -> Iterator[Tensor]:
        rows = max(1, BLOCK // max(1, self._matrix.shape[1]))
        for block in self._matrix.split(rows):
            yield block.to(self.dtype)


def _greatest(block: Tensor) -> Tensor:
    least, greatest = torch.aminmax(block)
    return torch.maximum(-least, greatest)


class Similarity(NamedTuple):
    """Of the rows of a matrix, over ordered pairs of two different ones: how many there are, the sum of their cosines."""

    pairs: int
    cosines: Tensor


def similarity_of_rows(matrix: Tensor) -> Similarity:
    """The sum of the cosines of all pairs of rows, from Σ_ij cos_ij = |Σ_i row_i / |row_i||².

    A row of zeros has no direction and counts as similar to none. Of NaN or Inf, the sum is NaN.
    """
    rows = matrix.shape[0]
    total = torch.zeros(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    directed = torch.zeros((), dtype=torch.float64, device=matrix.device)
    for block in matrix.split(max(1, BLOCK // max(1, matrix.shape[1]))):
        wide = block.double()
        wide = wide / torch.where((greatest := wide.abs().amax(1, keepdim=True)) == 0, 1.0, greatest)
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        total += (wide / torch.where(length == 0, 1.0, length)).sum(0)
        directed += (length != 0).sum()
    return Similarity(rows * (rows - 1), total.square().sum() - directed)
