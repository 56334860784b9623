"""Processes that train side by side and step in turn, so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

UNMONITORED = "unmonitored"
WORKER = Path(__file__).with_name("worker.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SECONDS_TO_LEAVE = 10


class WorkerError(Exception):
    """A measured process ended before it was asked to; the message holds the end of its log."""


class Worker:
    """A process that runs ``worker.py``. Leaving the context ends it.

    Args:
        python: The interpreter; it must have torch, and the monitor if there is one.
        directory: Takes the monitor's output and the log. Made here.
        monitor: ``ours``, ``before``, ``peer`` or ``UNMONITORED``.
        environment: Variables on top of those of this process.
    """

    def __init__(
        self, python: str, workload: str, config: Path, directory: Path, monitor: str, environment: Mapping[str, str]
    ) -> None:
        directory.mkdir(parents=True)
        self.output = directory / "output"
        self._log = directory / "log"
        command = [python, str(WORKER), workload, monitor, str(config)]
        environment = {**os.environ, **ONE_THREAD, "MONITOR_OUTPUT_DIR": str(self.output), **environment}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=directory
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            WorkerError: The process has ended.
        """
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Wait for a reply: that of a request, or the one that says that training can begin.

        Raises:
            WorkerError: The process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failure(self) -> WorkerError:
        status = self._process.wait(timeout=SECONDS_TO_LEAVE)
        lines = self._log.read_text(errors="replace").splitlines()
        return WorkerError("\n".join([f"A measured process ended with status {status}. The end of its log:", *lines[-15:]]))


def step_round(workers: Mapping[str, Worker], number: int, steps: int) -> dict[str, dict[str, Any]]:
    """Let each of ``workers`` take ``steps`` steps, one worker after the other; who begins changes with the round's number."""
    return {name: workers[name].ask(step=steps) for name in rotated(list(workers), number)}


def rotated(items: Sequence[T], number: int) -> list[T]:
    start = number % len(items)
    return [*items[start:], *items[:start]]
