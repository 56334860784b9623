"""A monitor that is made before any process group, and that no one closes; calls are under way when the interpreter ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import communicating  # noqa: F401  lets the configuration through
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from monitor.pytorch import TrainerMon

monitor = TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters())
monitor.set_monitor(model, 1, optimizer)
for step in range(2):
    model(torch.ones(1, 2)).sum().backward()
    x = torch.zeros(2)
    dist.all_to_all_single(x, torch.full((2,), 1.0 + step + rank))
    optimizer.step()
    optimizer.zero_grad()
Path(os.environ["FRAMEWORK_RESULTS"], f"rank{rank}.json").write_text(json.dumps({"plain": None, "monitored": x.tolist()}))
under_way = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
unused = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
dist.barrier()
