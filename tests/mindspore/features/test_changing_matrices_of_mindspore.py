"""Spectral norms of matrices that change from step to step, on the host and as a device computes them."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from evidence import sampled
from mindspore import Tensor
from numpy_definitions import drawn, number

from monitor.mindspore.features import matrices
from monitor.mindspore.features.matrices import norms_of
from monitor.recording.features import krylov

pytestmark = pytest.mark.usefixtures("where")


def norms(matrix: Tensor) -> tuple[float, float]:
    found = norms_of(matrix)
    return number(found.squares), number(found.spectral)


SEQUENCES = {
    "the second element of a diagonal overtakes": [np.diag(np.float32([1.0, 0.6 * step, *[0.0] * 30])) for step in range(4)],
    "one element flips": [drawn(48, 40), np.where(np.eye(48, 40) * np.arange(40) == 3, np.float32(400), drawn(48, 40))],
    "it was not finite once": [drawn(9, 5), drawn(9, 5) * np.float32(math.nan), drawn(9, 5)],
    "it jumps": [drawn(48, 40, seed=seed) for seed in range(4)],
    "it has another shape": [drawn(20, 30), drawn(20, 31, seed=5)],
}


@pytest.mark.parametrize("sequence", sampled([pytest.param(one, id=name) for name, one in SEQUENCES.items()], 0, 2, 4))
def test_a_direction_that_was_not_there_before_is_found_at_once(sequence: list[np.ndarray]) -> None:
    for matrix in sequence:
        found = norms_of(Tensor(matrix))
        expected = np.linalg.norm(matrix.astype(np.float64), 2) if np.isfinite(matrix).all() else math.nan
        assert number(found.spectral) == pytest.approx(expected, rel=krylov.WITHIN, nan_ok=True)
        assert number(found.matrices) == 1


def test_a_spectral_norm_that_is_not_certain_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "MOST", 2)
    monkeypatch.setattr(matrices, "UNREAD", 2)
    assert number(norms_of(Tensor(drawn(100, 100))).matrices) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_spectral_norm_of_what_is_not_finite_is_nan(value: float) -> None:
    broken = drawn(9, 5)
    broken[3, 2] = value
    assert math.isnan(number(norms_of(Tensor(broken)).spectral))


def test_the_random_numbers_of_the_program_stay_as_they_are() -> None:
    ms.set_seed(3)
    numpys, own = np.random.get_state(), ms.get_rng_state()
    norms_of(Tensor(drawn(8, 8)))
    assert all(np.array_equal(a, b) for a, b in zip(numpys, np.random.get_state(), strict=True))
    assert np.array_equal(own.asnumpy(), ms.get_rng_state().asnumpy())


def test_equal_matrices_have_equal_estimates_on_every_rank() -> None:
    assert norms(Tensor(drawn(40, 40))) == norms(Tensor(drawn(40, 40)))
