"""Starts the ranks of a job, and sees to it that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple

from evidence import PROVES
from hanging import IDLE_S, ends
from launching import MINDSPORE, Nursery

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
PATH = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "processes"), str(SCRIPTS.parent)]
"""Where scripts find what they import."""
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
    count: int, script: str | Path, directory: Path, *arguments: object, msrun: bool = PROVES, idle_s: float = IDLE_S
) -> Ranks:
    """Run a script as each rank of a job.

    Args:
        script: Its name in ``scripts``, or its whole path.
        directory: The job's own; must be empty or not exist. Where its processes run and their logs lie.
        msrun: Whether ``msrun`` starts them, as users do. Otherwise they are forked from a process that has imported MindSpore,
            with the variables that ``msrun`` would set: a fifteenth of the processor time.
        idle_s: For how long its processes may do nothing.

    Raises:
        TimeoutError: It hangs. By then it has been ended.
    """
    (directory / "log").mkdir(parents=True)
    port = free_port()
    command = [str(SCRIPTS / script), *map(str, arguments)]
    start = _start_msrun if msrun else _fork
    status = start(count, port, directory, command)
    try:
        if not ends(lambda: status() is not None, lambda: running(directory), idle_s):
            raise TimeoutError(f"no rank of {script} has worked for {idle_s} s")
    finally:
        _end_all(directory)
        ended = status()
    ranks = [_ended(directory, f"worker_{rank}", str(rank)) for rank in range(count)]
    return Ranks(ended or 0, ranks, _ended(directory, "scheduler", "scheduler"), port)


Status = Callable[[], int | None]
"""Of a whole job: None while it runs and each process that has ended did so well; 0 if all did."""


def _start_msrun(count: int, port: int, directory: Path, script: Sequence[str]) -> Status:
    job = [f"--worker_num={count}", f"--local_worker_num={count}", f"--master_port={port}", f"--log_dir={directory / 'log'}"]
    quiet = [
        "--join=True",
        f"--tail_worker_log={count}",
    ]  # of a rank that does not exist: msrun follows no log
    command = [
        str(Path(sys.executable).parent / "msrun"),
        *job,
        *quiet,
        str(SCRIPTS / "with_status.py"),
        str(directory),
        *script,
    ]
    with open(directory / "msrun", "wb") as said:
        return subprocess.Popen(
            command, cwd=directory, env=_surroundings(), stdout=said, stderr=said, stdin=subprocess.DEVNULL
        ).poll


def _fork(count: int, port: int, directory: Path, script: Sequence[str]) -> Status:
    nursery = Nursery.of_all_tests()
    of_job = {"MS_WORKER_NUM": str(count), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port), "MS_TOPO_TIMEOUT": "30"}

    def fork(name: str, log: str, **environment: str) -> Status:
        place = directory / f"process-{name}"
        place.mkdir()
        (directory / f"status-{name}").symlink_to(place / "status")
        for said in ("out", "errors"):
            (place / said).symlink_to(directory / "log" / f"{log}.log")
        request = {
            "place": str(place),
            "work": str(directory),
            "brief": False,
            "path": PATH,
            "environment": _surroundings() | of_job | environment,
            "command": script,
        }
        return nursery.fork(request, MINDSPORE).poll

    processes = [fork("scheduler", "scheduler", MS_ROLE="MS_SCHED", RANK_ID="0", RANK_SIZE=str(count))]
    for rank in map(str, range(count)):
        here = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": rank, "RANK_ID": rank, "DEVICE_ID": rank, "RANK_SIZE": str(count)}
        processes.append(fork(rank, f"worker_{rank}", **here))

    def status() -> int | None:
        found = [one() for one in processes]
        return next((abs(one) for one in found if one), None if None in found else 0)

    return status


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


def _end_all(directory: Path) -> None:
    """End what still runs."""
    while left := running(directory):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _runs_in(directory: Path, pid: str) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")) == directory.resolve()
    except OSError:  # it has ended, or is another user's
        return False


def free_port() -> int:
    """Below those that systems give to anyone who asks for any: no connection of another test gets it before the job does."""
    while True:
        port = SystemRandom().randrange(15_000, 31_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _surroundings() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(RESERVED)}
    path = os.pathsep.join([str(Path(sys.executable).parent), own.get("PATH", "")])  # msrun calls what it finds as `python`
    code = os.pathsep.join([*PATH, *filter(None, [own.get("PYTHONPATH")])])
    return own | {"PATH": path, "PYTHONPATH": code, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "GLOG_v": "3"}


def ended_job(script: str, directory: Path, base: Path, told: int, *, msrun: bool = PROVES) -> Ranks:
    """Two ranks that have ended, left no process behind, and told so many things each."""
    job = run_ranks(2, script, directory, base, msrun=msrun)
    assert running(directory) == []
    assert [len(rank.told) for rank in job.ranks] == [told] * 2, job.ranks
    return job
