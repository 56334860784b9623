"""Starts the ranks of a job under ``msrun``, as users do, and sees to it that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple

from hanging import IDLE_S, ends

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
TOLD = "told "
RESERVED = ("MS_", "RANK_", "MONITOR_", "DYNAMIC_MONITOR", "DEVICE_ID")
"""What a launcher or a user has set for something else than the job."""


class Ended(NamedTuple):
    """How a rank ended and what it said.

    Attributes:
        status: Of its process, negative if a signal ended it; None if it never ended by itself.
        said: Standard output and errors, in one.
    """

    status: int | None
    said: str

    @property
    def told(self) -> list[Any]:
        """What the script printed as ``told`` and a value in JSON, in order."""
        return [json.loads(line.removeprefix(TOLD)) for line in self.said.splitlines() if line.startswith(TOLD)]

    @property
    def warnings(self) -> list[str]:
        """What the monitor warned of, and tracebacks, a line each."""
        return [line for line in self.said.splitlines() if line.startswith(("[monitor] WARNING", "Traceback", "Exception"))]


class Ranks(NamedTuple):
    """A job that has ended.

    Attributes:
        status: Of ``msrun``: 0 if that of each rank was.
        ranks: By number.
        scheduler: The process beside them, which runs the same script as far as to its initialisation.
        port: Of the scheduler.
    """

    status: int
    ranks: list[Ended]
    scheduler: Ended
    port: int


def run_ranks(
    count: int, script: str | Path, directory: Path, *arguments: object, idle_s: float = IDLE_S, **environment: str
) -> Ranks:
    """Run a script as each rank of a job.

    Args:
        script: Its name in ``scripts``, or its whole path.
        directory: The job's own; must be empty or not exist. Where its processes run and their logs lie.
        idle_s: For how long its processes may do nothing.
        environment: Variables beside those of this process.

    Raises:
        TimeoutError: It hangs. By then it has been ended.
    """
    directory.mkdir(exist_ok=True)
    port = _free_port()
    job = [f"--worker_num={count}", f"--local_worker_num={count}", f"--master_port={port}", f"--log_dir={directory / 'log'}"]
    quiet = [
        "--join=True",
        f"--tail_worker_log={count}",
    ]  # of a rank that there is not: no program is started that follows logs
    task = [str(SCRIPTS / "with_status.py"), str(directory), str(SCRIPTS / script), *map(str, arguments)]
    command = [str(Path(sys.executable).parent / "msrun"), *job, *quiet, *task]
    with open(directory / "msrun", "wb") as said:
        launcher = subprocess.Popen(
            command, cwd=directory, env=_surroundings() | environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL
        )
        try:
            if not ends(lambda: launcher.poll() is not None, lambda: running(directory), idle_s):
                raise TimeoutError(f"no rank of {script} has worked for {idle_s} s")
            status = launcher.wait()
        finally:
            _end_all(directory, launcher)
    ranks = [_ended(directory, f"worker_{rank}", str(rank)) for rank in range(count)]
    return Ranks(status, ranks, _ended(directory, "scheduler", "scheduler"), port)


def running(directory: Path) -> list[int]:
    """The processes of the job that runs there. ``msrun`` gives each rank a session of its own, so they are known by where they
    run.
    """
    return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _runs_in(directory, pid)]


def tell(value: Any) -> None:
    """For scripts: among what a rank has ``told``."""
    print(TOLD + json.dumps(value), flush=True)


def _ended(directory: Path, log: str, name: str) -> Ended:
    status, said = directory / f"status-{name}", directory / "log" / f"{log}.log"
    return Ended(int(status.read_text()) if status.exists() else None, said.read_text() if said.exists() else "")


def _end_all(directory: Path, launcher: subprocess.Popen[bytes]) -> None:
    """End what still runs."""
    launcher.kill()
    launcher.wait()
    while left := running(directory):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _runs_in(directory: Path, pid: str) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")) == directory.resolve()
    except OSError:  # it has ended, or is another user's
        return False


def _free_port() -> int:
    """Below those that systems give to anyone who asks for any: no connection of another test gets it before the job does."""
    while True:
        port = SystemRandom().randrange(15_000, 31_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _surroundings() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(RESERVED)}
    path = os.pathsep.join([str(Path(sys.executable).parent), own.get("PATH", "")])  # msrun calls what it finds as `python`
    code = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(SCRIPTS.parent), *filter(None, [own.get("PYTHONPATH")])])
    return own | {"PATH": path, "PYTHONPATH": code, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "GLOG_v": "3"}


def ended_job(script: str, directory: Path, base: Path, told: int) -> Ranks:
    """Two ranks that have ended, left no process behind, and told so many things each."""
    job = run_ranks(2, script, directory, base)
    assert running(directory) == []
    assert [len(rank.told) for rank in job.ranks] == [told] * 2, job.ranks
    return job
