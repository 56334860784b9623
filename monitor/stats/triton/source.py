"""The source of the fused kernels, in Triton: they compute a tensor's table row in one launch and one read.

A tensor is cut into *parts*, one program each. The cut depends only on the number of elements and on how they can be read
(dtype, alignment, groups of adjacent elements). So the row is the same, bit for bit, alone or among others, on any device of a
kind.

A program reads its part tile by tile. It adds pairwise in the working precision within a tile, and in float64 from tile to
tile. It stores a row of partials in the workspace. The last program of a tensor combines the rows, in the order of the parts.

Most parts are read once, with a few instructions per element: minimum, maximum, sum, sum of squares, smalls. A part is read
again in two cases:

* A finite sum of squares proves that there is no NaN and no Inf. A large enough one proves that no square was lost below the
  range. If a proof fails, the part is read again in float64 throughout (``_reread_part``).
* The spread is computed as the difference of the two sums. If that is a small difference of large numbers, the part is read
  again and centred on its mean (``_centred``).

If ``HIGHER`` is set, every part is read once more, centred on its mean, for the sums of third and fourth powers
(``_higher_part``). If ``CHECK`` is set, the first read also sums the words.

Addresses are integers, and the types that they point to are fixed when a kernel is compiled. So a launch need not inspect its
arguments. This module is imported only if there is a device to run it on.
"""

import triton
import triton.language as tl

from monitor.stats.triton.elements import INF, add_words, exponent_of, numbers_of, power_of_two, scaled, stored_tile, tile
from monitor.stats.triton.rows import COLUMNS, combined, or_zero, shifted, store, store_row

# mypy: ignore-errors
# Triton compiles this code and reads its annotations: they must not become strings.

# --- a part ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _sum(v):
    """The sum within each lane, computed by one thread: shape ``(R, LANES, GROUP)`` to ``(LANES,)``."""
    return tl.sum(tl.sum(v, axis=2), axis=0)


@triton.jit
def _min(v):
    return tl.min(tl.min(v, axis=2), axis=0)


@triton.jit
def _max(v):
    return tl.max(tl.max(v, axis=2), axis=0)


@triton.jit
def _add_tile(v, mask, MASKED: tl.constexpr, bound, lo, hi, sums, squares, smalls):
    """The running columns of each lane, updated with a tile."""
    small = tl.where(tl.abs(v) < bound, 1.0, 0.0)
    least, most = v, v
    if MASKED:
        small = tl.where(mask, small, 0.0)
        least, most = tl.where(mask, v, INF), tl.where(mask, v, -INF)
        v = tl.where(mask, v, 0.0)
    lo, hi = tl.minimum(lo, _min(least)), tl.maximum(hi, _max(most))
    sums += _sum(v).to(tl.float64)
    squares += _sum(v * v).to(tl.float64)
    return lo, hi, sums, squares, smalls + _sum(small)


@triton.jit
def _centred(
    at, start, whole, end, n, sizes, strides, mean, share, DECODE: tl.constexpr, WORK: tl.constexpr, DIMS: tl.constexpr,
    INDEX: tl.constexpr, REST: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Σ x and Σ (x - mean)² of a part, read again; the second is corrected for the rounding of the mean.

    Σ x of the first read was rounded in the working precision. With a small spread, that error would look like a spread between
    the means of parts.
    """
    pivot = mean.to(WORK)
    sums, squares = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    for here in range(start, whole, R * LANES * GROUP):
        v, _ = tile(at, here, n, sizes, strides, False, DECODE, WORK, DIMS, INDEX, R, LANES, GROUP)
        d = v - pivot
        sums, squares = sums + _sum(d).to(tl.float64), squares + _sum(d * d).to(tl.float64)
    for here in range(whole, end, REST * LANES * GROUP):
        v_rest, mask = tile(at, here, n, sizes, strides, True, DECODE, WORK, DIMS, INDEX, REST, LANES, GROUP)
        d_rest = tl.where(mask, v_rest - pivot, 0.0)
        sums, squares = sums + _sum(d_rest).to(tl.float64), squares + _sum(d_rest * d_rest).to(tl.float64)
    rest = tl.sum(sums, axis=0)
    m2 = tl.maximum(tl.sum(squares, axis=0) - rest * rest * share, 0.0)
    return pivot.to(tl.float64) * (end - start).to(tl.float64) + rest, m2


@triton.jit
def _add_powers(
    v, mask, MASKED: tl.constexpr, top, pivot, WORK: tl.constexpr, sums, squares, cubes, fourths, magnitudes, nearest
):  # fmt: skip
    """The running sums of powers of v / 2^top - pivot, of each lane, updated with a tile; and of |v| / 2^top, and the least |v|
    other than 0.
    """
    kept = tl.abs(v) < INF
    if MASKED:
        kept = kept & mask
    v = tl.where(kept, v, 0.0)
    w = scaled(v, -top) if tl.float64 == WORK else v * power_of_two(-top).to(WORK)
    d = tl.where(kept, w - pivot, 0.0)
    dd = d * d
    magnitudes += _sum(tl.abs(w)).to(tl.float64)
    nearest = tl.minimum(nearest, _min(tl.where(v != 0.0, tl.abs(v), INF)))
    sums, squares = sums + _sum(d).to(tl.float64), squares + _sum(dd).to(tl.float64)
    cubes, fourths = cubes + _sum(dd * d).to(tl.float64), fourths + _sum(dd * dd).to(tl.float64)
    return sums, squares, cubes, fourths, magnitudes, nearest


@triton.jit
def _higher_part(
    at, start, whole, end, n, sizes, strides, finite, mean, exponent, least, most, DECODE: tl.constexpr, WORK: tl.constexpr,
    DIMS: tl.constexpr, INDEX: tl.constexpr, REST: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Σ (x - mean)³, Σ (x - mean)⁴, Σ |x| and the least |x| other than 0, over the finite elements of a part, read again. The
    elements differ.

    Elements are divided by a power of two near their largest magnitude. So fourth powers fit the working precision: distances
    from the mean are 0, or at least 2^-24 of that magnitude in float32.
    """
    top = exponent_of(tl.maximum(tl.abs(least), tl.abs(most)))
    if tl.float64 != WORK:
        top = tl.minimum(tl.maximum(top, -126), 126)
    pivot = scaled(mean, exponent.to(tl.int64) - top).to(WORK)
    sums, squares = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    cubes, fourths = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    magnitudes, nearest = tl.zeros((LANES,), tl.float64), tl.full((LANES,), INF, WORK)
    for here in range(start, whole, R * LANES * GROUP):
        v, mask = tile(at, here, n, sizes, strides, False, DECODE, WORK, DIMS, INDEX, R, LANES, GROUP)
        sums, squares, cubes, fourths, magnitudes, nearest = _add_powers(
            v, mask, False, top, pivot, WORK, sums, squares, cubes, fourths, magnitudes, nearest
        )
    for here in range(whole, end, REST * LANES * GROUP):
        v_rest, mask_rest = tile(at, here, n, sizes, strides, True, DECODE, WORK, DIMS, INDEX, REST, LANES, GROUP)
        sums, squares, cubes, fourths, magnitudes, nearest = _add_powers(
            v_rest, mask_rest, True, top, pivot, WORK, sums, squares, cubes, fourths, magnitudes, nearest
        )
    m3, m4 = shifted(
        finite, tl.sum(sums, axis=0), tl.sum(squares, axis=0), tl.sum(cubes, axis=0), tl.sum(fourths, axis=0), least, most
    )
    up = top - exponent.to(tl.int64)  # the sums of the part are divided by 2^exponent, not by 2^top
    m3, m4 = scaled(m3, 3 * up), scaled(m4, 4 * up)
    known = (tl.abs(m3) < INF) & (m4 < INF)
    abssum = scaled(tl.sum(magnitudes, axis=0), up)
    return tl.where(known, m3, 0.0), tl.where(known, m4, 0.0), abssum, or_zero(tl.min(nearest, axis=0).to(tl.float64))


@triton.jit
def _reread_part(
    at, start, end, n, sizes, strides, bound, DECODE: tl.constexpr, WORK: tl.constexpr, DIMS: tl.constexpr,
    INDEX: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, HIGHER: tl.constexpr,
):  # fmt: skip
    """The columns of a part with NaN or Inf, or with squares beyond the range of its precision; in float64 throughout."""
    end = tl.minimum(end, n)
    step: tl.constexpr = LANES * GROUP
    none = tl.zeros((LANES,), tl.int32)
    nan, posinf, neginf, small = none, none, none, none
    least, most = tl.full((LANES,), INF, WORK), tl.full((LANES,), -INF, WORK)
    for here in range(start, end, step):
        v, mask = tile(at, here, end, sizes, strides, True, DECODE, WORK, DIMS, INDEX, 1, LANES, GROUP)
        kept = mask & (tl.abs(v) < INF)
        nan += _sum((mask & (v != v)).to(tl.int32))
        posinf += _sum((mask & (v == INF)).to(tl.int32))
        neginf += _sum((mask & (v == -INF)).to(tl.int32))
        small += _sum((mask & (tl.abs(v) < bound)).to(tl.int32))
        least, most = tl.minimum(least, _min(tl.where(kept, v, INF))), tl.maximum(most, _max(tl.where(kept, v, -INF)))
    nans, posinfs, neginfs = tl.sum(nan, axis=0), tl.sum(posinf, axis=0), tl.sum(neginf, axis=0)
    smalls, lo, hi = tl.sum(small, axis=0), tl.min(least, axis=0), tl.max(most, axis=0)
    count = end - start
    finite = (count - nans - posinfs - neginfs).to(tl.float64)
    exponent = tl.full((), 0, tl.int64)
    if tl.float64 == WORK:  # squares and sums of anything narrower fit a float64
        absmax = tl.where(finite > 0.0, tl.maximum(tl.abs(lo), tl.abs(hi)), 0.0)
        LARGE: tl.constexpr = 1e60 if HIGHER else 1e100
        SMALL: tl.constexpr = 1e-60 if HIGHER else 1e-100
        if (absmax > 0.0) & ((absmax >= LARGE) | (absmax <= SMALL)):
            exponent = exponent_of(absmax)
    sums, squares = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    for here in range(start, end, step):
        v, mask = tile(at, here, end, sizes, strides, True, DECODE, WORK, DIMS, INDEX, 1, LANES, GROUP)
        w = scaled(tl.where(mask & (tl.abs(v) < INF), v, 0.0).to(tl.float64), -exponent)
        sums, squares = sums + _sum(w), squares + _sum(w * w)
    total, sumsq = tl.sum(sums, axis=0), tl.sum(squares, axis=0)
    share = 1.0 / tl.maximum(finite, 1.0)
    mean = total * share
    sums, squares = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    for here in range(start, end, step):
        v, mask = tile(at, here, end, sizes, strides, True, DECODE, WORK, DIMS, INDEX, 1, LANES, GROUP)
        kept = mask & (tl.abs(v) < INF)
        w = tl.where(kept, scaled(tl.where(kept, v, 0.0).to(tl.float64), -exponent) - mean, 0.0)
        sums, squares = sums + _sum(w), squares + _sum(w * w)
    rest = tl.sum(sums, axis=0)
    m2 = tl.maximum(tl.sum(squares, axis=0) - rest * rest * share, 0.0)
    return (
        count.to(tl.float64), nans.to(tl.float64), posinfs.to(tl.float64), neginfs.to(tl.float64), smalls.to(tl.float64),
        lo.to(tl.float64), hi.to(tl.float64), total, sumsq, m2, exponent.to(tl.float64),
    )  # fmt: skip


@triton.jit
def _part(
    at, start, end, n, sizes, strides, bound, DECODE: tl.constexpr, WORK: tl.constexpr, DIMS: tl.constexpr,
    INDEX: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, LEAST: tl.constexpr,
    HIGHER: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """The columns of the elements from ``start`` to ``end``, or to ``n`` if that comes first."""
    TILE: tl.constexpr = R * LANES * GROUP
    left = tl.minimum(end, n) - start
    lo, hi = tl.full((LANES,), INF, WORK), tl.full((LANES,), -INF, WORK)
    sums, squares = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    smalls = tl.zeros((LANES,), tl.float32)
    bits, places = tl.zeros((LANES,), tl.uint64), tl.zeros((LANES,), tl.uint64)
    whole = start + left // TILE * TILE
    for here in range(start, whole, TILE):
        raw, imaginary, mask = stored_tile(at, here, n, sizes, strides, False, DECODE, DIMS, INDEX, R, LANES, GROUP)
        v = numbers_of(raw, imaginary, DECODE, WORK)
        lo, hi, sums, squares, smalls = _add_tile(v, mask, False, bound, lo, hi, sums, squares, smalls)
        bits, places = add_words(bits, places, raw, imaginary, mask, here, False, DECODE, R, LANES, GROUP, CHECK)
    # If the mask is the same for whole groups, the rest of the tile is read at once; else in pieces, to save registers.
    REST: tl.constexpr = R if WIDE else 1
    for here in range(whole, start + left, REST * LANES * GROUP):
        raw_rest, imaginary_rest, mask_rest = stored_tile(
            at, here, n, sizes, strides, True, DECODE, DIMS, INDEX, REST, LANES, GROUP
        )
        v_rest = numbers_of(raw_rest, imaginary_rest, DECODE, WORK)
        lo, hi, sums, squares, smalls = _add_tile(v_rest, mask_rest, True, bound, lo, hi, sums, squares, smalls)
        bits, places = add_words(
            bits, places, raw_rest, imaginary_rest, mask_rest, here, True, DECODE, REST, LANES, GROUP, CHECK
        )
    least, most = tl.min(lo, axis=0).to(tl.float64), tl.max(hi, axis=0).to(tl.float64)
    total, sumsq = tl.sum(sums, axis=0), tl.sum(squares, axis=0)
    count = left.to(tl.float64)
    equal = (least == most) & (sumsq < INF)
    proven = (sumsq < INF) & (sumsq >= count * LEAST)
    if tl.float64 == WORK:
        absmax = tl.maximum(tl.abs(least), tl.abs(most))
        LARGE: tl.constexpr = 1e60 if HIGHER else 1e100
        SMALL: tl.constexpr = 1e-60 if HIGHER else 1e-100
        inside = (absmax < LARGE) & ((absmax > SMALL) | (absmax == 0.0))
        equal, proven = equal & inside, proven & inside
    share = 1.0 / tl.maximum(count, 1.0)
    m2 = sumsq - total * total * share
    small = tl.sum(smalls, axis=0).to(tl.float64)
    nans, posinfs, neginfs = tl.zeros_like(count), tl.zeros_like(count), tl.zeros_like(count)
    exponent = tl.zeros_like(count)
    if equal:
        total, sumsq, m2 = count * least, count * least * least, tl.zeros_like(count)
    elif (left > 0) & (proven == 0):
        count, nans, posinfs, neginfs, small, least, most, total, sumsq, m2, exponent = _reread_part(
            at, start, end, n, sizes, strides, bound, DECODE, WORK, DIMS, INDEX, LANES, GROUP, HIGHER
        )
    elif (left > 0) & (m2 < sumsq * 0.0625):
        total, m2 = _centred(
            at,
            start,
            whole,
            start + left,
            n,
            sizes,
            strides,
            total * share,
            share,
            DECODE,
            WORK,
            DIMS,
            INDEX,
            REST,
            R,
            LANES,
            GROUP,
        )
    m3, m4, abssum, nearest = tl.zeros_like(count), tl.zeros_like(count), tl.zeros_like(count), tl.zeros_like(count)
    if HIGHER:
        m2 = tl.where(least < most, m2, 0.0)  # of equal elements beside NaN or Inf it is a rounding error
        finite = count - nans - posinfs - neginfs
        if finite > 0.0:
            nearest = tl.abs(least)
            abssum = scaled(finite * nearest, -exponent.to(tl.int64))
        if least < most:
            m3, m4, abssum, nearest = _higher_part(
                at, start, whole, start + left, n, sizes, strides, finite, total / finite, exponent, least, most,
                DECODE, WORK, DIMS, INDEX, REST, R, LANES, GROUP,
            )  # fmt: skip
    checked = tl.sum(bits, axis=0) + (tl.maximum(left, 0) if CHECK else left * 0).to(tl.uint64)
    return (
        count,
        nans,
        posinfs,
        neginfs,
        small,
        least,
        most,
        total,
        sumsq,
        m2,
        m3,
        m4,
        abssum,
        nearest,
        exponent,
        checked,
        tl.sum(places, axis=0),
    )


# --- all parts ------------------------------------------------------------------------------------------------------------


@triton.jit
def _read(
    address, n, part, tiles, bound, sizes, strides, ELEMENT: tl.constexpr, DECODE: tl.constexpr, WORK: tl.constexpr,
    DIMS: tl.constexpr, INDEX: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr,
    LANES: tl.constexpr, GROUP: tl.constexpr, LEAST: tl.constexpr, HIGHER: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """The columns of one part, of ``tiles`` tiles, of the ``n`` elements from ``address`` on."""
    at = address.to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    if EVEN:
        n = n // 16 * 16  # tells the compiler that n is a multiple of 16, so masks are the same for whole groups
    start = part.to(tl.int64) * tiles * (R * LANES * GROUP)
    end = start + tiles * (R * LANES * GROUP)
    bound = tl.full((), bound, tl.float64).to(WORK)
    return _part(
        at, start, end, n, sizes, strides, bound, DECODE, WORK, DIMS, INDEX, ALIGNED and EVEN, R, LANES, GROUP, LEAST, HIGHER,
        CHECK,
    )  # fmt: skip


@triton.jit
def _store_part(
    numbers, part, parts, row, workspace, counter, repeats, WORK: tl.constexpr, ROWS: tl.constexpr, HIGHER: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Store the columns of a part in the workspace; the last program of a tensor combines all parts into the table row.

    Args:
        row: Address of the table row.
        workspace: Address of memory for ``parts`` rows of ``COLUMNS`` float64.
        counter: Address of an int32 that is 0 before and after.
    """
    page = row.to(tl.pointer_type(tl.float64))
    if parts == 1:
        store_row(page, repeats.to(tl.float64), numbers, CHECK)
    else:
        rows = workspace.to(tl.pointer_type(tl.float64))
        store(rows + part, parts, tl.full((), 1.0, tl.float64), numbers, CHECK)
        tl.debug_barrier()  # all threads must have stored before one thread counts
        done = tl.atomic_add(counter.to(tl.pointer_type(tl.int32)), 1, sem="acq_rel", scope="gpu")
        if done == parts - 1:
            tl.debug_barrier()
            numbers = combined(rows, parts, ROWS, WORK, HIGHER, CHECK)
            store_row(page, repeats.to(tl.float64), numbers, CHECK)
            tl.store(counter.to(tl.pointer_type(tl.int32)), 0)


RUNTIME = ("address", "n", "parts", "tiles", "row", "micro_step", "workspace", "counter", "bound", "repeats")
STRIDES = ("size1", "size2", "size3", "stride0", "stride1", "stride2", "stride3")


@triton.jit(do_not_specialize=[*RUNTIME, *STRIDES])
def reduce_one(
    address: tl.int64, n: tl.int64, parts: tl.int32, tiles: tl.int32, row: tl.int64, micro_step: tl.int64,
    workspace: tl.int64, counter: tl.int64, bound: tl.float64, repeats: tl.int64, size1: tl.int64, size2: tl.int64,
    size3: tl.int64, stride0: tl.int64, stride1: tl.int64, stride2: tl.int64, stride3: tl.int64,
    ELEMENT: tl.constexpr, DECODE: tl.constexpr, WORK: tl.constexpr, DIMS: tl.constexpr, INDEX: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, LEAST: tl.constexpr, HIGHER: tl.constexpr, CHECK: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Reduce a tensor to the table row ``micro_step`` rows below ``row``; do nothing if ``micro_step`` is negative.

    One program runs for each of ``parts``. ``micro_step`` is the address of an int64, or 0 for row ``row`` itself.
    """
    below = tl.full((), 0, tl.int64)
    if micro_step.to(tl.int64) != 0:
        below = tl.load(micro_step.to(tl.int64).to(tl.pointer_type(tl.int64)))
    if ALIGNED and GROUP > 1:  # tells the compiler that every group is aligned
        stride0, stride1, stride2 = stride0 // GROUP * GROUP, stride1 // GROUP * GROUP, stride2 // GROUP * GROUP
    if DIMS <= 1:
        sizes = (size1,)
        strides = (stride0,)
    elif DIMS == 2:
        sizes = (size1,)
        strides = (stride0, stride1)
    elif DIMS == 3:
        sizes = (size1, size2)
        strides = (stride0, stride1, stride2)
    else:
        sizes = (size1, size2, size3)
        strides = (stride0, stride1, stride2, stride3)
    part = tl.program_id(0)
    if below >= 0:
        numbers = _read(
            address.to(tl.int64), n.to(tl.int64), part, tiles.to(tl.int64), bound, sizes, strides,
            ELEMENT, DECODE, WORK, DIMS, INDEX, ALIGNED, EVEN, R, LANES, GROUP, LEAST, HIGHER, CHECK,
        )  # fmt: skip
        page = row.to(tl.int64) + below * ROW_BYTES
        workspace, counter = workspace.to(tl.int64), counter.to(tl.int64)
        _store_part(numbers, part, parts, page, workspace, counter, repeats, WORK, ROWS, HIGHER, CHECK)


@triton.jit(do_not_specialize=["table", "tensors", "workspace", "counters", "bound"])
def reduce_many(
    table: tl.int64, tensors: tl.int32, workspace: tl.int64, counters: tl.int64, bound: tl.float64,
    ELEMENT: tl.constexpr, DECODE: tl.constexpr, WORK: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, LEAST: tl.constexpr,
    HIGHER: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Reduce dense tensors to one table row each, with one program per part of each tensor.

    ``table`` is the address of ``FIELDS`` columns of ``tensors`` int64: address, elements, row, parts, tiles of a part, sum of
    the parts of earlier tensors. Then follows an int64 for each program, the index of its tensor.
    """
    at = table.to(tl.int64).to(tl.pointer_type(tl.int64))
    tensor = tl.load(at + FIELDS * tensors + tl.program_id(0)).to(tl.int32)
    part = tl.program_id(0) - tl.load(at + 5 * tensors + tensor).to(tl.int32)
    numbers = _read(
        tl.load(at + tensor), tl.load(at + tensors + tensor), part, tl.load(at + 4 * tensors + tensor), bound, (), (),
        ELEMENT, DECODE, WORK, 0, tl.uint32, ALIGNED, EVEN, R, LANES, GROUP, LEAST, HIGHER, CHECK,
    )  # fmt: skip
    # Read only now, because all registers were in use while the part was read.
    row, parts = tl.load(at + 2 * tensors + tensor), tl.load(at + 3 * tensors + tensor).to(tl.int32)
    workspace = workspace.to(tl.int64) + tl.load(at + 5 * tensors + tensor) * COLUMNS * 8
    counter = counters.to(tl.int64) + tensor.to(tl.int64) * 4
    _store_part(numbers, part, parts, row, workspace, counter, tl.full((), 1, tl.int64), WORK, ROWS, HIGHER, CHECK)


FIELDS: tl.constexpr = tl.constexpr(6)
