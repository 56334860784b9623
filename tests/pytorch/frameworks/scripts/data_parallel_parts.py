"""A generator and a critic, each in DistributedDataParallel, as parts of a module that is not called itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, norm_of, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def train(attach: Attach) -> Any:
    torch.manual_seed(0)
    both = nn.ModuleDict({"made": nn.Linear(4, 8), "judged": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))})
    both = nn.ModuleDict({name: DistributedDataParallel(part) for name, part in both.items()})
    make, judge = both["made"], both["judged"]
    making, judging = (torch.optim.Adam(part.parameters(), lr=0.01) for part in (make, judge))
    attach(both, [judging, making], 1, dp_group=dist.group.WORLD)
    torch.manual_seed(1 + dist.get_rank())
    told: dict[str, list[Any]] = {"losses": [], "made": [], "judged": []}
    for _ in range(STEPS):
        loss = judge(make(torch.randn(6, 4)).detach()).mean() - judge(torch.randn(6, 8)).mean()
        loss.backward()
        told["judged"].append(norm_of(p.grad for p in judge.parameters()))
        judging.step()
        both.zero_grad()
        (-judge(make(torch.randn(6, 4))).mean()).backward()
        told["made"].append(norm_of(p.grad for p in make.parameters()))
        making.step()
        both.zero_grad()
        told["losses"].append(loss.item().hex())
    return told


run(train)
