"""Numbers as decimal text, a column at a time and without a Python loop over its rows.

A finite value is written as Python writes it: ``f"{x:.6f}"`` from 1e-3 up to 1e15 in magnitude, ``f"{x:.6e}"`` outside, 6
being ``ndigits``. A value that too few decimals would turn into zero is scientific too, so nothing but zero is ever written as
zero. Zero itself is ``0``; the rest is ``nan``, ``inf``, ``-inf`` and, for what was not measured, nothing.

The text is laid out in a matrix of bytes, a row a value, blank where a value needs fewer characters, and trimmed by Arrow.
Digits come from integers. A scientific mantissa is the value times a power of ten, which a double holds exactly only up to
1e22; so the powers, and the product, are pairs of doubles whose sum carries 106 bits (Dekker 1971, "A floating-point technique
for extending the available precision").
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.stats.partials import Floats

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]
Characters = NDArray[np.uint8]

MOST_DIGITS: Final = 16
"""Decimals beyond this many are not written: 17 significant digits tell every double from its neighbours."""

_FIXED_FROM: Final = 1e-3
_FIXED_BELOW: Final = 1e15
_VISIBLE_FROM: Final = (float(np.nextafter(0.5, 1.0)), 0.05, 0.005)
"""The least value that rounds to something else than zero with 0, 1 and 2 decimals; with 3 and more, 1e-3 does."""

_BLANK: Final = np.uint8(ord(" "))
_MINUS: Final = np.uint8(ord("-"))
_POINT: Final = ord(".")
_ZERO: Final = ord("0")
_GROUP: Final = 9
"""So many digits fit 32 bits, in which numpy divides several times as fast as in 64."""


def spell(values: Floats, valid: Mask, ndigits: int) -> pa.StringArray:
    """The text of each value, empty where ``valid`` is false.

    Args:
        values: float64, shape ``(rows,)``.
        valid: Which of them were measured, shape ``(rows,)``.
        ndigits: Decimals, of the number or of its mantissa. At most ``MOST_DIGITS`` are written.
    """
    magnitude = np.abs(values)
    ordinary = valid & (magnitude > 0) & (magnitude < np.inf)
    if ordinary.all():
        return _spell_ordinary(values, magnitude, min(ndigits, MOST_DIGITS))
    rows, rest = np.flatnonzero(ordinary), np.flatnonzero(~ordinary)
    place = np.empty(len(values), dtype=np.int64)
    place[rows] = np.arange(len(rows)) + len(_UNUSUAL)
    place[rest] = _unusual(values[rest], valid[rest])
    texts = _spell_ordinary(values[rows], magnitude[rows], min(ndigits, MOST_DIGITS))
    return pa.concat_arrays([_UNUSUAL, texts]).take(pa.array(place))


def spell_counts(values: Floats, valid: Mask) -> pa.StringArray:
    """The text of counts: integers, empty where ``valid`` is false. Arguments as for ``spell``."""
    if valid.all():
        return pa.array(values.astype(np.int64)).cast(pa.string())
    counts = pa.array(np.where(valid, values, 0.0).astype(np.int64), mask=~valid)
    return counts.cast(pa.string()).fill_null("")


def _unusual(values: Floats, valid: Mask) -> Integers:
    """Index in ``_UNUSUAL`` of what is zero, not finite or missing."""
    signed = np.where(values > 0, _INFINITY, _MINUS_INFINITY)
    finite = np.where(values == 0, _EXACT_ZERO, signed)
    return np.where(valid, np.where(np.isnan(values), _NAN, finite), _MISSING)


def _spell_ordinary(values: Floats, magnitude: Floats, ndigits: int) -> pa.StringArray:
    whole, fraction, exponent = _decimal(magnitude, ndigits)
    text = _laid_out(np.signbit(values), whole, fraction, exponent, ndigits)
    return call_function("ascii_trim_whitespace", [_strings(text)])


def _decimal(magnitude: Floats, ndigits: int) -> tuple[Integers, Integers, Integers]:
    """Positive finite numbers, rounded, as digits before the point, digits after it, and index of the exponent's text."""
    scientific = (magnitude < fixed_from(ndigits)) | (magnitude >= _FIXED_BELOW)
    if scientific.all():
        return _scientific(magnitude, ndigits)
    if not scientific.any():
        return _fixed(magnitude, ndigits)
    parts = np.empty((3, len(magnitude)), dtype=np.int64)
    for rows, split in ((np.flatnonzero(scientific), _scientific), (np.flatnonzero(~scientific), _fixed)):
        for part, numbers in zip(parts, split(magnitude[rows], ndigits), strict=True):
            part[rows] = numbers
    return parts[0], parts[1], parts[2]


def fixed_from(ndigits: int) -> float:
    """The least magnitude that is not written in scientific form."""
    return max(_FIXED_FROM, _VISIBLE_FROM[ndigits]) if ndigits < len(_VISIBLE_FROM) else _FIXED_FROM


def _fixed(magnitude: Floats, ndigits: int) -> tuple[Integers, Integers, Integers]:
    one = 10**ndigits
    floor = np.floor(magnitude) if ndigits else np.rint(magnitude)
    fraction = _rounded(*_product(magnitude - floor, np.full(1, float(one))))
    carry = fraction == one
    fraction[carry] = 0
    return floor.astype(np.int64) + carry, fraction, np.full(len(magnitude), _NO_EXPONENT)


def _scientific(magnitude: Floats, ndigits: int) -> tuple[Integers, Integers, Integers]:
    one = 10**ndigits
    exponent = np.floor(np.log10(magnitude)).astype(np.int64)
    digits = _scaled(magnitude, ndigits - exponent)
    _settle(magnitude, exponent, digits, ndigits)
    whole = digits // one
    return whole, digits - whole * one, exponent - _LEAST_EXPONENT


def _settle(magnitude: Floats, exponent: Integers, digits: Integers, ndigits: int) -> None:
    """Correct the exponents that are off by one: a logarithm beside an integer may fall on either side of it, and
    9.9999999 rounds up to 10.
    """
    one = 10**ndigits
    below, above = np.flatnonzero(digits <= one), np.flatnonzero(digits >= 10 * one)
    for rows, shift in ((below, -1), (above, 1)):
        if not len(rows):
            continue
        again = _scaled(magnitude[rows], ndigits - exponent[rows] - shift)
        fits = again < 10 * one
        exponent[rows[fits]] += shift
        digits[rows[fits]] = again[fits]


def _scaled(magnitude: Floats, power: Integers) -> Integers:
    """``magnitude * 10**power`` to the nearest integer, for products below 1e18."""
    significand, exponent = np.frexp(magnitude)
    row = power - LEAST_POWER
    power_high, power_low, power_exponent = _powers_of_ten()
    high, low = _product(significand, power_high[row])
    low += significand * power_low[row]
    exponent = exponent + power_exponent[row]
    return _rounded(np.ldexp(high, exponent), np.ldexp(low, exponent))


def _product(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """``a * b`` and what rounding took from it: their sum is the exact product."""
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(a: Floats) -> tuple[Floats, Floats]:
    """Two numbers of 26 bits that sum to ``a`` (Veltkamp)."""
    big = a * 134217729.0  # 2^27 + 1
    high = big - (big - a)
    return high, a - high


def _rounded(high: Floats, low: Floats) -> Integers:
    """``high + low`` to the nearest integer, of two the even one. ``low`` is at most half a unit in ``high``'s last place."""
    nearest = np.rint(high)
    rest = high - nearest
    correction = np.rint(rest + low)
    halfway = np.abs(rest) == 0.5
    if halfway.any():  # there the sum loses ``low``, which decides
        correction[halfway] = np.where(rest[halfway] * low[halfway] > 0, 2 * rest[halfway], 0.0)
    digits: Integers = nearest.astype(np.int64) + correction.astype(np.int64)
    return digits


def _laid_out(negative: Mask, whole: Integers, fraction: Integers, exponent: Integers, ndigits: int) -> Characters:
    """A row of characters for each number: sign and whole part to the right of their field, then the rest."""
    width = 1 + len(str(int(whole.max(initial=0))))
    point = width
    end = width + (1 + ndigits if ndigits else 0)
    text = np.empty((len(whole), end + len(_EXPONENT_TEXT)), dtype=np.uint8)
    _write_digits(text[:, 1:width], whole)
    _write_sign(text[:, :width], whole, negative)
    text[:, point:end] = _POINT
    _write_digits(text[:, point + 1 : end], fraction)
    for column, characters in enumerate(_EXPONENT_TEXT, start=end):
        text[:, column] = characters.take(exponent)
    return text


def _write_digits(field: Characters, number: Integers) -> None:
    """Fill ``field`` with the last digits of ``number``, zeros to the left."""
    for end in range(field.shape[1], 0, -_GROUP):
        rest = number // 10**_GROUP if end > _GROUP else None
        group = (number if rest is None else number - rest * 10**_GROUP).astype(np.uint32)
        for column in range(end - 1, max(end - _GROUP, 0) - 1, -1):
            tenth = group // np.uint32(10)
            field[:, column] = group - tenth * np.uint32(10) + np.uint32(_ZERO)
            group = tenth
        number = number if rest is None else rest


def _write_sign(field: Characters, whole: Integers, negative: Mask) -> None:
    """Blank the zeros to the left of the first digit, and put the sign beside it."""
    last = field.shape[1] - 1
    for column in range(last):
        empty = whole < 10 ** (last - column)
        beside = empty & (whole >= 10 ** (last - column - 1)) if column < last - 1 else empty
        field[:, column] = np.where(empty, np.where(beside & negative, _MINUS, _BLANK), field[:, column])


def _strings(text: Characters) -> pa.StringArray:
    rows, width = text.shape
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32) if rows else np.zeros(1, dtype=np.int32)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(text))


def _characters(texts: list[str]) -> Characters:
    """One array a character, an entry a text; blank where a text is shorter than the longest."""
    width = max(map(len, texts))
    padded = "".join(text.ljust(width) for text in texts)
    return np.frombuffer(padded.encode(), dtype=np.uint8).reshape(len(texts), width).T.copy()


_LEAST_EXPONENT: Final = -324
_MOST_EXPONENT: Final = 308
_NO_EXPONENT: Final = _MOST_EXPONENT - _LEAST_EXPONENT + 1
_EXPONENT_TEXT: Final = _characters([*(f"e{e:+03d}" for e in range(_LEAST_EXPONENT, _MOST_EXPONENT + 1)), ""])

_MISSING, _NAN, _EXACT_ZERO, _INFINITY, _MINUS_INFINITY = range(5)
_UNUSUAL: Final = pa.array(["", "nan", "0", "inf", "-inf"], type=pa.string())


def scaled_powers_of_ten() -> Iterator[int]:
    """``10**k * 2**SCALE`` for k from ``LEAST_POWER`` to ``MOST_POWER``, but for what is cut off behind the point."""
    for k in range(LEAST_POWER, MOST_POWER + 1):
        yield 10**k << SCALE if k >= 0 else (1 << SCALE) // 10**-k


@cache
def _powers_of_ten() -> tuple[Floats, Floats, NDArray[np.int32]]:
    """``10**k = (high + low) * 2**exponent``, 0.5 <= high < 1, to 106 bits, from exact integers.

    The exponents have 32 bits because numpy's ``ldexp`` takes ten times as long for others.
    """
    rows = []
    for bits in scaled_powers_of_ten():
        size = bits.bit_length()
        top = bits >> (size - 53)
        rest = bits - (top << (size - 53))
        rows.append((top / 2**53, rest / 2**size, size - SCALE))
    high, low, exponent = zip(*rows, strict=True)
    return np.array(high), np.array(low), np.array(exponent, dtype=np.int32)


LEAST_POWER: Final = -_MOST_EXPONENT
MOST_POWER: Final = MOST_DIGITS - _LEAST_EXPONENT
"""From the least power of ten to this: those that make of a number one with as many digits as are written."""

SCALE: Final = 1400
"""Bits behind the point: the least power keeps more than 128 significant ones."""
