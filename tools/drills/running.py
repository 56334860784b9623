"""Runs the ranks of a job as processes, and looks after them until they have ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from faults import FAULTS
from spec import Job
from verdicts import DrillError, losses, require

HERE: Final = Path(__file__).resolve().parent
LONGEST_S: Final = 240.0
"""A job that takes longer hangs: a step takes milliseconds, and the monitor closes within 30 s."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended.

    Attributes:
        told: A line for each step.
        said: What it printed.
    """

    job: Job
    status: int
    told: list[str]
    said: str

    @property
    def steps(self) -> list[int]:
        """The monitor's numbers of the steps that have ended: one that raised before the optimizer's step has none."""
        done = [int(line.split(" ", 1)[0]) for line in self.told if line != "end" and "raised" not in line]
        return [self.job.begin + place for place in range(len(done))]


class Preload:
    """``disk.c``, compiled; None where there is no compiler."""

    def __init__(self, directory: Path) -> None:
        self.library: Path | None = None
        if (compiler := shutil.which("cc") or shutil.which("gcc")) is not None and sys.platform == "linux":
            library = directory / "disk.so"
            done = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "disk.c", "-ldl"], check=False)
            self.library = library if done.returncode == 0 else None


def a_job(ranks: Sequence[Job], preload: Preload, watch: Callable[[Sequence[subprocess.Popen[bytes]]], None]) -> list[Ended]:
    """Run the ranks of a job until all have ended.

    Args:
        watch: Called over and over while they run.

    Raises:
        DrillError: They have not ended in time.
    """
    port = _free_port() if len(ranks) > 1 else 0
    running = [_started(replace(job, port=port), preload) for job in ranks]
    deadline = time.monotonic() + LONGEST_S
    try:
        while any(process.poll() is None for process in running):
            watch(running)
            time.sleep(0.02)
            if time.monotonic() > deadline:
                for process in running:
                    process.send_signal(signal.SIGABRT)  # faulthandler prints where it hangs
                time.sleep(2.0)
                said = "\n".join(_said(job) for job in ranks)
                raise DrillError(f"the job has not ended after {LONGEST_S:.0f} s: {said[-4000:]}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [
        Ended(job, process.returncode, losses(Path(job.told)), _said(job)) for job, process in zip(ranks, running, strict=True)
    ]


def check_end(ended: Sequence[Ended]) -> None:
    """Each rank ended as training alone would have, and printed no error but that of the fault."""
    faults = [FAULTS[one.job.fault] for one in ended]
    is_fatal = any(0 not in fault.ends_with for fault in faults)
    for one, fault in zip(ended, faults, strict=True):
        others = is_fatal and fault.ends_with == (0,)  # a rank that lost another one
        require(others or one.status in fault.ends_with, f"rank {one.job.rank} ended with {one.status}: {one.said[-2000:]}")
        if not is_fatal:
            require("Traceback" not in one.said, f"rank {one.job.rank} printed a traceback: {one.said[-2000:]}")
        require("Fatal Python error" not in one.said, f"rank {one.job.rank} aborted: {one.said[-3000:]}")


def _started(job: Job, preload: Preload) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    if preload.library is not None and job.control:
        Path(job.control).write_bytes(struct.pack("3q", 0, 0, 0))
        environment |= {"LD_PRELOAD": str(preload.library), "DRILL_CONTROL": job.control, "DRILL_PLACE": job.output}
    with open(_errors(job), "ab") as errors:
        return subprocess.Popen(
            [sys.executable, str(HERE / "job.py"), job.text()],
            stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment, start_new_session=True,
        )  # fmt: skip


def _errors(job: Job) -> str:
    return f"{job.told}.said"


def _said(job: Job) -> str:
    return Path(_errors(job)).read_text(errors="replace")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
