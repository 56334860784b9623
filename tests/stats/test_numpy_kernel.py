"""The kernel for arrays, held to the float64 reference of all kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_contract import KernelContract, Make
from kernel_corpus import FLOAT8, Corpus
from reference import assert_agrees, derived, normal

from monitor.stats.host.array_kernel import CHUNK, VARIABLE, NumpyKernel
from monitor.stats.partials import COLUMNS, M2

EPS = 1e-8
OF_TORCH_ALONE = ("bfloat16", "complex32", *map(str, FLOAT8))


@pytest.fixture(params=[True, False], ids=["native", "portable"], autouse=True)
def with_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is of arrays that the native kernel reads where it can, and of arrays that numpy reads."""
    if not request.param:
        monkeypatch.setenv(VARIABLE, "0")


def reduce(x: np.ndarray, eps: float = EPS, **wanted: bool) -> np.ndarray:
    page = np.zeros((3, len(COLUMNS)))
    assert NumpyKernel(eps, **wanted).reduce_into(x, page, 1)
    assert not page[[0, 2]].any()
    return page[1]


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().resolve_conj().resolve_neg().numpy()


class TestArrayKernel(KernelContract):
    def held(self, cases: Corpus) -> Corpus:
        """Without the dtypes that numpy has not. Magnitudes of complex numbers are those of numpy: torch rounds otherwise."""
        arrays = {name: case for name, case in cases.items() if not str(case.x.dtype).endswith(OF_TORCH_ALONE)}
        own = {name: replace(case, elements=array(case.x)) for name, case in arrays.items() if case.x.is_complex()}
        return arrays | own

    @pytest.fixture
    def make(self) -> Make:
        return lambda eps: lambda x: reduce(array(x), eps)

    @pytest.fixture
    def make_higher(self) -> Make:
        return lambda eps: lambda x: reduce(array(x), eps, higher=True)

    @pytest.fixture
    def make_checked(self) -> Make:
        return lambda eps: lambda x: reduce(array(x), eps, check_sums=True)


def test_every_float16_is_what_numpy_says_it_is() -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):  # some of the NaN are signalling ones
        assert_agrees(reduce(x), x.astype(np.float64), EPS)


def test_what_is_no_number_has_no_row() -> None:
    page = np.zeros((1, len(COLUMNS)))
    for x in (np.array(["a"]), np.zeros(3, dtype=np.dtype([("a", np.float32)])), np.array([None])):
        assert not NumpyKernel(EPS).reduce_into(x, page, 0)
    assert not page.any()


@pytest.mark.parametrize("size", [1, 17, 3 * CHUNK + 5])
def test_subnormal_numbers_keep_their_norm(size: int) -> None:
    x = normal(size) * np.float32(1e-44)
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


@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_the_spread_survives_a_mean_that_is_far_larger(mean: float) -> None:
    x = (mean + 0.01 * normal(200_000)).astype(np.float32)
    assert derived(reduce(x))["std"] == pytest.approx(float(x.astype(np.longdouble).std()), rel=1e-9)


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
