"""Starts scripts as processes of their own, and sees to it that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
TAG = "MONITOR_TESTS_TAG"
PATIENCE = 120.0
"""Seconds after which a process that should have ended long ago is taken to hang."""

EVERY_STEP: dict[str, Any] = {
    "wg_distribution": True,
    "param_distribution": True,
    "xy_distribution": True,
    "all_xy": True,
    "ops": ["min", "max", "mean", "norm", "zeros", "nans"],
}
"""What is recorded in these tests: six kinds, each of which has rows in every step."""


class Ended(NamedTuple):
    """How a process ended and what it said."""

    status: int
    out: str
    err: str

    @property
    def losses(self) -> list[str]:
        """Of the steps that ended, in order."""
        steps = [line.split() for line in self.out.splitlines() if line.startswith("step ")]
        assert [int(number) for _, number, _ in steps] == list(range(len(steps)))
        return [loss for _, _, loss in steps]

    @property
    def warnings(self) -> list[str]:
        """What the monitor warned of, a line each."""
        return [line for line in self.err.splitlines() if line.startswith("[monitor] WARNING")]


class Started:
    """A process that may still be running."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], errors: Path, work: Path) -> None:
        self._errors = errors
        with open(errors, "wb") as stderr:
            self.process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=stderr, stdin=subprocess.DEVNULL, cwd=work, text=True
            )
        self._said: list[str] = []

    def wait_for(self, beginning: str) -> str:
        """The next line that begins so."""
        for line in self._lines():
            self._said.append(line)
            if line.startswith(beginning):
                return line
        raise AssertionError(f"the script never said {beginning!r}:\n{''.join(self._said)}{self._errors.read_text()}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> Ended:
        """Wait for its end."""
        rest, _ = self.process.communicate(timeout=PATIENCE)
        return Ended(self.process.returncode, "".join(self._said) + rest, self._errors.read_text())

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        return iter(self.process.stdout.readline, "")


class Launcher:
    """Starts scripts that record to ``base``; ``clean_up`` ends what still runs and tells of what should not have been left."""

    def __init__(self, directory: Path) -> None:
        self.base = directory / "out"
        self._directory = directory
        self._work = directory / "work"
        self._work.mkdir()
        self._tag = uuid.uuid4().hex
        self._started: list[Started] = []

    def start(
        self,
        script: str,
        *arguments: object,
        config: dict[str, Any] | None = None,
        prefix: Sequence[str] = (),
        module: Sequence[str] = (),
        base: Path | None = None,
        **environment: str,
    ) -> Started:
        """Start a script.

        Args:
            config: How it is monitored; None: it is not.
            prefix: A command that runs the interpreter.
            module: A module that runs the script, with its options.
            base: Where it records to, in place of ``base``.
            environment: Variables beside those of this process.
        """
        own = {
            "MONITOR_OUTPUT_DIR": str(base or self.base),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(ROOT),
            TAG: self._tag,
            **environment,
        }
        if config is not None:
            own["MONITOR_CONFIG"] = str(self._config(config))
        command = [*prefix, sys.executable, *module, str(SCRIPTS / script), *map(str, arguments)]
        errors = self._directory / f"errors-{len(self._started)}"
        self._started.append(Started(command, os.environ | own, errors, self._work))
        return self._started[-1]

    def run(self, script: str, *arguments: object, **how: Any) -> Ended:
        """Start a script and wait for its end."""
        return self.start(script, *arguments, **how).end()

    def clean_up(self) -> tuple[list[int], list[str]]:
        """The processes that outlived the one that started them, and the files that lie where none should."""
        for one in self._started:
            if one.process.poll() is None:
                one.process.kill()
            one.process.communicate()
        left = [] if until(lambda: not self._running(), 2.0) else self._running()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left, sorted(os.listdir(self._work))

    def _config(self, config: dict[str, Any]) -> Path:
        path = self._directory / f"config-{len(self._started)}.json"
        path.write_text(json.dumps(config))
        return path

    def _running(self) -> list[int]:
        return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and self._is_ours(entry)]

    def _is_ours(self, pid: str) -> bool:
        try:
            return f"{TAG}={self._tag}".encode() in Path("/proc", pid, "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            return False


def until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether ``condition`` came true in time."""
    deadline = time.monotonic() + seconds
    while not (came := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return came
