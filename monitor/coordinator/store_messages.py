"""Messages between a store and its clients: one line of JSON each. First both prove that they know the job's key.

The client sends a ``Hello`` with a random number. The server answers with another one. Then the client sends its proof.
The server verifies it before it sends its own. A proof is an HMAC over both numbers. So the key is never sent, and a proof that
was overheard is of no use later.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from typing import Any, Final, Literal

from monitor.coordinator.output import OUTPUT_VARIABLE
from monitor.coordinator.store_key import SET_KEY

MOST_BYTES: Final = 1 << 20
"""Largest size of a line. The longest message is a configuration."""

MOST_NAME: Final = 200
"""Characters of a job, of a process's id, of a random number."""

Side = Literal["client", "server"]


class ProtocolError(ConnectionError):
    """The peer does not speak this protocol."""


class RefusedError(ConnectionError):
    """The store at the address belongs to another job or run, has another key, or has no room."""

    OTHER_JOB: Final = "job"
    EARLIER_RUN: Final = "run"
    OTHER_KEY: Final = "key"
    FULL: Final = "full"

    SAID: Final = {
        OTHER_JOB: "it belongs to another job",
        EARLIER_RUN: "it belongs to an earlier run: another process has used it as rank {rank}",
        OTHER_KEY: f"it has another key than this rank. {SET_KEY}, or {OUTPUT_VARIABLE} to one directory that all hosts share",
        FULL: "it has reached its limit of connections",
    }
    """Only the reason is sent: a text of another program must not reach the log."""

    @classmethod
    def because(cls, reason: object, rank: int) -> RefusedError:
        """The error of the refused rank."""
        return cls(cls.SAID.get(str(reason), "it refuses this rank").format(rank=rank))


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a client.

    Attributes:
        process: Random id of the client's process. Another process with the same rank belongs to another run.
    """

    job: str
    rank: int
    process: str

    def to_message(self, nonce: str) -> dict[str, Any]:
        return {"hello": self.job, "rank": self.rank, "process": self.process, "nonce": nonce}

    @classmethod
    def parse(cls, message: dict[str, Any]) -> Hello:
        """Raises ``ProtocolError`` if ``message`` is not a hello."""
        rank = message.get("rank")
        if type(rank) is not int:
            raise ProtocolError("the client did not send a hello")
        return cls(text_in(message, "hello"), rank, text_in(message, "process"))


@dataclass(frozen=True, slots=True)
class Handshake:
    """The messages of client and server. Each proves with them that it knows the job's key.

    Attributes:
        asked: The client's random number.
        challenge: The server's.
        instance: Identifies the server among all servers ever at its port.
    """

    hello: Hello
    asked: str
    challenge: str
    instance: str

    @classmethod
    def answered(cls, hello: Hello, asked: str, message: dict[str, Any]) -> Handshake:
        """The client's side, after the server's answer. Raises ``ProtocolError``."""
        return cls(hello, asked, text_in(message, "challenge"), text_in(message, "instance"))

    def to_message(self) -> dict[str, Any]:
        """The server's answer to a hello."""
        return {"challenge": self.challenge, "instance": self.instance}

    def proof(self, key: bytes, by: Side) -> str:
        """The proof of one side. That of the other differs, so neither can return what it has received."""
        hello = self.hello
        said = [by, hello.job, hello.rank, hello.process, self.asked, self.challenge, self.instance]
        return hmac.digest(key, json.dumps(said).encode(), "sha256").hex()

    def is_proved(self, key: bytes, by: Side, given: object) -> bool:
        return isinstance(given, str) and hmac.compare_digest(self.proof(key, by).encode(), given.encode(errors="replace"))


def encode(message: dict[str, Any]) -> bytes:
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


def text_in(message: dict[str, Any], field: str) -> str:
    """A short text of a peer that has proved nothing yet. Raises ``ProtocolError``."""
    text = message.get(field)
    if not isinstance(text, str) or not 0 < len(text) <= MOST_NAME:
        raise ProtocolError("it is not a store, or does not speak its protocol")
    return text
