"""Starts scripts as processes of their own, and sees to it that nothing of them is left."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple, Protocol

from evidence import PROVES
from hanging import IDLE_S, ends, until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
EVERY_STEP: dict[str, Any] = {
    "wg_distribution": True,
    "param_distribution": True,
    "xy_distribution": True,
    "all_xy": True,
    "ops": ["min", "max", "mean", "norm", "zeros", "nans"],
}
"""What is recorded in these tests: six kinds, each of which has rows in every step."""


NURSERY = "NURSERY_OF_TESTS"
"""The variable that says where the processes are that fork scripts: one of each for all workers."""
TORCH, MINDSPORE = "torch", "mindspore"
PRELOADS = {
    # An optimizer's first step imports torch._dynamo.
    TORCH: ("torch", "torch._dynamo", "monitor.pytorch", "monitor.sinks.csv", "monitor.sinks.hdf5", "monitor.sinks.parquet"),
    "compiler": ("torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    "deepspeed": ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"),
    "lightning": ("lightning.pytorch",),
    "megatron": ("megatron.core", "megatron.core.optimizer", "megatron.core.models.gpt", "megatron.core.pipeline_parallel"),
    "transformers": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "accelerate.utils"),
    MINDSPORE: ("mindspore.communication", "monitor.mindspore", "monitor.sinks.csv", "monitor.sinks.hdf5"),
}
"""What scripts find imported already: torch, and as they ask the frameworks that take more than half a second each time; or
MindSpore alone.
"""


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


class Child(Protocol):
    """A process that may still be running."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit status, negative if a signal ended it; None while it runs."""


class Started:
    """A script that was started, and what it has said so far."""

    def __init__(self, child: Child, place: Path, processes: Callable[[], list[int]]) -> None:
        self.child, self._processes = child, processes
        self._out, self._errors = place / "out", place / "errors"

    def wait_for(self, line: str) -> None:
        """Wait until it has said ``line``."""

        def has_said() -> bool:
            return f"{line}\n" in self.said().splitlines(keepends=True)

        assert ends(lambda: has_said() or self.child.poll() is not None, self._processes), f"it never said {line!r}"
        assert has_said(), f"it ended before it said {line!r}:\n{self._errors.read_text()}"

    def said(self) -> str:
        """Standard output so far."""
        return self._out.read_text()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.child.pid, number)

    def end(self) -> Ended:
        """Wait for its end."""
        assert ends(lambda: self.child.poll() is not None, self._processes), f"it hangs:\n{self._errors.read_text()}"
        status = self.child.poll()
        assert status is not None
        return Ended(status, self._out.read_text(), self._errors.read_text())


class Nursery:
    """Processes that fork scripts from themselves, one for each of ``PRELOADS``; see ``scripts/nursery.py``. The first test
    that needs one starts it, for the tests of all workers.
    """

    def __init__(self, directory: Path) -> None:
        """Of what ``Requests`` has prepared there."""
        self._directory = directory

    @classmethod
    def of_all_tests(cls) -> Nursery:
        """The one of this run of tests."""
        return cls(Path(os.environ[NURSERY]))

    def fork(self, request: dict[str, Any], preload: str = "") -> ForkedChild:
        """Fork a script from the process that has imported what ``PRELOADS`` has under this name."""
        place, preload = Path(request["place"]), preload or TORCH
        with open(self._directory / "lock", "w", encoding="utf-8") as lock:  # a pipe may take only a part of a line at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in dict.fromkeys((preload if preload == MINDSPORE else TORCH, preload)):
                if not (self._directory / name / "started").exists():
                    self._start(name)
            self._ask(preload, request)
        assert ends(lambda: (place / "pid").exists() or self._ended(), self._processes)
        return ForkedChild(place)

    def _start(self, name: str) -> None:
        place = self._directory / name
        (place / "started").touch()
        request = {"place": str(place), "requests": str(place / "requests"), "modules": PRELOADS[name]}
        request["environment"] = {"DS_ACCELERATOR": "cpu"} if name == "deepspeed" else {}
        if name in (TORCH, MINDSPORE):
            command = [sys.executable, str(SCRIPTS / "nursery.py"), json.dumps(request)]
            environment = _surroundings() | {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # a thread of Arrow's
            self._first = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        else:
            self._ask(TORCH, request)

    def _ask(self, name: str, request: dict[str, Any]) -> None:
        with open(self._directory / name / "requests", "w", encoding="utf-8") as requests:
            requests.write(json.dumps(request) + "\n")

    def _ended(self) -> bool:
        return any(self._directory.glob("*/status"))

    def _processes(self) -> list[int]:
        return [int(path.read_text()) for path in self._directory.glob("*/pid")]


class Requests:
    """The named pipes from which the processes of a ``Nursery`` read what to fork. They end when these are closed."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="nursery-"))
        for name in PRELOADS:
            (self.directory / name).mkdir()
            os.mkfifo(self.directory / name / "requests")
        self._open = [os.open(path, os.O_RDWR) for path in self.directory.glob("*/requests")]  # which waits for no reader

    def close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        for started in self.directory.glob("*/started"):
            status = started.with_name("status")
            assert until(status.exists, IDLE_S)
            assert status.read_text() == "0", started.parent.name
        shutil.rmtree(self.directory)


class ForkedChild:
    """A child of the nursery's."""

    def __init__(self, place: Path) -> None:
        self.pid = int((place / "pid").read_text())
        self._status = place / "status"

    def poll(self) -> int | None:
        return int(self._status.read_text()) if self._status.exists() else None


class Launcher:
    """Starts scripts that record to ``base``; ``clean_up`` ends what still runs and tells of what should not have been left."""

    def __init__(self, directory: Path, nursery: Nursery) -> None:
        self.base = directory / "out"
        self._directory = directory
        self._nursery = nursery
        self._work = directory / "work"
        self._work.mkdir()
        self._started: list[Started] = []

    def start(
        self,
        script: str,
        *arguments: object,
        config: dict[str, Any] | None = None,
        base: Path | None = None,
        preload: str = "",
        brief: bool = False,
        **environment: str,
    ) -> Started:
        """Start a script in a fork of the nursery.

        Args:
            config: How it is monitored; None: it is not.
            base: Where it records to, in place of ``base``.
            preload: Which of ``PRELOADS`` it finds imported beside torch.
            brief: Whether a script that has come to its end need not free what was imported.
            environment: Variables beside those of this process.
        """
        place = self._place()
        request = {
            "place": str(place),
            "work": str(self._work),
            "brief": brief and not PROVES,
            "environment": self._environment(place, config, base or self.base, environment),
            "command": [str(SCRIPTS / script), *map(str, arguments)],
        }
        return self._keep(Started(self._nursery.fork(request, preload), place, self._running))

    def start_ranks(self, count: int, script: str, *arguments: object, **how: Any) -> list[Started]:
        """Start a script as each rank of a job."""
        port = _free_port()
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        return [self.start(script, *arguments, **how, **job, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]

    def start_interpreter(
        self,
        script: str,
        *arguments: object,
        config: dict[str, Any] | None = None,
        prefix: Sequence[str] = (),
        module: Sequence[str] = (),
    ) -> Started:
        """Start a script in an interpreter of its own.

        Args:
            config: How it is monitored; None: it is not.
            prefix: A command that runs the interpreter.
            module: A module that runs the script, with its options.
        """
        place = self._place()
        environment = self._environment(place, config, self.base, {})
        command = [*prefix, sys.executable, *module, str(SCRIPTS / script), *map(str, arguments)]
        with open(place / "out", "wb") as out, open(place / "errors", "wb") as err:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                cwd=self._work,
                start_new_session=True,
            )
        return self._keep(Started(process, place, self._running))

    def run(self, script: str, *arguments: object, **how: Any) -> Ended:
        """Start a script and wait for its end."""
        return self.start(script, *arguments, **how).end()

    def clean_up(self) -> tuple[list[int], list[str]]:
        """The processes that outlived the one that started them, and the files that lie where none should."""
        for one in self._started:
            if one.child.poll() is None:
                one.send(signal.SIGKILL)
            one.end()
        left = [] if until(lambda: not self._running(), 5.0) else self._running()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left, sorted(os.listdir(self._work))

    def _place(self) -> Path:
        place = self._directory / f"process-{len(self._started)}"
        place.mkdir()
        for said in ("out", "errors"):
            (place / said).touch()
        return place

    def _keep(self, started: Started) -> Started:
        self._started.append(started)
        return started

    def _environment(self, place: Path, config: dict[str, Any] | None, base: Path, own: dict[str, str]) -> dict[str, str]:
        environment = _surroundings() | {"MONITOR_OUTPUT_DIR": str(base)} | own
        if config is not None:
            (place / "config.json").write_text(json.dumps({"run_numbers": False, **config}))
            environment["MONITOR_CONFIG"] = str(place / "config.json")
        return environment

    def _running(self) -> list[int]:
        """Processes that run in our place of work: none but those that were started here, and theirs."""
        return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and self._works_here(entry)]

    def _works_here(self, pid: str) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/cwd") == str(self._work)
        except OSError:  # it has ended, or is another user's
            return False


def _free_port() -> int:
    """Below those that systems give to anyone who asks for any: no connection of another test gets it before the job does."""
    while True:
        port = SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _surroundings() -> dict[str, str]:
    """The environment without what would tell a script of another job than its own."""
    others = {name: value for name, value in os.environ.items() if name not in ("MONITOR_CONFIG", "RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(ROOT), str(SCRIPTS), *filter(None, [others.get("PYTHONPATH")])])
    return others | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": path}
