"""A model of which tensor parallelism has made some parameters DTensors and left others alone; ``beside_dtensors.py HOW``.

No rank passes ``tp_group``. Rank 0 writes what the framework and gathered tensors say of each step to ``RESULTS``.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from monitor.pytorch import TrainerMon

HOW = sys.argv[1]
STEPS = 3
TOKENS = torch.arange(24).reshape(4, 6) % 10
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
IN_SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Model(nn.Module):
    """What the plan leaves out: the embedding, the norm, the head; ``extra`` is no part of any plan."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)
        self.extra = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        part = slice(None)
        if HOW.startswith("sequence"):  # each rank has a part of the sequence in between
            length = x.shape[1] // dist.get_world_size()
            part = slice(dist.get_rank() * length, (dist.get_rank() + 1) * length)
        x = x[:, part]
        x = x + local(self.down(torch.tanh(self.up(self.norm(x)))))
        return self.head(x + self.extra(x))


def local(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def meshes() -> tuple[DeviceMesh | None, DeviceMesh]:
    """Of data and of tensor parallelism."""
    if dist.get_world_size() == 2:
        return None, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


def built(dp: DeviceMesh | None, tp: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """The model, and what is trained."""
    torch.manual_seed(0)
    model = Model()
    if HOW == "experts":
        torch.manual_seed(dist.get_rank() + 1)
        model.extra = nn.Linear(8, 8)
    plan = dict(IN_SEQUENCE if HOW.startswith("sequence") else PLAN)
    if HOW == "sequence-plain":
        plan.pop("norm")
    parallelize_module(model, tp, plan)
    if HOW == "fsdp2":
        return model, fully_shard(model, mesh=dp)
    if HOW == "fsdp2-ignored":
        return model, fully_shard(model, mesh=dp, ignored_params={*model.extra.parameters()})
    if HOW == "fsdp1":
        on_cpu = {"device_id": torch.device("cpu"), "use_orig_params": True}
        return model, FullyShardedDataParallel(model, device_mesh=dp, **on_cpu)
    return model, DistributedDataParallel(model, device_mesh=dp) if HOW == "ddp" else model


def gathered(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double()


def truth(model: nn.Module) -> dict[str, Any]:
    """Norms of the whole tensors: of weights and gradients, each once; and what the framework makes of the gradients."""
    told: dict[str, Any] = {}
    for kind, of in (("param_origin", lambda p: p), ("grad_reduced", lambda p: p.grad)):
        told[kind] = {name: float(gathered(of(p)).norm()) for name, p in model.named_parameters()}
    by_mesh: dict[Any, list[Tensor]] = {}  # torch takes tensors of one mesh at once
    for p in model.parameters():
        by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p.grad)
    told["total"] = math.hypot(*(float(gathered(nn.utils.get_total_norm(each))) for each in by_mesh.values()))
    return told


def train() -> list[dict[str, Any]]:
    dp, tp = meshes()
    model, trained = built(dp, tp)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, eps=1e-3)
    monitor = TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False)
    monitor.set_monitor(trained, 1, optimizer, dp_group=dp.get_group() if HOW == "by-hand" else None)
    told = []
    for step in range(STEPS):
        shift = step + (dp.get_local_rank() if dp is not None else 0)
        trained((TOKENS + shift) % 10).square().mean().backward()
        if HOW.startswith("by-hand"):
            average(model, dp)
        told.append({} if HOW in ("ddp", "fsdp1") else truth(model))  # these have local tensors in the place of DTensors
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    return told


def average(model: nn.Module, dp: DeviceMesh) -> None:
    """What a data-parallel wrapper does."""
    for p in model.parameters():
        local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        dist.all_reduce(local, group=dp.get_group())
        local /= dp.size()


torch.set_num_threads(1)
dist.init_process_group("gloo")
found = train()
if dist.get_rank() == 0:
    Path(os.environ["RESULTS"]).write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
