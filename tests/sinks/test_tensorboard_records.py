from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from monitor.sinks.tensorboard import record

ROOT = Path(__file__).resolve().parents[2]


def framed_by_the_package(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked_crc32c(length)) + content + struct.pack("<I", masked_crc32c(content))


@settings(max_examples=60)
@given(st.binary(max_size=40), st.integers(0, 500))
def test_a_record_is_framed_as_the_tensorboard_package_frames_it(text: bytes, repeated: int) -> None:
    content = text * (repeated % 97) + text[:repeated]
    assert framed_by_the_package(content) == record(content)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 255, 256, 257, 4095, 4096, 4097, 70001])
def test_every_length_has_the_right_checksums(length: int) -> None:
    content = bytes(i * i % 251 for i in range(length))
    assert framed_by_the_package(content) == record(content)


def test_a_forked_child_makes_the_same_record() -> None:
    content = bytes(range(256)) * 300
    expected = record(content)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"same" if record(content) == expected else b"else")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        assert answer.read() == b"same"
    os.waitpid(child, 0)


def test_without_the_c_extension_the_records_are_the_same_and_nothing_is_said() -> None:
    code = "\n".join(
        (
            "import sys",
            "sys.modules['google_crc32c.cext'] = None",
            "from monitor.sinks.tensorboard import record",
            "import google_crc32c",
            "assert google_crc32c.implementation == 'python'",
            "sys.stdout.write(record(bytes(range(256)) * 3).hex())",
        )
    )
    command = [sys.executable, "-W", "always", "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert bytes.fromhex(done.stdout) == record(bytes(range(256)) * 3)
