"""Ranks as processes: each is a fork of a process that has imported everything and has run nothing."""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import train
from trained import Plant, Setting

LIMIT_S = 120
"""A run takes seconds: a rank that takes longer hangs."""


def record(setting: Setting, plant: Plant | None, directory: Path) -> str:
    """Run all ranks. What they recorded is below ``directory / "ranks"``.

    Returns:
        What went wrong, or nothing.
    """
    directory.mkdir(parents=True)
    port = _free_port()
    ranks = [
        get_context("fork").Process(target=_rank, args=(setting, plant, rank, directory, port)) for rank in range(setting.ranks)
    ]
    return run_all(ranks)


def run_all(processes: list[Any]) -> str:
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    failed = [f"process {at}: {process.exitcode}" for at, process in enumerate(processes) if process.exitcode != 0]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return ", ".join(failed)


def _rank(setting: Setting, plant: Plant | None, rank: int, directory: Path, port: int) -> None:
    said_in(directory / f"rank{rank}.log")
    os.environ["MONITOR_OUTPUT_DIR"] = str(directory / "ranks")
    torch.set_num_threads(1)
    if setting.ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=setting.ranks)
    train(setting, plant, rank, directory)
    if setting.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def said_in(path: Path) -> None:
    """Have this process write to a file what it says."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
