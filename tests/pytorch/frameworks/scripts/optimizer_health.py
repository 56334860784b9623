"""The health of an optimizer under FSDP2 and DistributedDataParallel, and what it must be of whole tensors;
``optimizer_health.py HOW``.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

BETA, EPS = 0.95, 1e-2
LOW = "bf16" in sys.argv[1]


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def train(attach: Attach) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(torch.bfloat16 if LOW else torch.float32)
    if "ddp" in sys.argv[1]:
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 if LOW else 1e-3, betas=(0.9, BETA), eps=EPS)
    attach(model, optimizer, dp_group=dist.group.WORLD if "ddp" in sys.argv[1] else None)
    torch.manual_seed(1 + dist.get_rank())
    moments: dict[str, Tensor] = {}
    told: dict[str, list[float]] = {}
    for step in range(3):
        x = torch.randn(4, 5).to(torch.bfloat16 if LOW else torch.float32)
        (model(x).float() * 10**step).square().sum().backward()
        before = {name: whole(p) for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            g, after = whole(p.grad), whole(p)
            v = moments[name] = BETA * moments.get(name, torch.zeros(())) + (1 - BETA) * g.double() ** 2
            v = whole(optimizer.state[p]["exp_avg_sq"]).double() if LOW else v
            root = (v / (1 - BETA ** (step + 1))).sqrt()
            updated = g != 0
            swallowed = (updated & (before[name].view(torch.uint8) == after.view(torch.uint8)).view(*g.shape, -1).all(-1)).sum()
            told[f"{name.removeprefix('module.')} {step}"] = [
                float(swallowed / updated.sum()),
                math.sqrt((g.double() / root.clamp(min=EPS)).square().mean()),
                float((root < EPS).double().mean()),
            ]
        optimizer.zero_grad()
    return told


run(train)
