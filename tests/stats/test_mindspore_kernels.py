"""Both kernels of MindSpore, held to the float64 reference of all kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import kernel_corpus as corpus
import mindspore as ms
import numpy as np
import pytest
import torch
from evidence import PROVES
from mindspore import COOTensor, Parameter, Tensor, mint
from mindspore.common.initializer import initializer
from reference import assert_agrees, check_sums_of, checked, derived, normal

from monitor.failures import EarlierFailure
from monitor.stats.mindspore.kernels import MindSporeDeviceKernel, MindSporeHostKernel, combined
from monitor.stats.partials import COLUMNS, COUNT, MAX, MIN, SMALLS, WRITES

EPS = 1e-8
SMALL_PIECE = 1 << 12
Reduce = Callable[[Tensor], np.ndarray]


def host(eps: float = EPS, **wanted: bool) -> Reduce:
    def reduce(x: Tensor) -> np.ndarray:
        page = np.zeros((3, len(COLUMNS)))
        assert MindSporeHostKernel(eps, **wanted).reduce_into(x, page, 1)
        assert not page[[0, 2]].any()
        return page[1]

    return reduce


def device(eps: float = EPS, **wanted: bool) -> Reduce:
    kernel = MindSporeDeviceKernel(eps, piece=SMALL_PIECE, **wanted)
    return lambda x: combined(kernel.reduce(x).asnumpy(), kernel.words(x))


@pytest.fixture(params=[host, device], ids=["host", "device"])
def make(request: pytest.FixtureRequest) -> Callable[..., Reduce]:
    return request.param


@pytest.fixture
def reduce(make: Callable[..., Reduce]) -> Reduce:
    return make()


def numbers(x: Tensor) -> np.ndarray:
    """What a tensor holds, as numpy reads it."""
    return (x.to(ms.float32) if x.dtype == ms.bfloat16 else x).asnumpy()


REALS = [ms.float64, ms.float32, ms.float16, ms.bfloat16]
INTEGERS = [ms.int8, ms.int16, ms.int32, ms.int64, ms.uint8, ms.uint16, ms.uint32]


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_every_real_dtype_agrees_with_the_reference(reduce: Reduce, dtype: ms.Type) -> None:
    x = Tensor(normal(1300, 7)).to(dtype)
    assert_agrees(reduce(x), numbers(x), EPS)


@pytest.mark.parametrize("of", [corpus.shapes, corpus.distributions, corpus.magnitudes, corpus.non_finite])
def test_kurtosis_is_that_of_the_finite_elements(make: Callable[..., Reduce], of: Callable[[], corpus.Corpus]) -> None:
    cases = [
        case.x
        for name, case in of().items()
        if case.x.dtype in (torch.float32, torch.float64) and not name.endswith("of 1e-38")  # the device flushes those to zero
    ]
    for x in cases if PROVES else cases[::9]:  # the device compiles its operators for every shape
        assert_agrees(make(higher=True)(Tensor(x.numpy())), x, EPS, 1e-5, higher=True)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_every_real_dtype_has_kurtosis(make: Callable[..., Reduce], dtype: ms.Type) -> None:
    x = Tensor(np.exp(normal(1300, 7))).to(dtype)
    assert_agrees(make(higher=True)(x), numbers(x), EPS, higher=True)


def test_equal_elements_and_no_elements_have_no_kurtosis_and_nor_has_a_kernel_that_was_not_asked(
    make: Callable[..., Reduce],
) -> None:
    same = [np.full(5000, 0.1, np.float32), np.ones(1), np.full(3, np.nan), np.array([0.1, np.inf, 0.1, 0.1], np.float32)]
    rows = [make(higher=True)(Tensor(x)) for x in same] + [make()(Tensor(normal(5000)))]
    assert ["kurtosis" in derived(row) for row in rows] == [False] * 5


@pytest.mark.parametrize("dtype", [*REALS, *INTEGERS, ms.bool_, ms.complex64], ids=str)
def test_check_sums_are_those_of_the_words_in_memory(make: Callable[..., Reduce], dtype: ms.Type) -> None:
    x = Tensor(100 * normal(1300, 7)).to(dtype)
    assert checked(make(check_sums=True)(x)) == check_sums_of(raw(x), x.itemsize)
    assert checked(make()(x)) == (0, 0)


def test_no_elements_have_no_check_sums(make: Callable[..., Reduce]) -> None:
    assert checked(make(check_sums=True)(Tensor(np.zeros((0, 3), np.float32)))) == (0, 0)


def raw(x: Tensor) -> bytes:
    return (x.view(ms.int16) if x.dtype == ms.bfloat16 else x).asnumpy().tobytes()


def test_complex_numbers_are_measured_by_magnitude(reduce: Reduce) -> None:
    x = Tensor((normal(300, 7) + 1j * normal(300, 7, seed=1)).astype(np.complex64))
    assert_agrees(reduce(x), numbers(x), EPS)


@pytest.mark.parametrize("dtype", [*INTEGERS, ms.bool_], ids=str)
def test_integers_and_bool_are_measured_as_numbers(reduce: Reduce, dtype: ms.Type) -> None:
    x = Tensor(np.arange(200) % 7).to(dtype)
    assert_agrees(reduce(x), numbers(x), EPS)


def test_extremes_of_integers_are_exact_where_float32_is_not(reduce: Reduce) -> None:
    row = reduce(Tensor(np.array([2**40 + 1, -(2**33) - 3, 5])))
    assert (row[MIN], row[MAX]) == (-(2**33) - 3, 2**40 + 1)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e-5, 1.0, 1e5, 1e18, 1e30, 3e37])
def test_any_magnitude_of_float32_keeps_its_norm(reduce: Reduce, magnitude: float) -> None:
    x = Tensor(normal(SMALL_PIECE + 5) * np.float32(magnitude))
    assert_agrees(reduce(x), numbers(x), EPS)


@pytest.mark.parametrize("magnitude", [1e-300, 1e-160, 1e150, 1e300])
def test_a_finite_float64_tensor_has_a_finite_norm_that_is_not_zero(reduce: Reduce, magnitude: float) -> None:
    x = Tensor(normal(5000).astype(np.float64) * magnitude)
    assert_agrees(reduce(x), numbers(x), EPS)


def test_a_million_equal_elements() -> None:
    x = Tensor(np.full(1_000_000, 0.1, dtype=np.float32))
    for row in (host()(x), combined(MindSporeDeviceKernel(EPS).reduce(x).asnumpy())):
        assert_agrees(row, numbers(x), EPS)


def test_the_spread_survives_a_mean_ten_thousand_times_larger(reduce: Reduce) -> None:
    x = (100 + 0.01 * normal(20_000)).astype(np.float32)
    assert derived(reduce(Tensor(x)))["std"] == pytest.approx(float(x.astype(np.float64).std()), rel=1e-5)


@pytest.mark.parametrize("eps", [1e-25, 1e-8, 0.1, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_eps_is_compared_without_rounding(make: Callable[..., Reduce], eps: float, dtype: type) -> None:
    near = dtype(eps)
    x = np.array([near, np.nextafter(near, dtype(0)), -near, near * 2, near * 0], dtype=dtype)
    assert make(eps)(Tensor(x))[SMALLS] == (np.abs(x.astype(np.float64)) < eps).sum()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_a_non_finite_value_is_counted_and_hides_nothing_else(reduce: Reduce, bad: float, dtype: ms.Type) -> None:
    values = normal(3000)
    values[17] = bad
    x = Tensor(values).to(dtype)
    row = reduce(x)
    assert_agrees(row, numbers(x), EPS)
    found, kept = dict(zip(COLUMNS, row, strict=True)), numbers(x)[np.isfinite(numbers(x))].astype(np.float64)
    assert (found["min"], found["max"]) == (kept.min(), kept.max())
    assert found["sumsq"] == pytest.approx(np.square(kept).sum())


def test_all_kinds_of_non_finite_values_are_distinguished(reduce: Reduce) -> None:
    row = reduce(Tensor([math.nan, math.inf, math.inf, -math.inf, -math.inf, -math.inf, 2.0], ms.float32))
    found = dict(zip(COLUMNS, row, strict=True))
    assert (found["nans"], found["posinfs"], found["neginfs"], found["count"]) == (1, 2, 3, 7)
    assert (found["min"], found["max"], found["sum"]) == (2.0, 2.0, 2.0)


def test_nothing_but_nan_leaves_no_extremes(reduce: Reduce) -> None:
    found = derived(reduce(Tensor(np.full(5, math.nan, dtype=np.float32))))
    assert (found["nans"], found["zeros"], math.isnan(found["min"]), math.isnan(found["max"])) == (5, 0, True, True)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_an_empty_tensor_is_a_measurement_without_mean_or_extremes(reduce: Reduce, shape: tuple[int, ...]) -> None:
    row = reduce(Tensor(np.empty(shape, dtype=np.float32)))
    assert (row[WRITES], row[COUNT]) == (1, 0)
    assert derived(row) == {"norm": 0.0, "nans": 0.0, "infs": 0.0}


VIEWS = {
    "zero-dim": lambda x: x[0, 0, 0],
    "transposed": lambda x: x.transpose(2, 1, 0),
    "every second": lambda x: x[::2, 1:, ::3],
    "narrow rows": lambda x: mint.narrow(x, 2, 3, 2),
    "expanded": lambda x: x[:, :1].expand((20, 50, 30)),
    "parameter": lambda x: Parameter(x.copy(), name="weight"),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_any_view_is_read_as_it_stands(reduce: Reduce, view: Callable[[Tensor], Tensor]) -> None:
    base = Tensor(normal(20, 9, 30))
    x = view(base)
    assert_agrees(reduce(x), numbers(x), EPS)
    assert np.array_equal(base.asnumpy(), normal(20, 9, 30))


def test_what_has_no_data_has_no_row_and_is_not_initialized() -> None:
    unborn = initializer("normal", (3,), ms.float32)
    sparse = COOTensor(Tensor([[0, 1]], ms.int64), Tensor([1.0], ms.float32), (3, 4))
    page = np.zeros((1, len(COLUMNS)))
    for x in (unborn, sparse):
        assert not MindSporeHostKernel(EPS).reduce_into(x, page, 0)
        assert MindSporeDeviceKernel(EPS).reduce(x) is None
    assert unborn.has_init
    assert not page.any()


def test_what_went_wrong_in_training_is_raised_by_the_call_that_waits() -> None:
    x = Tensor(normal(4))
    mint.mul(x, 2.0).asnumpy()
    mint.zeros_like(x)  # has no kernel on CPU, which comes out when something is waited for, and only once
    with pytest.raises(EarlierFailure) as met:
        MindSporeHostKernel(EPS).reduce_into(x, np.zeros((1, len(COLUMNS))), 0)
    assert "unregistered" in str(met.value.error)
    assert MindSporeHostKernel(EPS).reduce_into(x, np.zeros((1, len(COLUMNS))), 0)


def test_the_device_kernel_does_not_wait() -> None:
    x = Tensor(normal(4))
    mint.mul(x, 2.0).asnumpy()
    mint.zeros_like(x)
    rows = MindSporeDeviceKernel(EPS).reduce(x)  # would raise if it waited
    with pytest.raises(RuntimeError, match="unregistered"):
        x.asnumpy()
    assert rows is not None


def test_reading_draws_no_random_numbers_and_records_nothing_for_gradients(reduce: Reduce) -> None:
    state, weight = ms.get_rng_state().asnumpy().copy(), Parameter(Tensor(normal(6)), name="weight")

    def forward(x: Tensor) -> Tensor:
        y = x * weight
        reduce(y)
        reduce(weight)
        return (y * y).sum()

    loss, gradient = ms.value_and_grad(forward, None, [weight])(Tensor(normal(6, seed=1)))
    w, x = normal(6).astype(np.float64), normal(6, seed=1).astype(np.float64)
    assert float(loss.asnumpy()) == pytest.approx(np.square(w * x).sum(), rel=1e-5)
    np.testing.assert_allclose(gradient[0].asnumpy(), 2 * w * x * x, rtol=1e-5)
    assert np.array_equal(state, ms.get_rng_state().asnumpy())
