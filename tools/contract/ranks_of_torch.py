"""One rank of a job under DistributedDataParallel: ``ranks_of_torch.py DIRECTORY plain|monitored``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from model_of_torch import train
from rows import written_config
from torch.nn.parallel import DistributedDataParallel

from monitor.pytorch import TrainerMon


def main(directory: Path, way: str) -> None:
    """Train, and save what the run ended with as ``WAY-RANK.npz``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    monitor = None
    if way == "monitored":
        own = directory / str(rank)
        own.mkdir()
        monitor = TrainerMon(written_config(own), params_have_main_grad=False)
    trained = train(
        DistributedDataParallel,
        lambda model, optimizer: monitor and monitor.set_monitor(model, 1, optimizer, dist.group.WORLD),
        seed=rank,
    )
    if monitor is not None:
        monitor.close()
    np.savez(directory / f"{way}-{rank}.npz", **trained)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
