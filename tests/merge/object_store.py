"""A real S3 server on the loopback, and a proxy before it that can be away, slow, or break connections."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import boto3

ANYONE = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "not-to-be-shown",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "bucket"


@contextmanager
def s3_server() -> Iterator[int]:
    """Moto's server in a process of its own. Gives its port."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = next(match for line in process.stderr if (match := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
            yield int(said[1])
        finally:
            process.kill()


def client_of(port: int) -> Any:
    keys = {"aws_access_key_id": "someone", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)


def stored(client: Any, prefix: str) -> dict[str, bytes]:
    """The content of every object below ``prefix``, by the rest of its name."""
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
    keys = [one["Key"] for one in listed]
    return {key.removeprefix(f"{prefix}/"): client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


class Proxy:
    """Passes everything on to a port.

    Attributes:
        put: The paths that were asked to be written, in order.
        on_put: Called for each of these before it is passed on, with how many there were so far.
        delay: Seconds before each packet of a client is passed on.
    """

    def __init__(self, target: int) -> None:
        self.put: list[str] = []
        self.on_put: Callable[[int], None] = lambda _number: None
        self.delay = 0.0
        self._target, self._lock, self._connections = target, threading.Lock(), set[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._listen()

    def away(self) -> None:
        """Refuse connections, and reset those that there are."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def back(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listen()

    def away_for(self, seconds: float) -> None:
        self.away()
        threading.Timer(seconds, self.back).start()

    def reset(self) -> None:
        with self._lock:
            connections, self._connections = self._connections, set()
        for one in connections:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RD)
                one.close()

    def _listen(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._connections |= {client, server}
                threading.Thread(target=self._pass_on, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, asking: bool) -> None:
        with suppress(OSError):
            while packet := source.recv(65536):
                if asking:
                    time.sleep(self.delay)
                    self._note(packet)
                target.sendall(packet)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _note(self, packet: bytes) -> None:
        if match := re.match(rb"PUT (\S+) ", packet):
            with self._lock:
                self.put.append(match[1].decode().partition("?")[0])
                number = len(self.put)
            self.on_put(number)
