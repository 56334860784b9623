"""Plain models on two ranks, no group passed; ``no_groups.py HOW``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from monitor.pytorch import TrainerMon

HOW = sys.argv[1]


def main() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank if HOW == "apart" else 0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    group = dist.group.WORLD if HOW == "stages" else None
    monitor = TrainerMon(os.environ["MONITOR_CONFIG"], process_group=group, params_have_main_grad=False)
    monitor.set_monitor(model, 1, optimizer)
    for _ in range(3):
        model(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
        if HOW == "averaged":
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


torch.set_num_threads(1)
dist.init_process_group("gloo")
main()
dist.barrier()
dist.destroy_process_group()
