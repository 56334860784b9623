"""The kernel for arrays, held to the float64 reference of all kernels."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
from reference import assert_agrees, derived, normal

from monitor.stats.host.array_kernel import CHUNK, NumpyKernel
from monitor.stats.host.native import VARIABLE
from monitor.stats.partials import COLUMNS, COUNT, M2, SMALLS, WRITES

EPS = 1e-8
REALS = [np.float16, np.float32, np.float64]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]


@pytest.fixture(params=[True, False], ids=["native", "portable"], autouse=True)
def with_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is of arrays that the native kernel reads where it can, and of arrays that numpy reads."""
    if not request.param:
        monkeypatch.setenv(VARIABLE, "0")


def reduce(x: np.ndarray, eps: float = EPS) -> np.ndarray:
    page = np.zeros((3, len(COLUMNS)))
    assert NumpyKernel(eps).reduce_into(x, page, 1)
    assert not page[[0, 2]].any()
    return page[1]


@pytest.mark.parametrize("dtype", REALS)
def test_every_real_dtype_agrees_with_the_reference(dtype: type) -> None:
    x = normal(300, 7).astype(dtype)
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_are_measured_by_magnitude(dtype: type) -> None:
    x = (normal(300, 7) + 1j * normal(300, 7, seed=1)).astype(dtype)
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("dtype", [*INTEGERS, np.bool_])
def test_integers_and_bool_are_measured_as_numbers(dtype: type) -> None:
    x = (np.arange(200) % 7).astype(dtype)
    assert_agrees(reduce(x), x, EPS)


def test_every_float16_is_what_numpy_says_it_is() -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):  # some of the NaN are signalling ones
        assert_agrees(reduce(x), x.astype(np.float64), EPS)


def test_what_is_no_number_has_no_row() -> None:
    page = np.zeros((1, len(COLUMNS)))
    for x in (np.array(["a"]), np.zeros(3, dtype=np.dtype([("a", np.float32)])), np.array([None])):
        assert not NumpyKernel(EPS).reduce_into(x, page, 0)
    assert not page.any()


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1e-20, 1e-5, 1.0, 1e5, 1e18, 1e30, 3e37])
@pytest.mark.parametrize("size", [1, 17, 3 * CHUNK + 5])
def test_any_magnitude_of_float32_keeps_its_norm(magnitude: float, size: int) -> None:
    x = normal(size) * np.float32(magnitude)
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("magnitude", [1e-300, 1e-160, 1e150, 1e300])
@pytest.mark.parametrize("size", [5000, CHUNK + 3])
def test_a_finite_float64_tensor_has_a_finite_norm_that_is_not_zero(magnitude: float, size: int) -> None:
    x = normal(size).astype(np.float64) * magnitude
    assert_agrees(reduce(x), x, EPS)


def test_a_million_equal_elements_have_no_spread() -> None:
    x = np.full(1_000_000, 0.1, dtype=np.float32)
    row = reduce(x)
    assert_agrees(row, x, EPS)
    assert row[M2] == pytest.approx(0, abs=1e-20)


def test_scales_that_differ_by_sixty_orders_of_magnitude() -> None:
    x = (normal(100_000) * np.logspace(-30, 30, 100_000)).astype(np.float32)
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_the_spread_survives_a_mean_that_is_far_larger(mean: float) -> None:
    x = (mean + 0.01 * normal(200_000)).astype(np.float32)
    assert derived(reduce(x))["std"] == pytest.approx(float(x.astype(np.longdouble).std()), rel=1e-9)


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_small_elements_are_counted_exactly(share: float) -> None:
    x = normal(250_000) * (np.random.default_rng(1).random(250_000) >= share)
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("eps", [1e-300, 1e-25, 1e-8, 0.1, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_eps_is_compared_without_rounding(eps: float, dtype: type) -> None:
    near = dtype(eps)
    x = np.array([near, np.nextafter(near, dtype(0)), -near, near * 2, near * 0], dtype=dtype)
    assert reduce(x, eps)[SMALLS] == (np.abs(x.astype(np.float64)) < eps).sum()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", REALS)
def test_a_non_finite_value_is_counted_and_hides_nothing_else(bad: float, dtype: type) -> None:
    x = normal(3000).astype(dtype)
    x[17] = bad
    row = reduce(x)
    assert_agrees(row, x, EPS)
    found = dict(zip(COLUMNS, row, strict=True))
    kept = x[np.isfinite(x)].astype(np.float64)
    assert (found["min"], found["max"]) == (kept.min(), kept.max())
    assert found["sumsq"] == pytest.approx(np.square(kept).sum())


def test_all_kinds_of_non_finite_values_are_told_apart() -> None:
    x = np.array([math.nan, math.inf, math.inf, -math.inf, -math.inf, -math.inf, 2.0])
    found = dict(zip(COLUMNS, reduce(x), strict=True))
    assert (found["nans"], found["posinfs"], found["neginfs"], found["count"]) == (1, 2, 3, 7)
    assert (found["min"], found["max"], found["sum"]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_an_empty_array_is_a_measurement_without_mean_or_extremes(shape: tuple[int, ...]) -> None:
    row = reduce(np.empty(shape))
    assert (row[WRITES], row[COUNT]) == (1, 0)
    assert derived(row) == {"norm": 0.0, "nans": 0.0, "infs": 0.0}


VIEWS = {
    "zero-dim": lambda x: np.array(x[0, 0, 0]),
    "transposed": lambda x: x.transpose(2, 0, 1),
    "every second": lambda x: x[::2, 1:, ::3],
    "reversed": lambda x: x[::-1],
    "repeated": lambda x: np.broadcast_to(x[:, :1], (70, 50, 30)),
    "read-only": lambda x: np.broadcast_to(x, x.shape),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_any_view_is_read_as_it_stands(view: Callable[[np.ndarray], np.ndarray], dtype: type) -> None:
    x = view((100 * normal(70, 50, 30)).astype(dtype))
    before = x.copy()
    assert_agrees(reduce(x), x, EPS)
    assert np.array_equal(before, x)


def test_threads_do_not_share_what_they_compute_with() -> None:
    kernel, arrays = NumpyKernel(EPS), [normal(5 * CHUNK, seed=seed) for seed in range(4)]
    rows: dict[int, object] = {}

    def work(place: int) -> None:
        for _ in range(5):
            rows[place] = kernel.reduce(arrays[place])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, x in enumerate(arrays):
        assert np.array_equal(rows[place], NumpyKernel(EPS).reduce(x))
