"""Norms of weights are those of a decomposition in float64, on the host and as a device computes them."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint
from numpy_definitions import FLOATS, drawn, exact, number, similarity

from monitor.mindspore.features.matrices import norms_of, similarity_of_rows
from monitor.stats.mindspore import tensors as mindspore_arithmetic

pytestmark = pytest.mark.usefixtures("where")

NEAR = 5e-3
"""How far below the spectral norm the first estimate may be."""

ROUNDING = 1e-5


def with_spectrum(values: list[float], rows: int = 48, columns: int = 40) -> np.ndarray:
    left, right = np.linalg.qr(drawn(rows, len(values)))[0], np.linalg.qr(drawn(columns, len(values), seed=1))[0]
    return (left * np.array(values, dtype=np.float32)) @ right.T


MATRICES = {
    "tall": drawn(200, 20),
    "wide": drawn(20, 200),
    "one row": drawn(1, 40),
    "one column": drawn(40, 1),
    "one element": np.array([[-3.0]], dtype=np.float32),
    "two nearly equal": with_spectrum([1.0, 0.9999, 0.3, 0.2]),
    "two equal": with_spectrum([2.0, 2.0, 0.1]),
    "ill-conditioned": with_spectrum([10.0 ** -(i / 5) for i in range(40)]),
    "rank 1": drawn(50, 1) @ drawn(1, 30, seed=1),
    "small numbers": 1e-15 * drawn(20, 20),
}


def norms(matrix: Tensor) -> tuple[float, float]:
    found = norms_of(matrix)
    return math.sqrt(number(found.squares)), number(found.spectral)


def assert_norms(found: tuple[float, float], matrix: np.ndarray) -> None:
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    assert found[0] == pytest.approx(np.linalg.norm(values), rel=1e-6)
    assert values[0] * (1 - NEAR) <= found[1] <= values[0] * (1 + ROUNDING)


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_the_norms_are_those_of_a_decomposition(matrix: np.ndarray) -> None:
    assert_norms(norms(Tensor(matrix)), matrix)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_precision_is_read_as_it_is(dtype: ms.Type) -> None:
    matrix = Tensor(drawn(50, 40)).to(dtype)
    assert_norms(norms(matrix), exact(matrix))


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-37])
def test_spectral_norms_of_any_size_are_recorded(size: float) -> None:
    matrix = np.float32(size) * drawn(20, 20)
    assert norms(Tensor(matrix))[1] == pytest.approx(np.linalg.norm(matrix.astype(np.float64), 2), rel=NEAR)


@pytest.mark.parametrize("where", ["host"], indirect=True)
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_on_the_host_frobenius_norms_leave_the_range_that_squares_have_in_float32(size: float) -> None:
    matrix = np.float32(size) * drawn(20, 20)
    assert norms(Tensor(matrix))[0] == pytest.approx(np.linalg.norm(matrix.astype(np.float64)), rel=1e-6)


def test_a_transposed_matrix_is_read_where_it_lies() -> None:
    matrix = drawn(30, 50)
    assert_norms(norms(mint.transpose(Tensor(matrix), 0, 1)), matrix)


@pytest.mark.parametrize("block", [1, 50])
def test_a_matrix_that_is_read_in_blocks_is_the_same(where: str, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    matrix = drawn(13, 10)
    arithmetic = mindspore_arithmetic.HOST if where == "host" else mindspore_arithmetic.DEVICE
    monkeypatch.setattr(arithmetic, "block", block)
    assert_norms(norms(Tensor(matrix)), matrix)
    assert number(similarity_of_rows(Tensor(matrix)).cosines) / (13 * 12) == pytest.approx(similarity(matrix), rel=1e-5)


def test_a_matrix_of_zeros_has_norms_of_zero() -> None:
    assert norms(Tensor(np.zeros((5, 7), np.float32))) == (0.0, 0.0)


def test_the_frobenius_norm_of_what_is_not_finite_is_not_finite() -> None:
    for value in (math.nan, math.inf):
        assert not math.isfinite(number(norms_of(Tensor([[1.0, value]])).squares))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 5), (8, 64), (16, 1)])
def test_rows_are_as_alike_as_their_cosines(shape: tuple[int, int], dtype: ms.Type, where: str) -> None:
    weight = Tensor(drawn(*shape) + np.float32(0.3)).to(dtype)
    found = similarity_of_rows(weight)
    assert found.pairs == shape[0] * (shape[0] - 1)
    rounding = 1e-9 if where == "host" else 1e-5
    assert number(found.cosines) / found.pairs == pytest.approx(similarity(exact(weight)), rel=rounding, abs=rounding)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_cosines_do_not_depend_on_the_size_of_rows(size: float) -> None:
    weight = np.abs(drawn(6, 10))
    expected = similarity(weight.astype(np.float64))
    weight[1] *= np.float32(size)
    assert number(similarity_of_rows(Tensor(weight)).cosines) / 30 == pytest.approx(expected, rel=1e-5)


def test_a_row_of_zeros_is_like_no_other() -> None:
    weight = np.ones((3, 4), np.float32)
    weight[0] = 0
    assert number(similarity_of_rows(Tensor(weight)).cosines) == pytest.approx(2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_not_hidden(value: float) -> None:
    weight = np.ones((3, 4), np.float32)
    weight[1, 1] = value
    assert math.isnan(number(similarity_of_rows(Tensor(weight)).cosines))
