"""Norms of weights are those of a decomposition in float64, whatever their size, shape and spectrum."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from definitions import similarity
from observing import drawn
from torch import Tensor

from monitor.pytorch.features import matrices
from monitor.pytorch.features.matrices import norms_of, similarity_of_rows
from monitor.recording.features import krylov
from monitor.stats.features import COLUMNS_OF
from monitor.stats.partials import COLUMNS, MAX, SMALLS, SUMSQ, Partials

NEAR = 5e-3
"""How far below the spectral norm the first estimate may be."""

ROUNDING = 1e-5


def with_spectrum(values: list[float], rows: int = 96, columns: int = 80) -> Tensor:
    left, right = torch.linalg.qr(drawn(rows, len(values)))[0], torch.linalg.qr(drawn(columns, len(values), seed=1))[0]
    return left @ torch.diag(torch.tensor(values)) @ right.T


MATRICES = {
    "square": drawn(64, 64),
    "tall": drawn(300, 20),
    "wide": drawn(20, 300),
    "large": drawn(700, 500),
    "one row": drawn(1, 40),
    "one column": drawn(40, 1),
    "one element": torch.tensor([[-3.0]]),
    "two nearly equal": with_spectrum([1.0, 0.9999, 0.3, 0.2]),
    "two equal": with_spectrum([2.0, 2.0, 0.1]),
    "one above many": with_spectrum([1.0, *[0.95] * 70]),
    "ill-conditioned": with_spectrum([10.0 ** -(i / 5) for i in range(60)]),
    "rank 1": drawn(50, 1) @ drawn(1, 30, seed=1),
    "identity": torch.eye(30),
    "huge": 1e30 * drawn(40, 40),
    "at the end of float32": 3e38 * torch.sin(drawn(40, 40)),
    "tiny": 1e-30 * drawn(40, 40),
    "at the other end": 1e-37 * drawn(40, 40),
    "float64": drawn(40, 30).double(),
    "bfloat16": drawn(200, 100).bfloat16(),
    "float16": drawn(64, 64).half(),
    "transposed": drawn(40, 90).T,
    "every other column": drawn(40, 90)[:, ::2],
}


def norms(matrix: Tensor) -> tuple[float, float]:
    found = norms_of(matrix)
    return math.sqrt(float(found.squares)), float(found.spectral)


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_the_norms_are_those_of_a_decomposition(matrix: Tensor) -> None:
    frobenius, spectral = norms(matrix)
    values = torch.linalg.svdvals(matrix.double())
    assert frobenius == pytest.approx(values.norm().item(), rel=1e-6)
    assert values[0].item() * (1 - NEAR) <= spectral <= values[0].item() * (1 + ROUNDING)


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_where_no_one_may_look_the_norms_are_the_same(monkeypatch: pytest.MonkeyPatch, matrix: Tensor) -> None:
    """What runs on an accelerator, run on the host: looking at a number fails."""
    monkeypatch.setattr(matrices, "_may_read", lambda _: False)
    values = torch.linalg.svdvals(matrix.double())
    with monkeypatch.context() as forbidding:
        forbidding.setattr(Tensor, "item", None)
        forbidding.setattr(Tensor, "__bool__", None)
        found = [norms_of(matrix) for _ in range(2)]
    for one in found:
        assert one.squares.sqrt().item() == pytest.approx(values.norm().item(), rel=1e-6)
        assert values[0].item() * (1 - NEAR) <= one.spectral.item() <= values[0].item() * (1 + ROUNDING)


def test_where_no_one_may_look_what_is_not_finite_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "_may_read", lambda _: False)
    matrix = drawn(30, 30)
    assert math.isnan(norms_of(torch.where(matrix > 2, math.inf, matrix)).spectral.item())
    assert norms_of(torch.zeros(3, 4)).spectral.item() == 0.0


@pytest.mark.parametrize("block", [1, 50, 1000])
def test_a_matrix_that_is_read_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    matrix = drawn(33, 20)
    whole, alike = norms(matrix), similarity_of_rows(matrix).cosines.item()
    monkeypatch.setattr(matrices, "BLOCK", block)
    assert norms(matrix) == pytest.approx(whole, rel=1e-5)
    assert similarity_of_rows(matrix).cosines.item() == pytest.approx(alike, rel=1e-12)


def test_a_matrix_of_zeros_has_norms_of_zero() -> None:
    assert norms(torch.zeros(5, 7)) == (0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_spectral_norm_of_what_is_not_finite_is_nan(value: float) -> None:
    matrix = drawn(9, 5)
    matrix[3, 2] = value
    frobenius, spectral = norms(matrix)
    assert math.isnan(spectral)
    assert math.isnan(frobenius) if math.isnan(value) else frobenius == math.inf


@pytest.mark.parametrize("seed", range(30))
def test_random_matrices_whose_singular_values_lie_close_are_named_at_once(seed: int) -> None:
    rows, columns = ((40, 45), (64, 64), (128, 32), (256, 256), (16, 200))[seed % 5]
    matrix = drawn(rows, columns, seed=seed)
    expected = torch.linalg.matrix_norm(matrix.double(), 2).item()
    assert expected * (1 - 1e-3) <= norms(matrix)[1] <= expected * (1 + ROUNDING)


def element(matrix: Tensor, value: float) -> Tensor:
    changed = matrix.clone()
    changed[3, 4] = value
    return changed


def idle_block(size: float) -> Tensor:
    return torch.block_diag(0.1 * drawn(32, 32), size * drawn(32, 32, seed=1))


SEQUENCES = {
    "the second element of a diagonal overtakes": [
        torch.diag(torch.tensor([1.0, 0.3 * step, *[0.0] * 9])) for step in range(8)
    ],
    "an idle block grows": [idle_block(0.05 * step) for step in range(8)],
    "a direction grows": [drawn(256, 128) + 50 * step * torch.outer(torch.eye(256)[9], torch.eye(128)[7]) for step in range(4)],
    "one element flips": [0.02 * drawn(96, 80), element(0.02 * drawn(96, 80), 40.0), 0.02 * drawn(96, 80)],
    "opposite elements": [torch.block_diag(drawn(60, 60), step * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])) for step in (0, 30)],
    "it was not finite once": [drawn(30, 30), drawn(30, 30) * math.nan, drawn(30, 30)],
    "it jumps": [drawn(96, 80, seed=seed) for seed in range(5)],
}


@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_a_direction_that_was_not_there_before_is_found_at_once(
    monkeypatch: pytest.MonkeyPatch, sequence: list[Tensor], may_read: bool
) -> None:
    """Spectral norms in float64, each with the matrix of its step; NaN of one that is not finite."""
    monkeypatch.setattr(matrices, "_may_read", lambda _: may_read)
    for matrix in sequence:
        found = norms_of(matrix)
        expected = torch.linalg.matrix_norm(matrix.double(), 2).item() if matrix.isfinite().all() else math.nan
        assert float(found.spectral) == pytest.approx(expected, rel=krylov.WITHIN, nan_ok=True)
        assert float(found.matrices) == 1


@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_a_spectral_norm_is_within_a_hundredth_or_absent(monkeypatch: pytest.MonkeyPatch, seed: int, may_read: bool) -> None:
    monkeypatch.setattr(matrices, "_may_read", lambda _: may_read)
    rows, columns = random.Random(seed).sample(range(1, 200), 2)
    drawn_values = drawn(min(rows, columns), seed=seed).sin().abs()
    values = (drawn_values, drawn_values**20, 1 - 0.05 * drawn_values, 10 ** (-8 * drawn_values))[seed % 4].tolist()
    matrix = with_spectrum(values, rows, columns) if seed % 3 else torch.diag(torch.tensor(values))
    found = norms_of(matrix)
    expected = torch.linalg.matrix_norm(matrix.double(), 2).item()
    assert float(found.matrices) == 2 or expected * (1 - krylov.WITHIN) <= float(found.spectral) <= expected * (1 + ROUNDING)


@pytest.mark.parametrize("may_read", [True, False])
def test_a_spectral_norm_that_is_not_certain_is_absent(monkeypatch: pytest.MonkeyPatch, may_read: bool) -> None:
    """Two products cannot tell where the spectrum of a random matrix ends."""
    monkeypatch.setattr(matrices, "_may_read", lambda _: may_read)
    monkeypatch.setattr(matrices, "MOST", 2)
    monkeypatch.setattr(matrices, "UNREAD", 2)
    found = norms_of(drawn(200, 200))
    parts = Partials(np.zeros((len(COLUMNS), 1)))
    for column, number in ((SMALLS, found.matrices), (SUMSQ, found.squares), (MAX, found.spectral)):
        parts.columns[column] = float(number)
    row = {name: derived(parts) for name, derived in COLUMNS_OF["linear_hook"].items()}
    assert [bool(there[0]) for _, there in row.values()] == [False, False, True]
    assert row["frobenius_norm"][0][0] == pytest.approx(drawn(200, 200).norm().item(), rel=1e-6)


def test_a_matrix_whose_first_singular_value_stands_out_takes_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    times = matrices._times

    def counted(*args: Any) -> Tensor:
        taken.append(1)
        return times(*args)

    monkeypatch.setattr(matrices, "_times", counted)
    norms_of(0.02 * drawn(500, 400) + torch.outer(drawn(500), drawn(400, seed=1)) / 100)
    assert len(taken) <= 6


def test_a_matrix_without_elements_has_norms_of_zero() -> None:
    assert norms_of(torch.zeros(0, 7)) == (0.0, 0.0, 1.0)


def test_the_random_numbers_of_the_program_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    norms_of(drawn(8, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_matrices_have_equal_estimates_on_every_rank() -> None:
    assert norms(drawn(40, 40)) == norms(drawn(40, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 5), (8, 64), (64, 8), (16, 1)])
def test_rows_are_as_alike_as_their_cosines(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (drawn(*shape) + 0.3).to(dtype)
    found = similarity_of_rows(weight)
    assert found.pairs == shape[0] * (shape[0] - 1)
    assert found.cosines.item() / found.pairs == pytest.approx(similarity(weight), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("size", [1e-300, 1e300])
def test_the_spectral_norm_is_right_where_squares_leave_the_range_of_float64(size: float) -> None:
    found = norms_of(torch.full((4, 4), size, dtype=torch.float64))
    assert float(found.spectral) == pytest.approx(4 * size, rel=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30, 3e38])
def test_cosines_do_not_depend_on_the_size_of_rows(size: float) -> None:
    weight = drawn(6, 10).sin().abs()
    expected = similarity(weight)
    weight[1] *= size
    assert similarity_of_rows(weight).cosines.item() / 30 == pytest.approx(expected, rel=1e-6)


def test_rows_in_one_direction_are_alike_and_crossed_ones_are_not() -> None:
    assert similarity_of_rows(torch.ones(4, 3)).cosines.item() == pytest.approx(12)
    assert similarity_of_rows(torch.eye(4)).cosines.item() == pytest.approx(0)
    assert similarity_of_rows(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).cosines.item() == pytest.approx(-2)


def test_a_row_of_zeros_is_like_no_other() -> None:
    weight = torch.ones(3, 4)
    weight[0] = 0
    assert similarity_of_rows(weight).cosines.item() == pytest.approx(2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_not_hidden(value: float) -> None:
    weight = torch.ones(3, 4)
    weight[1, 1] = value
    assert math.isnan(similarity_of_rows(weight).cosines.item())
