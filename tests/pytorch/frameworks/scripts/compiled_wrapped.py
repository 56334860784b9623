"""A model that is spread over ranks in some way, compiled or not; ``compiled_wrapped.py HOW BACKEND``; ``none`` is eager."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

HOW, BACKEND = sys.argv[1:]
WIDTH = 512 if HOW == "in-pieces" else 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def spread(model: Model) -> nn.Module:
    if HOW == "replicated":
        return DistributedDataParallel(model, bucket_cap_mb=0.03)
    if HOW == "in-pieces":  # of which DDP's optimizer compiles each by itself
        return DistributedDataParallel(model, bucket_cap_mb=2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        if HOW == "sharded":
            fully_shard(layer, mesh=mesh)
        else:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh) if HOW == "sharded" else model


def train(attach: Attach) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = spread(Model())
    called = model if BACKEND == "none" else torch.compile(model, backend=BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    losses = []
    for step in range(2):
        torch.manual_seed(step if HOW == "tensor-parallel" else 10 * dist.get_rank() + step)
        loss = called(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return {"losses": losses, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


if HOW == "replicated":
    torch._dynamo.config.optimize_ddp = False
run(train)
