"""Runs a script as the ranks of a job of MindSpore, and sees to it that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent / "scripts"
ROOT = SCRIPTS.parents[3]
PATIENCE = 120.0
"""Seconds after which a job is taken to hang."""


def run_ranks(script: str, ranks: int, directory: Path) -> list[dict[str, Any]]:
    """What each rank has told, in ``told_{rank}.json`` in the directory that its only argument names."""
    launcher = Path(sys.executable).with_name("msrun")
    options = [f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={_free_port()}", "--join=True"]
    command = [str(launcher), *options, f"--log_dir={directory / 'log'}", str(SCRIPTS / script), str(directory)]
    # The launcher starts whatever ``python`` is first in the path.
    path = os.pathsep.join([str(launcher.parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    with (directory / "out").open("wb") as out:
        job = subprocess.Popen(command, env=environment, cwd=directory, stdout=out, stderr=out)
    try:
        status = job.wait(PATIENCE)
    finally:
        for process in _with_children(job.pid) if job.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        job.wait()
    assert status == 0, (directory / "log" / "worker_0.log").read_text(errors="replace")[-4000:]
    return [json.loads((directory / f"told_{rank}.json").read_text()) for rank in range(ranks)]


def _with_children(process: int) -> list[int]:
    """It and all that it has started, which are in sessions of their own."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(one for child in children for one in _with_children(int(child)))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
