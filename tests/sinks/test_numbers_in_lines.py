from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from evidence import examples
from hypothesis import given, settings, strategies as st

from monitor.sinks.csv import MOST_DIGITS, CountColumn, Join, NumberColumn, native_lines, python_lines


def cells(join: Join, column: NumberColumn, ndigits: int = 6) -> list[str]:
    (text,) = join([column], [len(column.values)], ndigits)
    return bytes(text).decode().split("\n")[:-1]


def python_texts(values: list[float], ndigits: int = 6) -> list[str]:
    return cells(python_lines, numbers(values), ndigits)


def native_texts(values: list[float], ndigits: int = 6) -> list[str]:
    """The same, made in C."""
    return cells(native_lines, numbers(values), ndigits)


def numbers(values: list[float]) -> NumberColumn:
    return NumberColumn(np.array(values, dtype=np.float64), np.ones(len(values), dtype=bool))


TextsOf = Callable[..., list[str]]
BOTH = pytest.mark.parametrize("texts", [python_texts, native_texts], ids=["python", "native"])


BOTH_WAYS = pytest.mark.parametrize("join", [python_lines, native_lines], ids=["python", "native"])


def as_python_writes(value: float, ndigits: int) -> str:
    """The reference, a value at a time and in exact arithmetic."""
    if value == 0:
        return "0"
    fixed = f"{value:.{ndigits}f}"
    return fixed if 1e-3 <= abs(value) < 1e15 and float(fixed) != 0 else f"{value:.{ndigits}e}"


def from_bits(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


any_bits = st.integers(0, 2**64 - 1).map(from_bits).filter(lambda x: x == x and abs(x) != float("inf"))
near_powers_of_ten = st.builds(lambda k, ulps: from_bits(struct.unpack("<Q", struct.pack("<d", 10.0**k))[0] + ulps),
                               st.integers(-307, 307), st.integers(-3, 3))  # fmt: skip
short_decimals = st.builds(lambda m, k: float(f"{m}e{k}"), st.integers(-(10**6), 10**6), st.integers(-20, 20))
denormals = st.integers(1, 2**52).map(from_bits)
finite = st.one_of(st.floats(allow_nan=False, allow_infinity=False), any_bits, near_powers_of_ten, short_decimals, denormals)


@BOTH
@settings(max_examples=examples(100, 300))
@given(st.lists(finite, min_size=1, max_size=40), st.integers(0, MOST_DIGITS))
def test_every_finite_double_is_written_as_python_writes_it(texts: TextsOf, values: list[float], ndigits: int) -> None:
    assert texts(values, ndigits) == [as_python_writes(value, ndigits) for value in values]


@settings(max_examples=examples(100, 300))
@given(st.builds(lambda m, e: float(m * 10**e // 2), st.integers(1, 2**40), st.integers(15, 40)), st.integers(0, MOST_DIGITS))
def test_native_ties_of_large_numbers_go_to_the_even_one(value: float, ndigits: int) -> None:
    assert native_texts([value, -value], ndigits) == [as_python_writes(value, ndigits), as_python_writes(-value, ndigits)]


def test_every_power_of_ten_and_its_neighbours() -> None:
    powers = np.array([10.0**k for k in range(-323, 309)])
    values = [*powers, *np.nextafter(powers, 0.0), *np.nextafter(powers, math.inf), *(2.0**k for k in range(-1074, 1024))]
    for ndigits in (0, 5, 6, MOST_DIGITS):
        assert native_texts(values, ndigits) == [as_python_writes(value, ndigits) for value in values]


@settings(max_examples=examples(100, 300))
@given(
    st.lists(st.tuples(finite | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf]), st.booleans()), min_size=1),
    st.integers(0, MOST_DIGITS + 3),
)
def test_native_cells_have_the_texts_that_python_makes(drawn: list[tuple[float, bool]], ndigits: int) -> None:
    column = NumberColumn(np.array([value for value, _ in drawn]), np.array([there for _, there in drawn]))
    assert cells(native_lines, column, ndigits) == cells(python_lines, column, ndigits)


@given(st.lists(st.tuples(st.integers(-(2**53), 2**53), st.booleans()), min_size=1))
def test_so_have_counts(drawn: list[tuple[int, bool]]) -> None:
    column = CountColumn(np.array([float(value) for value, _ in drawn]), np.array([there for _, there in drawn]))
    expected = [str(value) if there else "" for value, there in drawn]
    assert cells(native_lines, column) == cells(python_lines, column) == expected


@BOTH
@settings(max_examples=examples(70, 200))
@given(st.lists(finite.filter(lambda x: x != 0), min_size=1, max_size=40), st.integers(0, 3))
def test_only_zero_is_written_as_zero(texts: TextsOf, values: list[float], ndigits: int) -> None:
    assert all(Fraction(text) != 0 for text in texts(values, ndigits))


@BOTH
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "0.250000"),
        (-1.23456789, "-1.234568"),
        (0.0009999999, "9.999999e-04"),
        (0.00099999999, "1.000000e-03"),
        (0.001, "0.001000"),
        (5e-4, "5.000000e-04"),
        (1.2345678e-30, "1.234568e-30"),
        (-1.2345678e-9, "-1.234568e-09"),
        (5e-324, "4.940656e-324"),
        (1.7976931348623157e308, "1.797693e+308"),
        (999999.9999999, "1000000.000000"),
        (123456789012345.67, "123456789012345.671875"),
        (999999999999999.9, "999999999999999.875000"),
        (1e15, "1.000000e+15"),
        (-2e15, "-2.000000e+15"),
        (0.0, "0"),
        (-0.0, "0"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
    ],
)
def test_a_number_with_six_decimals(texts: TextsOf, value: float, text: str) -> None:
    assert [text] == texts([value])


@BOTH
@pytest.mark.parametrize(
    ("value", "ndigits", "text"),
    [
        (0.3, 0, "3e-01"),
        (0.5, 0, "5e-01"),
        (0.6, 0, "1"),
        (0.04, 1, "4.0e-02"),
        (0.05, 1, "0.1"),
        (0.004, 2, "4.00e-03"),
        (12.5, 0, "12"),
        (9.96, 1, "10.0"),
    ],
)
def test_few_decimals_make_no_number_zero(texts: TextsOf, value: float, ndigits: int, text: str) -> None:
    assert [text] == texts([value], ndigits)


@BOTH
def test_the_variance_estimate_of_a_layer_norm_keeps_its_digits(texts: TextsOf) -> None:
    """Peers' fault 2: ``exp_avg_sq`` printed as 0.0 in every column."""
    assert texts([1e-14, 3.14159265e-11]) == ["1.000000e-14", "3.141593e-11"]


@BOTH_WAYS
def test_what_was_not_measured_is_empty_and_nan_is_not(join: Join) -> None:
    column = NumberColumn(np.array([1.0, np.nan, 7.0, 0.0]), np.array([True, True, False, True]))
    assert cells(join, column) == ["1.000000", "nan", "", "0"]


@BOTH
def test_a_column_of_all_sorts_keeps_its_order(texts: TextsOf) -> None:
    values = [1e-9, float("nan"), -12.5, 0.0, 3e20, float("-inf"), -1e-300, 999.0]
    assert texts(values) == ["1.000000e-09", "nan", "-12.500000", "0", "3.000000e+20", "-inf", "-1.000000e-300", "999.000000"]


@BOTH
def test_an_empty_column_has_no_texts(texts: TextsOf) -> None:
    assert texts([]) == []


@BOTH
def test_more_decimals_than_a_double_has_are_not_written(texts: TextsOf) -> None:
    assert texts([1 / 3, 1e-9], MOST_DIGITS) == texts([1 / 3, 1e-9], 40)


@BOTH_WAYS
def test_counts_are_integers_and_may_be_missing(join: Join) -> None:
    column = CountColumn(np.array([0.0, 2.0**53, np.nan]), np.array([True, True, False]))
    assert cells(join, column) == ["0", "9007199254740992", ""]
