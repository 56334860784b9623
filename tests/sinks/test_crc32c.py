from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as of_the_package

from monitor.sinks.crc32c import crc32c


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # from here on: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_it_gives_what_the_standard_says(text: bytes, expected: int) -> None:
    assert expected == crc32c(text)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 5000))
def test_it_gives_what_the_tensorboard_package_gives(text: bytes, repeated: int) -> None:
    assert int(of_the_package(text * (repeated % 97) + text[:repeated])) == crc32c(text * (repeated % 97) + text[:repeated])


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513, 4095, 4096, 4097, 70001])
def test_every_length_is_cut_into_lanes_right(length: int) -> None:
    text = bytes(i * i % 251 for i in range(length))
    assert int(of_the_package(text)) == crc32c(text)
