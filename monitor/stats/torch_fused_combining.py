"""The rows of a tensor's parts to its table row, in Triton."""

# mypy: ignore-errors
# Triton compiles what stands here. Annotations are read by it: they must not become strings.
import triton
import triton.language as tl

from monitor.stats.torch_fused_elements import INF, power_of_two

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
EXPONENT: tl.constexpr = tl.constexpr(10)
COLUMNS: tl.constexpr = tl.constexpr(11)
"""The columns of a part in the workspace: those of a table row but ``writes``, which comes first there."""


@triton.jit
def _column(at, column: tl.constexpr, part, parts, mask, other: tl.constexpr):
    # Past the first-level cache, which other processors do not write to.
    return tl.load(at + column * parts + part, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def _top(at, parts, ROWS: tl.constexpr):
    """The largest exponent of parts whose sums hold something."""
    top = tl.full((ROWS,), -INF, tl.float64)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        there = part < parts
        full = _column(at, SUMSQ, part, parts, there, 0.0) > 0.0
        top = tl.maximum(top, tl.where(full, _column(at, EXPONENT, part, parts, there, 0.0), -INF))
    found = tl.max(top, axis=0)
    return tl.where(found > -INF, found, 0.0)


@triton.jit
def combined(at, parts, ROWS: tl.constexpr, WORK: tl.constexpr):
    """``partials.union`` of the parts of a tensor, lane by lane and then pairwise: the same order each time."""
    top = tl.full((), 0.0, tl.float64)
    if tl.float64 == WORK:
        top = _top(at, parts, ROWS)
    zero = tl.zeros((ROWS,), tl.float64)
    count, nans, posinfs, neginfs, smalls = zero, zero, zero, zero, zero
    total, sumsq, m2, off, squares = zero, zero, zero, zero, zero
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
    elements, away = tl.sum(count - nans - posinfs - neginfs, axis=0), tl.sum(off, axis=0)
    between = tl.maximum(tl.sum(squares, axis=0) - away * away / tl.maximum(elements, 1.0), 0.0)
    return (
        tl.sum(count, axis=0), tl.sum(nans, axis=0), tl.sum(posinfs, axis=0), tl.sum(neginfs, axis=0), tl.sum(smalls, axis=0),
        tl.min(lo, axis=0), tl.max(hi, axis=0),
        tl.sum(total, axis=0), tl.sum(sumsq, axis=0), tl.sum(m2, axis=0) + between, top,
    )  # fmt: skip


@triton.jit
def store(at, step, repeats, numbers):
    """The columns of a part or of a whole tensor, ``step`` apart, of elements that each stand ``repeats`` times over."""
    count, nans, posinfs, neginfs, smalls, lo, hi, total, sumsq, m2, exponent = numbers
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
    tl.store(at + EXPONENT * step, exponent)
