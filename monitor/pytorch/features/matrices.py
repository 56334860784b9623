"""Matrices read in blocks of rows: their norms, and how alike their rows are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from monitor.capture.features.power_iteration import FARTHEST, FIRST, LATER, LATER_THERE, SEED, SQUARINGS, STAYS
from monitor.capture.features.results import Norms, Similarity
from monitor.stats.torch_tensors import working_precision

BLOCK: Final = 1 << 18
"""Elements that are converted at once: a tensor of low precision has no copy of its size made."""


class FollowedMatrix:
    """A matrix whose norms are asked for again and again, while its elements change.

    The spectral norm is found by power iteration with W^T W, and what it has come to is where it goes on the next time, so
    that one product serves a matrix that changes little. The start is drawn from a generator of its own. Power iteration by
    itself takes a hundred steps where singular values lie close together, as those of random matrices do. So the first row,
    and one that moves, takes what is best in the space of all the vectors on the way (Lanczos): 30 products then suffice.
    """

    def __init__(self) -> None:
        self._vector: Tensor | None = None
        self._last: float | None = None

    def norms(self, matrix: Tensor) -> Norms:
        """The norms of a floating-point matrix. With NaN or Inf in it, the spectral norm is NaN."""
        work = _Scaled(matrix)
        vector = self._start(matrix, work.dtype)
        if not work.may_look:
            spectral = self._followed_unseen(work, vector)
        elif work.is_finite:
            spectral = torch.tensor(self._followed(work, vector), dtype=torch.float64)
        else:
            spectral = torch.tensor(math.nan, dtype=torch.float64)
        return Norms(work.sum_of_squares(), spectral)

    def _start(self, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        vector = self._vector
        if vector is None or vector.shape[0] != matrix.shape[1] or vector.device != matrix.device or vector.dtype != dtype:
            generator = torch.Generator(matrix.device).manual_seed(SEED)
            vector = torch.randn(matrix.shape[1], generator=generator, dtype=dtype, device=matrix.device)
            self._vector, self._last = vector / torch.linalg.vector_norm(vector), None
            return self._vector
        return vector

    def _followed(self, work: _Scaled, vector: Tensor) -> float:
        """Until the estimate stays, which on the host can be looked at for nothing."""
        last = self._last
        for products in (FIRST,) if last is None else LATER:
            estimate, vector = _estimated(work, vector, products)
            found = math.ldexp(estimate.item(), work.exponent)
            stays = last is not None and abs(found - last) <= STAYS * found
            last = found
            if stays:
                break
        self._vector, self._last = vector, found
        return found

    def _followed_unseen(self, work: _Scaled, vector: Tensor) -> Tensor:
        estimate, found = _estimated(work, vector, FIRST if self._last is None else LATER_THERE)
        self._vector, self._last = torch.where(work.finite, found, vector), 0.0
        return torch.where(work.finite, estimate / work.factor, math.nan)


def _estimated(work: _Scaled, vector: Tensor, products: int) -> tuple[Tensor, Tensor]:
    """What so many products with A = W^T W make known of its largest eigenvector, from a vector of norm 1.

    Returns:
        The root of |A v| for the best v, no greater than the spectral norm of W whatever v is; and A v, normalized.
    """
    basis, images = [vector], [work.times(vector)]
    while len(basis) < min(products, vector.shape[0]):
        basis.append(_beyond(torch.stack(basis), images[-1]))
        images.append(work.times(basis[-1]))
    space, image = torch.stack(basis), torch.stack(images)
    best = _largest_eigenvector((space @ image.T).double()).to(image.dtype)
    reached = best @ image
    length = torch.linalg.vector_norm(reached, dtype=torch.float64)
    return length.sqrt(), torch.where(length > 0, (reached / length).to(vector.dtype), vector)


def _beyond(space: Tensor, vector: Tensor) -> Tensor:
    """What of a vector lies in none of the directions of ``space``, normalized; zeros if that is nothing but rounding."""
    rest = vector
    for _ in range(2):
        rest = rest - (space @ rest) @ space
    length = torch.linalg.vector_norm(rest)
    return torch.where(length > 1e-5 * torch.linalg.vector_norm(vector), rest / length, 0.0)


def _largest_eigenvector(projected: Tensor) -> Tensor:
    """Of a small symmetric matrix without negative eigenvalues, by squaring it: that waits for no device."""
    power = projected
    for _ in range(SQUARINGS):
        trace = power.diagonal().sum()
        power = power / torch.where(trace > 0, trace, 1.0)
        power = power @ power
    column = power.index_select(1, power.diagonal().argmax().view(1)).squeeze(1)
    length = torch.linalg.vector_norm(column)
    return column / torch.where(length > 0, length, 1.0)


class _Scaled:
    """A matrix times the power of two that brings its greatest magnitude to between a half and 1, so that no product and no
    square of an element overflows, or vanishes beside the others.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self.dtype = working_precision(matrix.dtype)
        greatest = torch.stack([_greatest(block) for block in self._blocks()]).amax()
        self.exponent = 0
        self.may_look = _may_look(matrix)
        self._by: float | Tensor
        if self.may_look:
            self.is_finite = math.isfinite(greatest.item())
            self.exponent = max(-FARTHEST, min(FARTHEST, math.frexp(greatest.item())[1])) if self.is_finite else 0
            # Within this range nothing can go wrong, and the multiplication is saved.
            self.exponent = self.exponent if abs(self.exponent) > FARTHEST // 6 else 0
            self._by = math.ldexp(1.0, -self.exponent)
        else:
            self.finite = torch.isfinite(greatest)
            power = torch.frexp(greatest).exponent.clamp(-FARTHEST, FARTHEST)
            self.factor = torch.ldexp(torch.ones((), dtype=torch.float64, device=matrix.device), -power)
            self._by = self.factor.to(self.dtype)

    def times(self, vector: Tensor) -> Tensor:
        """``W^T W v``, of the matrix as it is scaled."""
        result = torch.zeros_like(vector)
        for block in self._blocks():
            scaled = self._scaled(block)
            result.addmv_(scaled.t(), torch.mv(scaled, vector))
        return result

    def sum_of_squares(self) -> Tensor:
        """Of the matrix as it is."""
        total = torch.zeros((), dtype=torch.float64, device=self._matrix.device)
        for block in self._blocks():
            total += self._scaled(block).square().sum()
        return total / (math.ldexp(1.0, -2 * self.exponent) if self.may_look else self.factor.square())

    def _scaled(self, block: Tensor) -> Tensor:
        return block if self.may_look and self.exponent == 0 else block * self._by

    def _blocks(self) -> Iterator[Tensor]:
        rows = max(1, BLOCK // max(1, self._matrix.shape[1]))
        for block in self._matrix.split(rows):
            yield block.to(self.dtype)


def _may_look(matrix: Tensor) -> bool:
    """Whether it costs nothing to look at a number: on an accelerator that would wait for all that was asked of it before."""
    return matrix.is_cpu


def _greatest(block: Tensor) -> Tensor:
    least, greatest = torch.aminmax(block)
    return torch.maximum(-least, greatest)


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
