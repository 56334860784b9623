"""A matrix is followed from step to step, on the host and as a device computes it."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from numpy_definitions import drawn, number

from monitor.mindspore.features import matrices
from monitor.mindspore.features.matrices import FollowedMatrix

pytestmark = pytest.mark.usefixtures("where")

NEAR = 5e-3
"""How far below the spectral norm the first estimate may be."""


def norms(matrix: Tensor) -> tuple[float, float]:
    found = FollowedMatrix().norms(matrix)
    return number(found.squares), number(found.spectral)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_spectral_norm_of_what_is_not_finite_is_nan_and_the_matrix_is_followed_on(value: float) -> None:
    matrix, followed = drawn(9, 5), FollowedMatrix()
    followed.norms(Tensor(matrix))
    broken = matrix.copy()
    broken[3, 2] = value
    assert math.isnan(number(followed.norms(Tensor(broken)).spectral))
    assert number(followed.norms(Tensor(matrix)).spectral) == pytest.approx(np.linalg.norm(matrix, 2), rel=NEAR)


def test_a_matrix_that_jumps_is_found_again(where: str) -> None:
    followed = FollowedMatrix()
    for seed in range(4):
        matrix = drawn(48, 40, seed=seed)
        found = number(followed.norms(Tensor(matrix)).spectral)
        # On a device nobody may look whether three products were enough: one that jumps is told a step later.
        assert found == pytest.approx(np.linalg.norm(matrix, 2), rel=NEAR if where == "host" else 0.2)


def test_a_matrix_that_trains_is_followed_with_few_products(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    times = matrices._Scaled.times

    def counted(self: matrices._Scaled, vector: object) -> object:
        taken[-1] += 1
        return times(self, vector)

    monkeypatch.setattr(matrices._Scaled, "times", counted)
    matrix, followed = drawn(40, 40), FollowedMatrix()
    for step in range(3):
        taken.append(0)
        found = number(followed.norms(Tensor(matrix)).spectral)
        assert found == pytest.approx(np.linalg.norm(matrix, 2), rel=NEAR)
        matrix = matrix + np.float32(1e-3) * drawn(40, 40, seed=1 + step)
    assert taken == [matrices.FIRST, *[1 if where == "host" else matrices.LATER_THERE] * 2]


def test_a_matrix_that_is_replaced_by_one_of_another_shape_is_found_anew() -> None:
    followed = FollowedMatrix()
    followed.norms(Tensor(drawn(20, 30)))
    other = drawn(20, 31, seed=5)
    assert number(followed.norms(Tensor(other)).spectral) == pytest.approx(np.linalg.norm(other, 2), rel=NEAR)


def test_the_random_numbers_of_the_program_stay_as_they_are() -> None:
    ms.set_seed(3)
    numpys, own = np.random.get_state(), ms.get_rng_state()
    FollowedMatrix().norms(Tensor(drawn(8, 8)))
    assert all(np.array_equal(a, b) for a, b in zip(numpys, np.random.get_state(), strict=True))
    assert np.array_equal(own.asnumpy(), ms.get_rng_state().asnumpy())


def test_equal_matrices_have_equal_estimates_on_every_rank() -> None:
    assert norms(Tensor(drawn(40, 40))) == norms(Tensor(drawn(40, 40)))
