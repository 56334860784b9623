"""Messages between a store and those who ask it: a line of JSON each."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

MOST_BYTES: Final = 1 << 20
"""Of a line. The longest that is sent is a configuration."""

BLOCK: Final = 1 << 16


class ProtocolError(ConnectionError):
    """The other side speaks something else."""


def spell(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """Raises ``ProtocolError``."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ProtocolError(f"expected a message of a store, received {line[:80]!r}")
    return message


def receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """The one message that is under way. Bounded however slowly it comes.

    Args:
        deadline: By ``time.monotonic``.

    Raises:
        OSError: It did not come, or is none.
    """
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(BLOCK)
        line += received
        if not received or len(line) > MOST_BYTES:
            raise ProtocolError("the connection was closed" if not received else f"a line has more than {MOST_BYTES} bytes")
    return parse(line)
