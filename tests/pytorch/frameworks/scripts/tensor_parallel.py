"""Tensor parallelism with DTensors, alone or in a mesh with data parallelism; ``tensor_parallel.py HOW``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, norm_of, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

HOW = sys.argv[1]
MICRO_STEPS = 2 if HOW in ("accumulated", "fully-sharded-sequence") else 1
IN_SEQUENCE = HOW.endswith("sequence")
TOKENS = torch.arange(24).reshape(4, 6) % 10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCE_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def replicated(module: nn.Module, mesh: DeviceMesh) -> None:
    """Its parameters become DTensors that every rank has whole; what goes in and out stays as it is."""

    def goes_in(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    def comes_out(_: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, None, goes_in, comes_out)


def meshes() -> tuple[DeviceMesh | None, DeviceMesh]:
    """Of data and of tensor parallelism."""
    if dist.get_world_size() == 2:
        return None, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


def built(dp: DeviceMesh | None, tp: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    parallelize_module(model, tp, SEQUENCE_PLAN if IN_SEQUENCE else PLAN)
    if not IN_SEQUENCE and HOW != "plain-norm":
        replicated(model.norm, tp)
    if HOW.startswith("fully-sharded"):
        fully_shard(model, mesh=dp)
    return model


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def average(model: nn.Module, dp: DeviceMesh) -> None:
    """What a data-parallel wrapper does."""
    for p in model.parameters():
        local = p.grad.to_local()
        dist.all_reduce(local, group=dp.get_group())
        local /= dp.size()


def reported(model: nn.Module) -> float:
    if HOW == "plain-norm":  # torch's function does not take DTensors and other tensors together
        return norm_of(full(p.grad) for p in model.parameters())
    return float(full(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))


def train(attach: Attach) -> Any:
    dp, tp = meshes()
    model = built(dp, tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dp_group = dp.get_group() if dp is not None and HOW == "by-hand" else None
    attach(model, optimizer, MICRO_STEPS, dp_group=dp_group, tp_group=None if HOW == "no-group" else tp.get_group())
    kinds = ("losses", "gradients", "without_terms", "sums", "before", "after", "moments")
    told: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for step in range(3):
        told["before"].append(norm_of(map(full, model.parameters())))
        states = optimizer.state.values()
        told["moments"].append([norm_of(full(s[name]) for s in states) for name in ("exp_avg", "exp_avg_sq") if states])
        for micro_step in range(MICRO_STEPS):
            if HOW.startswith("fully-sharded"):
                model.set_requires_gradient_sync(micro_step == MICRO_STEPS - 1)
            loss = model((TOKENS + step + micro_step + (dp.get_local_rank() if dp else 0)) % 10).square().sum()
            loss.backward()
        if HOW == "by-hand":
            average(model, dp)
        told["losses"].append(loss.item().hex())
        told["gradients"].append(reported(model))
        whole = {name: full(p.grad) for name, p in model.named_parameters()}
        told["without_terms"].append(norm_of(x for name, x in whole.items() if "norm" not in name))
        told["sums"].append({name: x.sum().item() for name, x in whole.items()})
        optimizer.step()
        optimizer.zero_grad()
        told["after"].append(norm_of(map(full, model.parameters())))
    return told


def wrapped(attach: Attach) -> Any:
    """DistributedDataParallel of a mesh, which has local tensors in the place of DTensors for its reduction."""
    torch.manual_seed(0)
    whole = Model()
    dp, tp = meshes()
    model = DistributedDataParallel(built(dp, tp), device_mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer, dp_group=dp.get_group(), tp_group=tp.get_group())
    loss = model((TOKENS + dp.get_local_rank()) % 10).square().sum()
    loss.backward()
    optimizer.step()
    before = norm_of(whole.parameters())
    (sum(whole((TOKENS + place) % 10).square().sum() for place in range(2)) / 2).backward()
    return {"loss": loss.item().hex(), "gradients": norm_of(p.grad for p in whole.parameters()), "before": before}


run(wrapped if HOW == "wrapped" else train)
