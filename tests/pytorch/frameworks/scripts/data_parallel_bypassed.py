"""Two parts in DistributedDataParallel. The module around them calls the wrapper of one, and the module inside the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, norm_of, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


class Bypassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped = DistributedDataParallel(nn.Linear(4, 8))
        self.bypassed = DistributedDataParallel(nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.bypassed.module(self.wrapped(x).tanh())


def train(attach: Attach) -> Any:
    torch.manual_seed(0)
    model = Bypassing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attach(model, optimizer, 1, dp_group=dist.group.WORLD)
    torch.manual_seed(1 + dist.get_rank())
    told: dict[str, list[Any]] = {"losses": [], "gradients": []}
    for _ in range(STEPS):
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        told["gradients"].append(norm_of(p.grad for p in model.wrapped.parameters()))
        told["losses"].append(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
    return told


run(train)
