"""What the demos have in common: they are jobs of ranks, and what these record goes to one place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def process_group(started_by: str) -> Iterator[None]:
    """The process group that ``torchrun`` has prepared.

    Args:
        started_by: The command that starts this demo.

    Raises:
        SystemExit: This is not a rank of a job.
    """
    if not dist.is_torchelastic_launched():
        raise SystemExit(f"The demo is a job of two ranks. Start it with:  {started_by}")
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def output_directory() -> Path:
    """The place that recordings go to."""
    return Path(os.environ.get("MONITOR_OUTPUT_DIR", "./monitor_output")).expanduser().resolve()


def write_report(run: Path, job: str, page: Path) -> Path:
    """Write the page about a run, as ``trainermon report RUN --job JOB -o PAGE`` does. Returns where it is.

    Raises:
        SystemExit: It could not be written.
    """
    command = [sys.executable, "-m", "monitor", "report", str(run), "--job", job, "-o", str(page)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if not page.is_file():
        raise SystemExit(f"The report ended with status {done.returncode}.")
    return page
