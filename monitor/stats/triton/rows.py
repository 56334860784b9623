"""Combines the rows of a tensor's parts into its table row, in Triton, and stores rows."""

import triton
import triton.language as tl

from monitor.stats.triton.elements import INF, power_of_two

# mypy: ignore-errors
# Triton compiles this code and reads its annotations: they must not become strings.

COUNT: tl.constexpr = tl.constexpr(0)
NANS: tl.constexpr = tl.constexpr(1)
POSINFS: tl.constexpr = tl.constexpr(2)
NEGINFS: tl.constexpr = tl.constexpr(3)
SMALLS: tl.constexpr = tl.constexpr(4)
MIN: tl.constexpr = tl.constexpr(5)
MAX: tl.constexpr = tl.constexpr(6)
SUM: tl.constexpr = tl.constexpr(7)
SUMSQ: tl.constexpr = tl.constexpr(8)
M2: tl.constexpr = tl.constexpr(9)
M3: tl.constexpr = tl.constexpr(10)
M4: tl.constexpr = tl.constexpr(11)
ABSSUM: tl.constexpr = tl.constexpr(12)
LEAST: tl.constexpr = tl.constexpr(13)
EXPONENT: tl.constexpr = tl.constexpr(14)
BITS_LOW: tl.constexpr = tl.constexpr(15)
BITS_HIGH: tl.constexpr = tl.constexpr(16)
PLACES_LOW: tl.constexpr = tl.constexpr(17)
PLACES_HIGH: tl.constexpr = tl.constexpr(18)
COLUMNS: tl.constexpr = tl.constexpr(19)
"""The columns of a part in the workspace: those of a table row without its first, ``writes``."""


@triton.jit
def _column(at, column: tl.constexpr, part, parts, mask, other: tl.constexpr):
    # Bypasses the first-level cache, which does not see the writes of other processors.
    return tl.load(at + column * parts + part, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def _top(at, parts, ROWS: tl.constexpr):
    """The largest exponent of parts whose sums are not zero."""
    top = tl.full((ROWS,), -INF, tl.float64)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        there = part < parts
        full = _column(at, SUMSQ, part, parts, there, 0.0) > 0.0
        top = tl.maximum(top, tl.where(full, _column(at, EXPONENT, part, parts, there, 0.0), -INF))
    found = tl.max(top, axis=0)
    return tl.where(found > -INF, found, 0.0)


@triton.jit
def combined(at, parts, ROWS: tl.constexpr, WORK: tl.constexpr, HIGHER: tl.constexpr, CHECK: tl.constexpr):
    """``partials.union`` of the parts of a tensor, lane by lane and then pairwise: the same order each time."""
    top = tl.full((), 0.0, tl.float64)
    if tl.float64 == WORK:
        top = _top(at, parts, ROWS)
    zero = tl.zeros((ROWS,), tl.float64)
    count, nans, posinfs, neginfs, smalls = zero, zero, zero, zero, zero
    total, sumsq, m2, off, squares = zero, zero, zero, zero, zero
    cubes, fourths, magnitudes = zero, zero, zero
    nearest = tl.full((ROWS,), INF, tl.float64)
    bits, places = tl.zeros((ROWS,), tl.uint64), tl.zeros((ROWS,), tl.uint64)
    lo, hi = tl.full((ROWS,), INF, tl.float64), tl.full((ROWS,), -INF, tl.float64)
    pivot = tl.full((), 0.0, tl.float64)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        there = part < parts
        counts = _column(at, COUNT, part, parts, there, 0.0)
        nan = _column(at, NANS, part, parts, there, 0.0)
        posinf = _column(at, POSINFS, part, parts, there, 0.0)
        neginf = _column(at, NEGINFS, part, parts, there, 0.0)
        sums = _column(at, SUM, part, parts, there, 0.0)
        spread = _column(at, M2, part, parts, there, 0.0)
        squared = _column(at, SUMSQ, part, parts, there, 0.0)
        down = tl.full((ROWS,), 1.0, tl.float64)
        if tl.float64 == WORK:
            exponent = _column(at, EXPONENT, part, parts, there, 0.0)
            down = power_of_two(tl.maximum(tl.minimum(exponent - top, 0.0), -1000.0).to(tl.int64))
            sums, spread, squared = sums * down, spread * down * down, squared * down * down
        finite = counts - nan - posinf - neginf
        mean = sums / tl.maximum(finite, 1.0)
        if first == 0:
            pivot = tl.sum(sums, axis=0) / tl.maximum(tl.sum(finite, axis=0), 1.0)
        d = tl.where(finite > 0.0, mean - pivot, 0.0)
        count, nans, posinfs, neginfs = count + counts, nans + nan, posinfs + posinf, neginfs + neginf
        smalls += _column(at, SMALLS, part, parts, there, 0.0)
        lo = tl.minimum(lo, _column(at, MIN, part, parts, there, INF))
        hi = tl.maximum(hi, _column(at, MAX, part, parts, there, -INF))
        total, sumsq, m2 = total + sums, sumsq + squared, m2 + spread
        off, squares = off + finite * d, squares + finite * d * d
        if HIGHER:  # powers of x - pivot
            third = _column(at, M3, part, parts, there, 0.0) * down * down * down
            fourth = _column(at, M4, part, parts, there, 0.0) * down * down * down * down
            cubes += third + d * (3.0 * spread + finite * d * d)
            fourths += fourth + d * (4.0 * third + d * (6.0 * spread + finite * d * d))
            magnitudes += _column(at, ABSSUM, part, parts, there, 0.0) * down
            near = _column(at, LEAST, part, parts, there, 0.0)
            nearest = tl.minimum(nearest, tl.where(near > 0.0, near, INF))
        if CHECK:
            low, high = _column(at, BITS_LOW, part, parts, there, 0.0), _column(at, BITS_HIGH, part, parts, there, 0.0)
            bits += low.to(tl.uint64) + (high.to(tl.uint64) << 32)
            low, high = _column(at, PLACES_LOW, part, parts, there, 0.0), _column(at, PLACES_HIGH, part, parts, there, 0.0)
            places += low.to(tl.uint64) + (high.to(tl.uint64) << 32)
    elements, away = tl.sum(count - nans - posinfs - neginfs, axis=0), tl.sum(off, axis=0)
    between = tl.maximum(tl.sum(squares, axis=0) - away * away / tl.maximum(elements, 1.0), 0.0)
    least, most = tl.min(lo, axis=0), tl.max(hi, axis=0)
    within = tl.sum(m2, axis=0)
    m3, m4 = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    smallest = tl.full((), 0.0, tl.float64)
    if HIGHER:
        smallest = or_zero(tl.min(nearest, axis=0))
        around = within + tl.sum(squares, axis=0)
        m3, m4 = shifted(elements, away, around, tl.sum(cubes, axis=0), tl.sum(fourths, axis=0), least, most)
    return (
        tl.sum(count, axis=0), tl.sum(nans, axis=0), tl.sum(posinfs, axis=0), tl.sum(neginfs, axis=0), tl.sum(smalls, axis=0),
        least, most, tl.sum(total, axis=0), tl.sum(sumsq, axis=0), within + between, m3, m4,
        tl.sum(magnitudes, axis=0), smallest, top, tl.sum(bits, axis=0), tl.sum(places, axis=0),
    )  # fmt: skip


@triton.jit
def or_zero(least):
    """The least of magnitudes other than 0; 0 if there is none."""
    return tl.where(least < INF, least, 0.0)


@triton.jit
def shifted(n, sums, squares, cubes, fourths, least, most):
    """``partials.higher_moments`` from sums of powers of x - pivot. Zeros if all elements are equal or the range is left."""
    off = sums / tl.maximum(n, 1.0)
    around = n * off * off
    m3 = cubes - off * (3.0 * squares - 2.0 * around)
    m4 = fourths - off * (4.0 * cubes - off * (6.0 * squares - 3.0 * around))
    known = (least < most) & (tl.abs(m3) < INF) & (m4 < INF)
    return tl.where(known, m3, 0.0), tl.where(known, m4, 0.0)


@triton.jit
def store(at, step, repeats, numbers, CHECK: tl.constexpr):
    """Store the columns of a part or a whole tensor, ``step`` apart, whose elements are each repeated ``repeats`` times."""
    count, nans, posinfs, neginfs, smalls, lo, hi, total, sumsq, m2, m3, m4, abssum, least, exponent, bits, places = numbers
    tl.store(at + COUNT * step, count * repeats)
    tl.store(at + NANS * step, nans * repeats)
    tl.store(at + POSINFS * step, posinfs * repeats)
    tl.store(at + NEGINFS * step, neginfs * repeats)
    tl.store(at + SMALLS * step, smalls * repeats)
    tl.store(at + MIN * step, lo)
    tl.store(at + MAX * step, hi)
    tl.store(at + SUM * step, total * repeats)
    tl.store(at + SUMSQ * step, sumsq * repeats)
    tl.store(at + M2 * step, m2 * repeats)
    tl.store(at + M3 * step, m3 * repeats)
    tl.store(at + M4 * step, m4 * repeats)
    tl.store(at + ABSSUM * step, abssum * repeats)
    tl.store(at + LEAST * step, least)
    tl.store(at + EXPONENT * step, exponent)
    if CHECK:
        bits, places = tl.where(repeats == 1.0, bits, 0), tl.where(repeats == 1.0, places, 0)
        tl.store(at + BITS_LOW * step, (bits & 0xFFFFFFFF).to(tl.float64))
        tl.store(at + BITS_HIGH * step, (bits >> 32).to(tl.float64))
        tl.store(at + PLACES_LOW * step, (places & 0xFFFFFFFF).to(tl.float64))
        tl.store(at + PLACES_HIGH * step, (places >> 32).to(tl.float64))


@triton.jit
def store_row(page, repeats, numbers, CHECK: tl.constexpr):
    """Store the table row of a tensor."""
    tl.store(page, 1.0)
    store(page + 1, 1, repeats, numbers, CHECK)
    if not CHECK:
        for column in tl.static_range(BITS_LOW, COLUMNS):
            tl.store(page + 1 + column, 0.0)
