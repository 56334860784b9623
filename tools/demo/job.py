"""What the demos have in common: they are jobs of ranks, and what these record goes to one place."""

from __future__ import annotations

import os
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
