"""CRC-32C of long texts, in numpy.

The checksum of a record in an event file. The tensorboard package computes it a byte at a time in Python, 8 MB a second, and
keeps every other thread from running meanwhile. Here the text is cut into lanes of equal length that are read side by side,
two bytes of each at a time, and the lanes' checksums are joined: a checksum is linear (over GF(2)) in the text, so that of a
text with n bytes behind it is a matrix times the text's own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_POLYNOMIAL: Final = np.uint32(0x82F63B78)
"""Of Castagnoli, its bits reversed."""

_ALL_ONES: Final = 0xFFFFFFFF
_BYTE, _PAIR = np.uint32(8), np.uint32(16)
_LOW_BYTE, _LOW_PAIR = np.uint32(0xFF), np.uint32(0xFFFF)
_LONG: Final = 256
"""Bytes below which lanes do not pay."""


def crc32c(text: bytes | bytearray | memoryview) -> int:
    """CRC-32C of ``text``, as iSCSI (RFC 3720) defines it."""
    if len(text) < _LONG:
        return _byte_by_byte(bytes(text))
    content = np.frombuffer(text, dtype=np.uint8)
    power = len(content).bit_length() // 2 + 1
    lanes = np.zeros(-(-len(content) // (1 << power)) << power, dtype=np.uint8)  # leading zeros leave a register of zeros
    lanes[len(lanes) - len(content) :] = content
    lanes[len(lanes) - len(content) :][:4] ^= 0xFF  # as good as a register that begins with ones
    return _joined(_side_by_side(lanes.reshape(-1, 1 << power)), power) ^ _ALL_ONES


def _byte_by_byte(text: bytes) -> int:
    register = _ALL_ONES
    for byte in text:
        register = register >> 8 ^ int(_of_bytes()[(register ^ byte) & 0xFF])
    return register ^ _ALL_ONES


def _side_by_side(lanes: NDArray[np.uint8]) -> Words:
    """The register of each lane, shape ``(lanes,)``."""
    registers = np.zeros(len(lanes), dtype=np.uint32)
    for pair in np.ascontiguousarray(lanes.view("<u2").T):
        registers = (registers >> _PAIR) ^ _of_pairs()[(registers & _LOW_PAIR) ^ pair]
    return registers


def _joined(registers: Words, power: int) -> int:
    """Of the whole text, from those of lanes of ``2**power`` bytes: neighbours in pairs, until one is left."""
    while len(registers) > 1:
        if len(registers) % 2:
            registers = np.concatenate([np.zeros(1, dtype=np.uint32), registers])
        registers = _shifted(registers[0::2], power) ^ registers[1::2]
        power += 1
    return int(registers[0])


def _shifted(registers: Words, power: int) -> Words:
    """What becomes of registers when ``2**power`` zero bytes follow."""
    result = np.zeros_like(registers)
    for byte, table in enumerate(_shift(power)):
        result ^= table[registers >> np.uint32(8 * byte) & _LOW_BYTE]
    return result


@lru_cache(maxsize=64)
def _shift(power: int) -> Words:
    """What becomes of each byte of a register, shape ``(4, 256)``: by its place and its value."""
    registers = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], dtype=np.uint32)
    if power:
        return _shifted(_shifted(registers, power - 1), power - 1)
    shifted: Words = (registers >> _BYTE) ^ _of_bytes()[registers & _LOW_BYTE]
    return shifted


@lru_cache(maxsize=1)
def _of_bytes() -> Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & np.uint32(1), _POLYNOMIAL, np.uint32(0))
    return table


@lru_cache(maxsize=1)
def _of_pairs() -> Words:
    table = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(2):
        table = (table >> _BYTE) ^ _of_bytes()[table & _LOW_BYTE]
    return table
