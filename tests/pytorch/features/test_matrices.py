"""Norms of weights are those of a decomposition in float64, whatever their size, shape and spectrum."""

from __future__ import annotations

import math

import pytest
import torch
from definitions import similarity
from torch import Tensor

from monitor.pytorch.features import matrices
from monitor.pytorch.features.matrices import FollowedMatrix, similarity_of_rows

NEAR = 5e-3
"""How far below the spectral norm the first estimate may be."""

ROUNDING = 1e-5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
    "at the end of float32": 3e38 * (2 * torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) - 1),
    "tiny": 1e-30 * drawn(40, 40),
    "at the other end": 1e-37 * drawn(40, 40),
    "float64": drawn(40, 30).double(),
    "bfloat16": drawn(200, 100).bfloat16(),
    "float16": drawn(64, 64).half(),
    "transposed": drawn(40, 90).T,
    "every other column": drawn(40, 90)[:, ::2],
}


def norms(matrix: Tensor) -> tuple[float, float]:
    found = FollowedMatrix().norms(matrix)
    return math.sqrt(found.squares.item()), found.spectral.item()


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_the_norms_are_those_of_a_decomposition(matrix: Tensor) -> None:
    frobenius, spectral = norms(matrix)
    values = torch.linalg.svdvals(matrix.double())
    assert frobenius == pytest.approx(values.norm().item(), rel=1e-6)
    assert values[0].item() * (1 - NEAR) <= spectral <= values[0].item() * (1 + ROUNDING)


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_where_nobody_may_look_the_norms_are_the_same(monkeypatch: pytest.MonkeyPatch, matrix: Tensor) -> None:
    """What runs on an accelerator, run on the host: whoever looks at a number fails."""
    monkeypatch.setattr(matrices, "_may_look", lambda _: False)
    values, followed = torch.linalg.svdvals(matrix.double()), FollowedMatrix()
    with monkeypatch.context() as forbidding:
        forbidding.setattr(Tensor, "item", None)
        forbidding.setattr(Tensor, "__bool__", None)
        found = [followed.norms(matrix) for _ in range(2)]
    for one in found:
        assert one.squares.sqrt().item() == pytest.approx(values.norm().item(), rel=1e-6)
        assert values[0].item() * (1 - NEAR) <= one.spectral.item() <= values[0].item() * (1 + ROUNDING)


def test_where_nobody_may_look_what_is_not_finite_is_not_hidden_and_is_followed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "_may_look", lambda _: False)
    matrix, followed = drawn(30, 30), FollowedMatrix()
    followed.norms(matrix)
    assert math.isnan(followed.norms(torch.where(matrix > 2, math.inf, matrix)).spectral.item())
    expected = torch.linalg.matrix_norm(matrix.double(), 2).item()
    assert followed.norms(matrix).spectral.item() == pytest.approx(expected, rel=NEAR)
    assert FollowedMatrix().norms(torch.zeros(3, 4)).spectral.item() == 0.0


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


def test_a_matrix_that_was_not_finite_once_is_followed_on() -> None:
    matrix, followed = drawn(30, 30), FollowedMatrix()
    followed.norms(matrix)
    followed.norms(matrix * math.nan)
    expected = torch.linalg.matrix_norm(matrix.double(), 2).item()
    assert followed.norms(matrix).spectral.item() == pytest.approx(expected, rel=NEAR)


def test_the_estimate_comes_nearer_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "FIRST", 3)
    matrix, followed = drawn(200, 200), FollowedMatrix()
    exact = torch.linalg.matrix_norm(matrix.double(), 2).item()
    short = [1 - followed.norms(matrix).spectral.item() / exact for _ in range(100)]
    assert short[0] > 0.02
    assert -ROUNDING < short[-1] < 1e-4


@pytest.mark.parametrize("seed", range(30))
def test_random_matrices_whose_singular_values_lie_close_are_told_at_once(seed: int) -> None:
    rows, columns = ((40, 45), (64, 64), (128, 32), (256, 256), (16, 200))[seed % 5]
    matrix = drawn(rows, columns, seed=seed)
    expected = torch.linalg.matrix_norm(matrix.double(), 2).item()
    assert expected * (1 - 1e-3) <= norms(matrix)[1] <= expected * (1 + ROUNDING)


def test_a_matrix_that_jumps_is_told_at_once() -> None:
    followed = FollowedMatrix()
    for seed in range(5):
        matrix = drawn(96, 80, seed=seed)
        expected = torch.linalg.matrix_norm(matrix.double(), 2).item()
        assert followed.norms(matrix).spectral.item() == pytest.approx(expected, rel=NEAR)


def test_a_matrix_that_trains_is_followed_with_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    times = matrices._Scaled.times

    def counted(self: matrices._Scaled, vector: Tensor) -> Tensor:
        taken[-1] += 1
        return times(self, vector)

    monkeypatch.setattr(matrices._Scaled, "times", counted)
    matrix, followed = drawn(100, 100), FollowedMatrix()
    for step in range(20):
        taken.append(0)
        found = followed.norms(matrix).spectral.item()
        assert found == pytest.approx(torch.linalg.matrix_norm(matrix.double(), 2).item(), rel=NEAR)
        matrix = matrix + 1e-3 * drawn(100, 100, seed=1 + step)
    assert taken == [matrices.FIRST, *[1] * 19]


def test_a_matrix_that_is_replaced_is_found_anew() -> None:
    followed = FollowedMatrix()
    followed.norms(with_spectrum([1.0, 0.5]))
    other = drawn(96, 80, seed=5)
    expected = torch.linalg.matrix_norm(other.double(), 2).item()
    assert followed.norms(other).spectral.item() == pytest.approx(expected, rel=NEAR)


def test_the_random_numbers_of_the_program_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    FollowedMatrix().norms(drawn(8, 8))
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


@pytest.mark.parametrize("size", [1e-30, 1e30, 3e38])
def test_cosines_do_not_depend_on_the_size_of_rows(size: float) -> None:
    weight = torch.rand(6, 10, generator=torch.Generator().manual_seed(0))
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
