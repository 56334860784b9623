"""Records of an event file: a text with its length, both with a checksum, so that a torn one is recognised."""

from __future__ import annotations

import struct
import warnings

with warnings.catch_warnings():
    # Without its C extension the library says at import that it is slow. The user of a monitor can do nothing about that.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    import google_crc32c

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


def record(content: bytes) -> bytes:
    """``content`` framed for the end of a file."""
    length = _LENGTH.pack(len(content))
    return b"".join([length, _masked(length), content, _masked(content)])


def _masked(content: bytes) -> bytes:
    """The checksum, changed so that a checksum of a text that holds checksums still says something."""
    checksum = google_crc32c.value(content)
    rotated = checksum >> 15 | checksum << 17 & 0xFFFFFFFF
    return _CHECKSUM.pack(rotated + 0xA282EAD8 & 0xFFFFFFFF)
