"""Peers, fault 3: lists of several sizes, several calls a step, and a model in DistributedDataParallel; ``fault_3.py HOW``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from communicating import Attach, run
from torch import nn

HOW = sys.argv[1]


def train(attach: Attach) -> dict[str, Any]:
    halves = [dist.new_group([0]), dist.new_group([1])]
    model: Any = nn.parallel.DistributedDataParallel(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(model, optimizer, **({"tp_group": halves[dist.get_rank()]} if HOW == "roles" else {}))
    steps = 0
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.tensor([3.0, 4.0]) * dist.get_rank())
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.tensor([0.0, 12.0]))
        dist.all_gather([torch.empty(1)], torch.ones(1), group=halves[dist.get_rank()])
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return {"steps": steps}


run(train)
