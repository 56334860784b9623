"""FSDP2 and HSDP; ``fsdp2.py HOW``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, norm_of, run
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

HOW = sys.argv[1]
MICRO_STEPS = 2 if HOW in ("accumulated", "accumulated-bf16", "every", "short", "hsdp-late") else 1
LOW = HOW in ("bf16", "accumulated-bf16")


class Block(nn.Module):
    """Three rows over two ranks are two and one; of a single element one rank has none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), nn.Linear(3, 5)
        self.extra = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.extra


def sharded() -> Any:
    torch.manual_seed(0)
    model = Model()
    hybrid = HOW.startswith("hsdp")
    shape, names = ((2, 2), ("replicate", "shard")) if hybrid else ((dist.get_world_size(),), ("dp",))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        # Left out, torch makes one that has no names.
        "mesh": None if HOW == "kept" else init_device_mesh("cpu", shape, mesh_dim_names=names),
        "mp_policy": low if LOW else MixedPrecisionPolicy(),
    }
    if HOW == "replicate":
        replicate(model.first, **options)
        return replicate(model, **options)
    options["reshard_after_forward"] = HOW != "kept"
    fully_shard(model.first, **options)
    return fully_shard(model, **options, ignored_params={model.extra} if HOW == "ignored" else None)


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def backward(model: Any, micro_step: int) -> torch.Tensor:
    last = micro_step == MICRO_STEPS - 1
    if HOW.startswith(("accumulated", "short")):
        model.set_requires_gradient_sync(last)
    if HOW == "hsdp-late":
        model.set_requires_all_reduce(last)
    loss = model(torch.randn(4, 4)).float().square().sum()
    loss.backward()
    return loss


def reported(model: Any) -> float:
    if HOW == "ignored":  # what FSDP leaves alone the loop averages itself; torch's function does not take both kinds together
        dist.all_reduce(model.extra.grad)
        model.extra.grad /= dist.get_world_size()
        return norm_of(full(p.grad) for p in model.parameters())
    return float(full(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))


def train(attach: Attach) -> Any:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dp_group = dist.group.WORLD if HOW == "ignored" else None
    attach(model, optimizer, 4 if HOW == "short" else MICRO_STEPS, dp_group=dp_group)
    outputs: list[float] = []
    model.first.register_forward_hook(lambda _module, _inputs, output: outputs.append(norm_of([output])))
    torch.manual_seed(1 + dist.get_rank())
    told: dict[str, list[Any]] = {"losses": [], "gradients": [], "before": [], "after": [], "moments": [], "outputs": outputs}
    for _ in range(3):
        told["before"].append(norm_of(map(full, model.parameters())))
        states = optimizer.state.values()
        told["moments"].append([norm_of(full(s[name]) for s in states) for name in ("exp_avg", "exp_avg_sq") if states])
        for micro_step in range(MICRO_STEPS):
            loss = backward(model, micro_step)
        told["losses"].append(loss.item().hex())
        told["gradients"].append(reported(model))
        optimizer.step()
        optimizer.zero_grad()
        told["after"].append(norm_of(map(full, model.parameters())))
    return told


run(train)
