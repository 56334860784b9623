"""Data-parallel ranks that train a small model until the file ``STOP`` is there; ``steady.py STOP``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from monitor.pytorch import TrainerMon

SECONDS_A_STEP = 0.05
STEPS_A_SAVE = 4
"""The monitor saves its manifest every 30 seconds; here it does so often, also in the middle of a record."""


def main(stop: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False)
    monitor.set_monitor(model, 1, optimizer)
    ended, step = torch.zeros(1), 0
    while not ended.item():
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(SECONDS_A_STEP)
        step += 1
        if step % STEPS_A_SAVE == 0:
            monitor.flush(10.0)
        ended[0] = float(stop.exists())
        dist.all_reduce(ended)
    monitor.close()


torch.set_num_threads(1)
dist.init_process_group("gloo")
main(Path(sys.argv[1]))
dist.barrier()
dist.destroy_process_group()
