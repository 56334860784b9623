"""Reads the elements of a tensor of any dtype and layout as numbers, in Triton.

Float8 and complex numbers are decoded from their bits, because not every device and Triton backend has such types.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors
# Triton compiles this code and reads its annotations: they must not become strings.

INF: tl.constexpr = tl.constexpr(float("inf"))


# --- elements -------------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_float8(raw, EXPONENT_BITS: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr):
    """The float32 value of a float8 byte.

    The bits are shifted to their positions in a float32. Multiplications correct the bias; they are exact for subnormal numbers
    too. ``SPECIAL`` states which bytes are not numbers: with ``"ieee"`` those of the largest exponent, with ``"all"`` those
    whose magnitude is all ones, with ``"zero"`` the negative zero.
    """
    byte = raw.to(tl.uint8, bitcast=True).to(tl.int32)
    magnitude = byte & 0x7F
    # In two steps, neither of which overflows or rounds.
    shifted = (magnitude << (16 + EXPONENT_BITS)).to(tl.float32, bitcast=True) * 18446744073709551616.0
    value = shifted * power_of_two(127 - BIAS - 64).to(tl.float32)
    nan = float("nan")
    if SPECIAL == "ieee":
        top: tl.constexpr = ((1 << EXPONENT_BITS) - 1) << (7 - EXPONENT_BITS)
        value = tl.where(magnitude == top, INF, tl.where(magnitude > top, nan, value))
    if SPECIAL == "all":
        value = tl.where(magnitude == 0x7F, nan, value)
    value = tl.where(byte >= 0x80, -value, value)
    if SPECIAL == "zero":
        value = tl.where(byte == 0x80, nan, value)
    return value


@triton.jit
def power_of_two(n):
    """2^n, float64, for -1022 <= n <= 1023."""
    return ((n + tl.full((), 1023, tl.int64)) << 52).to(tl.float64, bitcast=True)


@triton.jit
def scaled(v, n):
    """``v`` times 2^n, float64, for n from -2044 to 2044."""
    half = n >> 1
    return v * power_of_two(half) * power_of_two(n - half)


@triton.jit
def exponent_of(v):
    """The exponent that ``frexp`` returns for a positive float64."""
    tiny = v < 2.2250738585072014e-308
    bits = tl.where(tiny, v * 18014398509481984.0, v).to(tl.int64, bitcast=True)
    return (bits >> 52) - 1022 - tl.where(tiny, 54, 0)


@triton.jit
def _hypotenuse(a, b):
    """sqrt(a² + b²) of float64, rounded as if it were exact. C. F. Borges, "An Improved Algorithm for hypot(a, b)" (2019)."""
    a, b = tl.abs(a), tl.abs(b)
    infinite = (a == INF) | (b == INF)
    x, y = tl.maximum(a, b), tl.minimum(a, b)
    nan = (a != a) | (b != b)
    far = (x > 1e150) | (x < 1e-130)
    n = tl.where(far & (x > 0.0) & (x < INF), exponent_of(x), 0)
    x, y = scaled(x, -n), scaled(y, -n)
    h = tl.sqrt(tl.fma(x, x, y * y))
    hh, xx = h * h, x * x
    off = tl.fma(-y, y, hh - xx) + tl.fma(h, h, -hh) - tl.fma(x, x, -xx)
    h = tl.where(h > 0.0, h - off / (2.0 * h), h)
    return tl.where(infinite, INF, tl.where(nan, float("nan"), scaled(h, n)))


@triton.jit
def _loaded(at, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at, mask=mask, other=0)
    return tl.load(at)


@triton.jit
def _decoded(raw, DECODE: tl.constexpr, WORK: tl.constexpr):
    """The numbers encoded in words of one element each."""
    if DECODE == "e4m3fn":
        return _decode_float8(raw, 4, 7, "all")
    if DECODE == "e4m3fnuz":
        return _decode_float8(raw, 4, 8, "zero")
    if DECODE == "e5m2":
        return _decode_float8(raw, 5, 15, "ieee")
    if DECODE == "e5m2fnuz":
        return _decode_float8(raw, 5, 16, "zero")
    if DECODE == "e8m0fnu":
        byte = raw.to(tl.uint8, bitcast=True).to(tl.int32)
        value = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)
        return tl.where(byte == 255, float("nan"), value)
    if DECODE == "bfloat16":  # the upper half of a float32; some backends would flush subnormal bfloat16 to zero
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if DECODE == "bool":
        return (raw != 0).to(WORK)
    return raw.to(WORK)


@triton.jit
def _stored(at, offsets, mask, MASKED: tl.constexpr, DECODE: tl.constexpr):
    """The elements at ``offsets`` as they are stored, and the imaginary parts where those are read apart."""
    if DECODE == "complex128":
        return _loaded(at + 2 * offsets, mask, MASKED), _loaded(at + 2 * offsets + 1, mask, MASKED)
    raw = _loaded(at + offsets, mask, MASKED)
    return raw, raw


@triton.jit
def numbers_of(raw, imaginary, DECODE: tl.constexpr, WORK: tl.constexpr):
    """What ``_stored`` has returned, as numbers in the precision ``WORK``; undefined where they are masked."""
    if DECODE == "complex128":
        return _hypotenuse(raw, imaginary)
    if DECODE == "complex64":
        re = raw.to(tl.int32).to(tl.float32, bitcast=True)
        im = (raw >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        return _hypotenuse(re.to(tl.float64), im.to(tl.float64)).to(tl.float32)
    if DECODE == "complex32":
        re = raw.to(tl.int16).to(tl.float16, bitcast=True)
        im = (raw >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return _hypotenuse(re.to(tl.float64), im.to(tl.float64)).to(tl.float32)
    return _decoded(raw, DECODE, WORK)


@triton.jit
def _words(raw, index, GROUPED: tl.constexpr):
    """The sum of the words of each element, and of each word times its number (``partials``), both uint64.

    Args:
        index: The number of each element's first word, uint32.
        GROUPED: Words of 64 bits are two words.
    """
    index = index.to(tl.uint64)
    if GROUPED:
        whole = raw.to(tl.uint64, bitcast=True)
        low, high = whole.to(tl.uint32).to(tl.uint64), whole >> 32
        words = low + high
        placed = low * index + high * (index + 1)
    else:
        BITS: tl.constexpr = raw.dtype.primitive_bitwidth
        if BITS == 32:
            words = raw.to(tl.uint32, bitcast=True).to(tl.uint64)
        elif BITS == 16:
            words = raw.to(tl.uint16, bitcast=True).to(tl.uint32).to(tl.uint64)
        else:
            words = raw.to(tl.uint8, bitcast=True).to(tl.uint32).to(tl.uint64)
        placed = words * index
    return words, placed


# --- where elements are ---------------------------------------------------------------------------------------------------


@triton.jit
def _below(start, R: tl.constexpr, LANES: tl.constexpr):
    """Numbers from ``start`` on, shape ``(R, LANES)``."""
    return start + tl.arange(0, R)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _strided(index, sizes, strides, DIMS: tl.constexpr, GROUP: tl.constexpr):
    """The offsets of a strided tensor's elements, by index, or by index of groups of ``GROUP`` adjacent elements.

    Groups lie in the last dimension.

    Args:
        sizes: Sizes of the last ``DIMS - 1`` dimensions.
        strides: Strides of all ``DIMS`` dimensions.
    """
    offsets = index.to(tl.int64) * 0
    for back in tl.static_range(DIMS - 1):
        size = sizes[DIMS - 2 - back]
        if back == 0:
            size = size // GROUP
        size = size.to(index.dtype)
        if back == 0 and GROUP > 1:
            offsets += (index % size).to(tl.int64) * GROUP
        else:
            offsets += (index % size).to(tl.int64) * strides[DIMS - 1 - back]
        index = index // size
    return offsets + index.to(tl.int64) * strides[0]


@triton.jit
def tile(
    at, start, n, sizes, strides, MASKED: tl.constexpr, DECODE: tl.constexpr, WORK: tl.constexpr, DIMS: tl.constexpr,
    INDEX: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The tile that begins at element ``start`` of ``n``, shape ``(R, LANES, GROUP)``: the numbers and their mask."""
    raw, imaginary, mask = stored_tile(at, start, n, sizes, strides, MASKED, DECODE, DIMS, INDEX, R, LANES, GROUP)
    return numbers_of(raw, imaginary, DECODE, WORK), mask


@triton.jit
def stored_tile(
    at, start, n, sizes, strides, MASKED: tl.constexpr, DECODE: tl.constexpr, DIMS: tl.constexpr, INDEX: tl.constexpr,
    R: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same as it is stored: the elements, the imaginary parts where those are read apart, and the mask."""
    group = tl.arange(0, GROUP)[None, None, :]
    within = (_below(0, R, LANES) * GROUP)[:, :, None] + group
    mask = within < n - start
    if DIMS == 0:
        raw, imaginary = _stored(at + start * (2 if DECODE == "complex128" else 1), within, mask, MASKED, DECODE)
    else:
        first = tl.full((), start // GROUP, INDEX)
        offsets = _strided(first + _below(0, R, LANES).to(INDEX), sizes, strides, DIMS, GROUP)
        raw, imaginary = _stored(at, offsets[:, :, None] + group, mask, MASKED, DECODE)
    return raw, imaginary, mask


@triton.jit
def add_words(
    bits, places, raw, imaginary, mask, start, MASKED: tl.constexpr, DECODE: tl.constexpr, R: tl.constexpr,
    LANES: tl.constexpr, GROUP: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """``Σ b`` and ``places`` (``partials``) of each lane, uint64, updated with a tile that begins at element ``start``.

    Unchanged without ``CHECK``.
    """
    if CHECK:
        GROUPED: tl.constexpr = raw.dtype.primitive_bitwidth == 64
        EACH: tl.constexpr = 4 if DECODE == "complex128" else 2 if GROUPED else 1
        element = (_below(0, R, LANES) * GROUP)[:, :, None] + tl.arange(0, GROUP)[None, None, :]
        index = element.to(tl.uint32) * EACH
        words, placed = _words(raw, index, GROUPED)
        if DECODE == "complex128":
            further, beyond = _words(imaginary, index + 2, GROUPED)
            words, placed = words + further, placed + beyond
        if MASKED:
            words, placed = tl.where(mask, words, 0), tl.where(mask, placed, 0)
        of_lanes = tl.sum(tl.sum(words, axis=2), axis=0)
        bits += of_lanes
        places += tl.sum(tl.sum(placed, axis=2), axis=0) + of_lanes * (start * EACH).to(tl.uint64)
    return bits, places
