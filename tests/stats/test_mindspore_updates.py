"""What is read of two tensors of MindSpore's at once, against float64, on the host and as a device computes it."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint

from monitor.failures import EarlierFailure
from monitor.stats.histograms import UNIT_UPPER
from monitor.stats.host.array_kernel import CHUNK, NumpyKernel
from monitor.stats.mindspore import tensors, updates as mindspore_updates
from monitor.stats.mindspore.updates import (
    MindSporeDeviceSigned,
    MindSporeHostSigned,
    adam_vectors,
    agreement,
    snapshot,
    squares_of_update,
)
from monitor.stats.partials import COLUMNS, COUNT, EMPTY, M2, M3, M4, MAX, MIN, NANS, NEGINFS, POSINFS, SMALLS, SUM, SUMSQ

EPS = 1e-8
FLOATS = [ms.float32, ms.float16, ms.bfloat16, ms.float64]
PIECE = 1000


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tensors, "on_the_host", lambda: request.param == "host")
    monkeypatch.setattr(mindspore_updates, "PIECE", PIECE)
    return request.param


pytestmark = pytest.mark.usefixtures("where")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def exact(x: Tensor) -> np.ndarray:
    return (x.to(ms.float32) if x.dtype == ms.bfloat16 else x).asnumpy().astype(np.float64)


def number(x: object) -> float:
    return float(x.asnumpy()) if isinstance(x, Tensor) else float(x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 5), "pieces", (0,), ()])
def test_signs_are_compared_element_by_element(shape: tuple[int, ...] | str, dtype: ms.Type, where: str) -> None:
    if isinstance(shape, str):
        shape = (CHUNK + 3 if where == "host" else 2 * PIECE + 3,)
    gradient, momentum = (Tensor(np.asarray(normal(*shape, seed=seed))).to(dtype) for seed in (0, 1))
    expected = int(((exact(gradient) > 0) == (exact(momentum) > 0)).sum())
    assert expected == number(agreement(gradient, momentum))
    assert gradient.size - expected == number(agreement(gradient, momentum, uphill=True))


def test_both_zero_agree_one_zero_does_not_and_nan_agrees_with_nothing() -> None:
    gradient = Tensor(np.array([0.0, 0.0, 1e-37, np.nan, np.nan, -1.0], np.float32))
    momentum = Tensor(np.array([-0.0, 1.0, 1e-37, np.nan, 1.0, np.nan], np.float32))
    assert number(agreement(gradient, momentum)) == 2
    assert number(agreement(gradient, momentum, uphill=True)) == 1


def test_tensors_that_lie_differently_in_memory_are_compared_by_place() -> None:
    gradient, momentum = normal(4, 6), normal(6, 4, seed=1)
    expected = ((gradient > 0) == (momentum.T > 0)).sum()
    assert expected == number(agreement(Tensor(gradient), mint.transpose(Tensor(momentum), 0, 1)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-2])
def test_squares_of_updates_are_those_of_float64(dtype: ms.Type, scale: float, where: str) -> None:
    before = Tensor(normal(2300) * np.float32(scale)).to(dtype)
    after = Tensor((exact(before) + normal(2300, seed=1) * scale * 0.01).astype(np.float32)).to(dtype)
    update, weight = squares_of_update(after, snapshot(before))
    # On a device the difference of two float64 is that of what they are in float32, a hundred times as great.
    rounding = 1e-12 if where == "host" else 1e-4 if dtype == ms.float64 else 1e-5
    assert number(update) == pytest.approx(np.square(exact(after) - exact(before)).sum(), rel=rounding)
    assert number(weight) == pytest.approx(np.square(exact(before)).sum(), rel=rounding)


@pytest.mark.parametrize("where", ["host"], indirect=True)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_on_the_host_squares_leave_the_range_of_float32(scale: float) -> None:
    before, after = normal(300) * np.float32(scale), normal(300, seed=1) * np.float32(scale)
    update, weight = squares_of_update(Tensor(after), snapshot(Tensor(before)))
    assert update == pytest.approx(np.square(after.astype(np.float64) - before).sum(), rel=1e-12)
    assert weight == pytest.approx(np.square(before.astype(np.float64)).sum(), rel=1e-12)


def test_what_is_kept_stays_as_it_was_when_an_optimizer_writes() -> None:
    weight = Tensor(normal(50))
    before = snapshot(weight)
    weight.copy_(Tensor(np.zeros(50, np.float32)))
    update, squares = squares_of_update(weight, before)
    assert number(update) == number(squares) == pytest.approx(np.square(normal(50).astype(np.float64)).sum(), rel=1e-6)


def test_what_is_compared_stays_as_it_is() -> None:
    mean, square = Tensor(normal(50)), Tensor(np.abs(normal(50, seed=1)))
    before = mean.asnumpy().copy(), square.asnumpy().copy()
    squares_of_update(mean, snapshot(square))
    agreement(mean, square)
    adam_vectors(mean, square, 0.1, 0.2, 1e-8, EPS)
    assert np.array_equal(before[0], mean.asnumpy())
    assert np.array_equal(before[1], square.asnumpy())


def counted(where: str, *chunks: np.ndarray) -> tuple[dict[int, float], list[int]]:
    counts = MindSporeHostSigned(NumpyKernel(EPS)) if where == "host" else MindSporeDeviceSigned(EPS)
    for chunk in chunks:
        counts.add(chunk if where == "host" else Tensor(chunk))
    return told(counts)


def told(counts: MindSporeHostSigned | MindSporeDeviceSigned) -> tuple[dict[int, float], list[int]]:
    histogram = counts.histogram()
    every = (histogram if isinstance(histogram, np.ndarray) else histogram.asnumpy()).astype(int).tolist()
    return {column: number(one) for column, one in counts.numbers().items()}, every


def bins(x: np.ndarray) -> list[int]:
    return np.bincount(np.searchsorted(UNIT_UPPER, x.astype(np.float64)), minlength=len(UNIT_UPPER)).tolist()


def test_kurtosis_is_that_of_all_chunks(where: str) -> None:
    counts = MindSporeHostSigned(NumpyKernel(EPS, higher=True)) if where == "host" else MindSporeDeviceSigned(EPS, higher=True)
    x = np.concatenate([3 + normal(5000) ** 3, normal(700) - 20, np.zeros(5, np.float32), np.array([np.nan], np.float32)])
    for chunk in np.array_split(x, 7):
        counts.add(chunk if where == "host" else Tensor(chunk))
    numbers, _ = told(counts)
    kept = x[np.isfinite(x)].astype(np.float64)
    off = kept - kept.mean()
    moments = {M2: (off**2).sum(), M3: (off**3).sum(), M4: (off**4).sum()}
    assert {column: numbers[column] for column in moments} == {c: pytest.approx(m, rel=1e-5) for c, m in moments.items()}


def test_bins_hold_what_is_at_most_their_upper_end(where: str) -> None:
    edges = [0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 1.0000001, -2.0, 1 / 32, 33 / 32, 1e30, -1e30]
    x = np.concatenate([normal(5000), np.array(edges, np.float32)])
    assert bins(x) == counted(where, x)[1]


@pytest.mark.parametrize("shift", [0.0, 1.0, 100.0])
def test_partials_are_those_of_all_chunks(where: str, shift: float) -> None:
    x = np.concatenate([normal(5000) + np.float32(shift), np.zeros(5, np.float32)])
    numbers, _ = counted(where, *np.split(x, range(999, 5005, 999)))
    wide = x.astype(np.float64)
    expected = {
        COUNT: 5005.0,
        SMALLS: 5.0,
        MIN: wide.min(),
        MAX: wide.max(),
        SUM: wide.sum(),
        SUMSQ: np.square(wide).sum(),
        M2: np.square(wide - wide.mean()).sum(),
    }
    assert expected == {column: pytest.approx(numbers[column], rel=2e-6) for column in expected}


def test_numbers_that_are_all_the_same_are_not_spread(where: str) -> None:
    assert counted(where, *[np.full(777, 0.1, np.float32)] * 3)[0][M2] == pytest.approx(0.0, abs=1e-9)


def test_nan_and_inf_are_counted_and_hide_nothing(where: str) -> None:
    x = np.array([math.nan, math.inf, -math.inf, -math.inf, 0.5, -0.25], np.float32)
    numbers, histogram = counted(where, x)
    expected = {COUNT: 6, NANS: 1, POSINFS: 1, NEGINFS: 2, MIN: -0.25, MAX: 0.5, SUM: 0.25}
    assert expected == {column: numbers[column] for column in expected}
    assert sum(histogram) == 2


def test_of_nothing_there_are_the_partials_of_nothing(where: str) -> None:
    numbers, histogram = counted(where)
    assert EMPTY[1:] == tuple(numbers[column] for column in range(1, len(COLUMNS)))
    assert sum(histogram) == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("corrections", ["numbers", "tensors"])
def test_adams_vectors_are_those_of_its_moments(dtype: ms.Type, corrections: str) -> None:
    mean, square = Tensor(normal(2300) * np.float32(0.05)).to(dtype), Tensor(np.square(normal(2300, seed=1))).to(dtype)
    given = [0.19, 0.002] if corrections == "numbers" else [Tensor(0.19, ms.float32), Tensor(0.002, ms.float32)]
    m, v = exact(mean) / 0.19, exact(square) / 0.002
    found = adam_vectors(mean, square, *given, 1e-3, EPS)
    for counts, vector in zip(found, (m / (np.sqrt(v) + 1e-3), m / np.sqrt(v)), strict=True):
        numbers, histogram = told(counts)
        assert numbers[COUNT] == 2300
        assert numbers[SUMSQ] == pytest.approx(np.square(vector).sum(), rel=1e-5)
        # A number within rounding of an edge may be on either side of it.
        assert np.abs(np.array(histogram) - bins(vector)).sum() <= 4


def test_where_both_moments_are_zero_there_is_no_ratio_and_where_one_is_it_is_infinite() -> None:
    mean, square = Tensor([0.0, 1.0, -1.0, 0.0], ms.float32), Tensor([0.0, 0.0, 0.0, 1.0], ms.float32)
    updates, ratios = (told(one)[0] for one in adam_vectors(mean, square, 1.0, 1.0, 0.5, EPS))
    assert (updates[MIN], updates[MAX], updates[SMALLS]) == (-2.0, 2.0, 2)
    assert (ratios[POSINFS], ratios[NEGINFS], ratios[NANS], ratios[SMALLS]) == (1, 1, 0, 2)


@pytest.mark.parametrize("where", ["host"], indirect=True)
def test_an_error_of_trainings_is_handed_on() -> None:
    weight = Tensor(normal(5))
    before = snapshot(weight)
    with pytest.raises(EarlierFailure, match="Exp2"):
        squares_of_update(mint.exp2(weight), before)  # which has no kernel on the host
