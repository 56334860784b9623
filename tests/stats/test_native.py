"""The native kernel: one row for any length and format, the same bits on every processor, nothing outside of the row."""

from __future__ import annotations

import importlib
import math
import shutil
import sysconfig
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evidence import examples
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from reference import assert_agrees, derived, normal

from monitor.stats.histograms import BINS, UPPER
from monitor.stats.host import array_kernel
from monitor.stats.host.array_kernel import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INT64, VARIABLE, NativeKernel, native_kernel
from monitor.stats.partials import COLUMNS, COUNT, MAX, MIN, NANS, NEGINFS, POSINFS, SMALLS

COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
HEADER = Path(sysconfig.get_paths()["include"], "Python.h")
if shutil.which(COMPILER) is None or not HEADER.exists():
    pytest.skip("it could not be built: there is no C compiler, or no header of Python", allow_module_level=True)

_host_kernel: Any = importlib.import_module("monitor.stats._host_kernel")

EPS = 1e-8
KERNELS = _host_kernel.kernels()
FORMATS = {np.float32: FLOAT32, np.float64: FLOAT64, np.float16: FLOAT16, np.int64: INT64}
RELEASED = 1 << 20
"""Elements from which on other threads go on meanwhile."""


@pytest.fixture(params=KERNELS)
def _kernel(request: pytest.FixtureRequest):
    """Each that runs on this processor, and the fastest again when the test is over."""
    _host_kernel.choose(request.param)
    yield
    _host_kernel.choose(KERNELS[0])


def reduce(x: np.ndarray, form: int | None = None, eps: float = EPS) -> np.ndarray:
    page = np.full((3, len(COLUMNS)), 7.0)
    assert NativeKernel(eps).reduce_into(x, x.size, FORMATS[x.dtype.type] if form is None else form, page, 1)
    assert (page[[0, 2]] == 7.0).all()
    return page[1]


def test_the_formats_have_the_numbers_that_the_kernel_gives_them() -> None:
    for name in ("FLOAT32", "FLOAT64", "BFLOAT16", "FLOAT16", "INT64"):
        assert getattr(array_kernel, name) == getattr(_host_kernel, name)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 255, 4099, RELEASED + 33])
def test_any_length_agrees_with_the_reference(dtype: type, size: int) -> None:
    x = (normal(size) * (1000 if dtype is np.int64 else 1)).astype(dtype)
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.usefixtures("_kernel")
@settings(max_examples=examples(100, 300))
@given(x=arrays.arrays(np.int64, st.integers(1, 70), elements=st.integers(-(2**63), 2**63 - 1)), wanted=st.booleans())
def test_any_whole_numbers_have_the_row_of_the_same_numbers_in_double_precision(x: np.ndarray, wanted: bool) -> None:
    found, expected = np.zeros((1, len(COLUMNS))), np.zeros((1, len(COLUMNS)))
    kernel = NativeKernel(EPS, higher=wanted)
    assert kernel.reduce_into(x, x.size, INT64, found, 0)
    assert kernel.reduce_into(x.astype(np.float64), x.size, FLOAT64, expected, 0)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("form", [FLOAT16, BFLOAT16])
def test_every_number_of_sixteen_bits_is_what_it_is(form: int) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = bits.view(np.float16) if form == FLOAT16 else (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # some of the NaN are signalling ones
        assert_agrees(reduce(bits, form), numbers.astype(np.float64), EPS)
    for one in (0, 1, 0x0203, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0x8000, 0xC000):
        alone = reduce(bits[one : one + 1], form)
        assert alone[MIN] == alone[MAX] == numbers[one]


@pytest.mark.usefixtures("_kernel")
@settings(max_examples=examples(100, 300))
@given(x=arrays.arrays(st.sampled_from([np.float32, np.float64]), st.integers(1, 70), elements=st.floats(width=32)))
def test_any_numbers_agree_with_the_reference(x: np.ndarray) -> None:
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("place", [0, 15, 16, 40, 49])
def test_what_is_not_finite_is_counted_wherever_it_stands_and_hides_nothing(place: int) -> None:
    for value, column in ((math.nan, NANS), (-math.nan, NANS), (math.inf, POSINFS), (-math.inf, NEGINFS)):
        x = normal(50).astype(np.float32)
        x[place] = value
        row = reduce(x)
        assert row[column] == 1
        assert row[NANS] + row[POSINFS] + row[NEGINFS] == 1
        assert_agrees(row, x, EPS)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_but_what_is_not_finite(value: float) -> None:
    x = np.full(37, value, dtype=np.float32)
    assert_agrees(reduce(x), x, EPS)


def test_every_processor_computes_the_same_bits() -> None:
    for dtype in FORMATS:
        for x in ((9 * normal(5003)).astype(dtype), (300 + 9 * normal(5003)).astype(dtype)):
            rows = []
            for name in KERNELS:
                _host_kernel.choose(name)
                rows.append(reduce(x).tobytes())
            _host_kernel.choose(KERNELS[0])
            assert len(set(rows)) == 1


def higher(x: np.ndarray, form: int = FLOAT32) -> np.ndarray:
    page = np.zeros((1, len(COLUMNS)))
    assert NativeKernel(EPS, higher=True).reduce_into(x, x.size, form, page, 0)
    return page[0]


def hard_arrays() -> dict[str, np.ndarray]:
    """Where distances from the mean, their powers or their sums lose digits of float32 or leave its range."""
    x = normal(40_037)
    outlier, spread = x.copy(), np.float32(10.0) ** (3 * normal(len(x), seed=1))
    outlier[77] = 1e6
    mixed = x.copy()
    mixed[::100], mixed[1::100], mixed[2::100] = math.nan, math.inf, -math.inf
    return {
        "normal": x,
        "squares": np.square(x),
        "a mean of 1e4 deviations": (100 + 0.01 * x).astype(np.float32),
        "a mean of 1e6 deviations": (100 + 0.0001 * x).astype(np.float32),
        "neighbouring numbers": np.where(x > 1, np.nextafter(np.float32(1), np.float32(2)), np.float32(1)),
        "one outlier": outlier,
        "one other element": np.where(np.arange(len(x)) == 4000, 0.1, 0.3).astype(np.float32),
        "far apart": x * spread,
        "1e-30": np.float32(1e-30) * x,
        "1e-35": np.float32(1e-35) * x,
        "subnormal": (1e-40 * x).astype(np.float32),
        "1e29": np.float32(1e29) * x,
        "1e37": np.float32(1e37) * x,
        "large, and near each other": (2e38 + 1e33 * x).astype(np.float32),
        "NaN and Inf": mixed,
        "half zeros": np.maximum(x, 0),
        "sorted": np.sort(x),
        "an outlier at the end": np.append(x[:-1], np.float32(1e20)),
        "a mean that wanders": (x + 0.2 * np.sin(np.arange(len(x)) / 4096)).astype(np.float32),
        "other units after a piece": np.where(np.arange(len(x)) < 4096, 1e-6, 1).astype(np.float32) * x,
        "few": x[:37],
    }


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("what", hard_arrays())
def test_ops_on_request_of_hard_arrays_are_right_to_a_hundred_thousandth(what: str) -> None:
    x = hard_arrays()[what]
    found, kept = derived(higher(x)), x[np.isfinite(x)].astype(np.longdouble)
    off = kept - kept.mean()
    deviation = np.sqrt(np.square(off).mean())
    fourth, third = (off**4).mean() / deviation**4, (off**3).mean() / deviation**3
    cubes = float((np.abs(off) ** 3).mean() / deviation**3)
    assert found["kurtosis"] + 3 == pytest.approx(float(fourth), rel=1e-5)
    assert found["skewness"] == pytest.approx(float(third), rel=0, abs=1e-5 * cubes)
    assert found["smallest_nonzero"] == np.abs(kept[kept != 0]).min()
    if np.isfinite(x).all():
        assert found["absmean"] == pytest.approx(float(np.abs(kept).mean()), rel=1e-6)


def test_every_processor_computes_the_same_bits_on_request() -> None:
    for what, x in hard_arrays().items():
        with np.errstate(all="ignore"):
            half = x.astype(np.float16)
        for elements, form in ((x, FLOAT32), (half, FLOAT16), ((x.view(np.uint32) >> 16).astype(np.uint16), BFLOAT16)):
            rows = []
            for name in KERNELS:
                _host_kernel.choose(name)
                rows.append(higher(elements, form).tobytes())
            _host_kernel.choose(KERNELS[0])
            assert len(set(rows)) == 1, what


def histogram(x: np.ndarray, form: int = FLOAT32) -> list[float]:
    """Counted alone, and beside the row, which is the same as without a histogram."""
    alone, beside, page = np.full(BINS, 7.0), np.full(BINS, 7.0), np.zeros((2, len(COLUMNS)))
    _host_kernel.magnitudes(form, x, x.size, alone)
    for wanted in (0, _host_kernel.HIGHER, _host_kernel.CHECK_SUMS | _host_kernel.HIGHER):
        assert _host_kernel.reduce(form, EPS, wanted, x, x.size, page, 0, beside)
        assert _host_kernel.reduce(form, EPS, wanted, x, x.size, page, 1)
        assert page[0].tobytes() == page[1].tobytes()
        assert beside.tolist() == alone.tolist()
    return alone.tolist()


def histogram_by_definition(x: np.ndarray) -> list[int]:
    magnitudes = np.abs(x[np.isfinite(x)].astype(np.float64))
    return np.bincount(np.searchsorted(UPPER, magnitudes), minlength=BINS).tolist()


def counted_arrays() -> dict[str, np.ndarray]:
    """Nearly all exponents of a piece of 1024 elements in one window, a few or many outside of it, and windows that change."""
    x, generator = normal(40_037), np.random.default_rng(1)
    random, scales = (
        generator.random(len(x)),
        np.float32(10.0) ** generator.uniform(-38, 0, len(x) // 512 + 1).astype(np.float32),
    )
    bits = generator.integers(0, 1 << 32, len(x), dtype=np.uint32).view(np.float32)
    return {
        "normal": x,
        "powers of two": np.float32(2.0) ** np.rint(8 * x),
        "half zeros": np.maximum(x, 0),
        "zeros": np.zeros_like(x),
        "zeros, then numbers": np.where(np.arange(len(x)) < 3000, 0, x).astype(np.float32),
        "squares of small numbers": np.square(np.float32(1e-5) * x),
        "a few tiny": np.where(random < 0.001, 1e-30 * x, x).astype(np.float32),
        "a few huge and infinite": np.where(random < 0.001, np.inf * x, np.where(random > 0.999, 1e30 * x, x)).astype(
            np.float32
        ),
        "a few NaN": np.where(random < 0.001, np.nan, x).astype(np.float32),
        "subnormal": (1e-40 * x).astype(np.float32),
        "huge": (5e37 * x).astype(np.float32),
        "tiny, then large": np.where(np.arange(len(x)) < 20_000, 1e-25 * x, x).astype(np.float32),
        "rows of any scale": x * np.repeat(scales, 512)[: len(x)],
        "any bits": bits,
        "nothing but NaN": np.full_like(x, np.nan),
    }


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("what", counted_arrays())
def test_each_element_counts_once_and_in_its_bin(what: str) -> None:
    x = counted_arrays()[what]
    assert histogram(x) == histogram_by_definition(x)
    assert histogram(x[:20_000]) == histogram_by_definition(x[:20_000])
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
    assert histogram(half, FLOAT16) == histogram_by_definition(half.astype(np.float32))
    upper = (x.view(np.uint32) >> 16).astype(np.uint16)
    assert histogram(upper, BFLOAT16) == histogram_by_definition((upper.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.usefixtures("_kernel")
def test_no_counter_of_exponents_overflows_in_a_large_array() -> None:
    """More elements than are counted between two additions of the counters, and equal, so all of them in one counter."""
    x = np.full((1 << 24) + 16_500, 0x3F80, dtype=np.uint16)
    x[-1] = 0
    counts = histogram(x, BFLOAT16)
    assert (counts[0], counts[np.searchsorted(UPPER, 1.0)]) == (1, x.size - 1)


def test_zeros_have_no_sign() -> None:
    row = reduce(np.array([-0.0, 0.0, -0.0], dtype=np.float32))
    assert [math.copysign(1, row[column]) for column in (MIN, MAX)] == [1, 1]
    assert row[SMALLS] == 3


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_mean_that_is_large_against_the_spread_costs_no_digits(dtype: type) -> None:
    x = (1000 + normal(5003)).astype(dtype)
    x[[17, 5000]] = math.nan
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("magnitude", [1e-90, 1e-145])
def test_a_spread_whose_squares_float64_does_not_have_is_not_told_wrong(magnitude: float) -> None:
    x = magnitude * (1 + 1e-15 * normal(100).astype(np.float64))
    page = np.zeros((1, len(COLUMNS)))
    if NativeKernel(EPS).reduce_into(x, 100, FLOAT64, page, 0):
        assert derived(page[0])["std"] == pytest.approx(float(x.astype(np.longdouble).std()), rel=1e-6)
    else:
        assert magnitude == 1e-145


def test_elements_may_begin_anywhere() -> None:
    raw = np.zeros(4 * 100 + 3, dtype=np.uint8)
    x = raw[3:].view(np.float32)
    x[:] = normal(100)
    page = np.zeros((1, len(COLUMNS)))
    assert NativeKernel(EPS).reduce_into(x.ctypes.data, 100, FLOAT32, page, 0)
    assert_agrees(page[0], x, EPS)


@pytest.mark.parametrize("magnitude", [1e-300, 1e-160, 1e160, 1e300])
def test_squares_that_leave_the_range_of_float64_are_left_to_others(magnitude: float) -> None:
    page = np.full((1, len(COLUMNS)), 7.0)
    assert not NativeKernel(EPS).reduce_into(normal(100).astype(np.float64) * magnitude, 100, FLOAT64, page, 0)
    assert (page == 7.0).all()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 4, np.zeros((2, len(COLUMNS))), 0), ValueError),  # more than the array has
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 0, np.zeros((2, len(COLUMNS))), 0), ValueError),
        ((4, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros((2, len(COLUMNS))), 0), ValueError),
        ((-1, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros((2, len(COLUMNS))), 0), ValueError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros((2, len(COLUMNS))), 2), IndexError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros((2, len(COLUMNS))), -1), IndexError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros((2, 11)), 0), ValueError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros((2, len(COLUMNS)), np.float32), 0), ValueError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros(24), 0), ValueError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros((2, len(COLUMNS)), np.int64), 0), ValueError),
        # Their bytes are 0 in 64 bits.
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 1 << 62, np.zeros((2, len(COLUMNS))), 0), ValueError),
        ((FLOAT32, 0.0, 0, np.zeros(6, np.float32)[::2], 3, np.zeros((2, len(COLUMNS))), 0), ValueError),  # gaps
        ((FLOAT32, 0.0, 0, 0, 3, np.zeros((2, len(COLUMNS))), 0), ValueError),
        ((FLOAT32, 0.0, 0, "abc", 3, np.zeros((2, len(COLUMNS))), 0), TypeError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), -3, np.zeros((2, len(COLUMNS))), 0), OverflowError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32)), TypeError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros((2, len(COLUMNS))), 0, np.zeros(BINS - 1)), ValueError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 3, np.zeros((2, len(COLUMNS))), 0, np.zeros(BINS, np.int64)), ValueError),
        ((FLOAT64, 0.0, 0, np.zeros(3), 3, np.zeros((2, len(COLUMNS))), 0, np.zeros(BINS)), ValueError),
        ((FLOAT32, 0.0, 0, np.zeros(3, np.float32), 4, np.zeros((2, len(COLUMNS))), 0, np.zeros(BINS)), ValueError),
    ],
)
def test_what_is_asked_wrongly_is_refused_and_writes_nothing(arguments: tuple[object, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        _host_kernel.reduce(*arguments)
    assert not any(one.any() for one in arguments if isinstance(one, np.ndarray))


def test_a_page_that_is_read_only_is_refused() -> None:
    page = np.zeros((1, len(COLUMNS)))
    page.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        _host_kernel.reduce(FLOAT32, 0.0, 0, np.zeros(3, np.float32), 3, page, 0)


def test_a_kernel_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel 'sve' runs on this processor"):
        _host_kernel.choose("sve")


def test_threads_do_not_disturb_each_other() -> None:
    xs = [normal(RELEASED + 7, seed=seed).astype(np.float32) for seed in range(4)]
    page = np.zeros((4, len(COLUMNS)))
    threads = [
        threading.Thread(target=NativeKernel(EPS).reduce_into, args=(x, x.size, FLOAT32, page, row)) for row, x in enumerate(xs)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert (page[:, COUNT] == RELEASED + 7).all()
    for row, x in zip(page, xs, strict=True):
        assert row.tobytes() == reduce(x).tobytes()


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_kernel(EPS) is not None
    monkeypatch.setenv(VARIABLE, "0")
    assert native_kernel(EPS) is None
