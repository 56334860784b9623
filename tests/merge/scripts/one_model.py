"""One model, trained in one piece or over several ranks; ``one_model.py HOW``.

All ways see the same data: of a batch each data-parallel rank has its part, and the loss is a mean.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monitor.pytorch import TrainerMon

HOW = sys.argv[1]
STEPS, ROWS, WORDS = 3, 4, 6
MOMENTS = ("exp_avg", "exp_avg_sq")


class Model(nn.Module):
    """Its parts differ in size, and of three rows over four ranks one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


TENSOR_PARALLEL = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def seeded() -> Model:
    torch.manual_seed(0)
    return Model()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Its eps is large: where a gradient cancels to nothing, rounding would otherwise decide the sign of a whole update."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def batches(part: int = 0, parts: int = 1) -> Iterator[Tensor]:
    """Of each step the rows of one of ``parts`` data-parallel ranks."""
    tokens = torch.randint(10, (STEPS, ROWS, WORDS), generator=torch.Generator().manual_seed(7))
    yield from tokens.chunk(parts, dim=1)[part]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def monitored(model: Any, optimizer: Any, micro_steps: int = 1, **groups: Any) -> TrainerMon:
    monitor = TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False)
    monitor.set_monitor(model, micro_steps, optimizer, **groups)
    return monitor


def whole() -> None:
    """Unmonitored, in one process. Writes the norms of each tensor: by step, kind and name."""
    model = seeded()
    optimizer, told = optimizer_of(model), []
    for batch in batches():
        loss_of(model, batch).backward()
        norms = {"param_origin": of_each(model, lambda p: p), "grad_reduced": of_each(model, lambda p: p.grad)}
        if optimizer.state:
            norms |= {kind: of_each(model, lambda p, kind=kind: optimizer.state[p].get(kind)) for kind in MOMENTS}
        optimizer.step()
        optimizer.zero_grad()
        told.append({**norms, "param_updated": of_each(model, lambda p: p)})
    Path(os.environ["RESULTS"]).write_text(json.dumps(told))


def of_each(model: nn.Module, tensor_of: Any) -> dict[str, float]:
    found = {name: tensor_of(p) for name, p in model.named_parameters()}
    return {name: float(x.detach().double().norm()) for name, x in found.items() if x is not None}


def train(model: Any, optimizer: Any, part: int, parts: int, **groups: Any) -> None:
    monitor = monitored(model, optimizer, **groups)
    for batch in batches(part, parts):
        loss_of(model, batch).backward()
        if "dp_group" in groups:
            average(model, groups["dp_group"])
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


def average(model: nn.Module, group: dist.ProcessGroup) -> None:
    """What a data-parallel wrapper does."""
    for p in model.parameters():
        local = p.grad.to_local()
        dist.all_reduce(local, group=group)
        local /= group.size()


def fully_sharded() -> None:
    size = dist.get_world_size()
    shape, names = ((2, size // 2), ("replicate", "shard")) if HOW == "hsdp" else ((size,), ("dp",))
    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), seeded()
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh)
    train(model, optimizer_of(model), dist.get_rank(), size)


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp, model = mesh["dp"], mesh["tp"], seeded()
    parallelize_module(model, tp, TENSOR_PARALLEL)
    replicated(model.norm, tp)
    if HOW == "dp-tp":
        groups = {"dp_group": dp.get_group()}
    else:
        fully_shard(model, mesh=dp)
        groups = {}
    train(model, optimizer_of(model), dp.get_local_rank(), dp.size(), tp_group=tp.get_group(), **groups)


def replicated(module: nn.Module, mesh: DeviceMesh) -> None:
    """Its parameters become DTensors that every rank has whole; what goes in and out stays as it is."""

    def goes_in(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    def comes_out(_: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
        return output.to_local()

    distribute_module(module, mesh, None, goes_in, comes_out)


def zero3() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
    import deepspeed
    import deepspeed_uncompiled  # noqa: F401

    model = seeded()
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 100},
        "gradient_clipping": 1e9,  # it would clip to 1
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=settings, dist_init_required=False)
    monitor = monitored(engine.module, engine.optimizer, dp_group=dist.group.WORLD)
    for batch in batches(dist.get_rank(), dist.get_world_size()):
        engine.backward(loss_of(engine, batch))
        engine.step()
    monitor.close()
    engine.destroy()


def copies() -> None:
    """Every rank has the whole model and the same data, as ranks that share a tensor-parallel group have of what is not cut.

    Two micro-steps a step; ``astray``: in the second one of step 1 rank 1 sees other data.
    """
    model = seeded()
    optimizer = optimizer_of(model)
    monitor = monitored(model, optimizer, 2, tp_group=dist.group.WORLD)
    for step, batch in enumerate(batches()):
        for micro_step, half in enumerate(batch.chunk(2)):
            astray = HOW == "copies-astray" and (dist.get_rank(), step, micro_step) == (1, 1, 1)
            loss_of(model, (half + 1) % 10 if astray else half).backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


WAYS = {
    "fsdp2": fully_sharded,
    "hsdp": fully_sharded,
    "dp-tp": tensor_parallel,
    "dp-tp-sharded": tensor_parallel,
    "zero3": zero3,
    "copies": copies,
    "copies-astray": copies,
}

torch.set_num_threads(1)
if HOW == "whole":
    whole()
else:
    dist.init_process_group("gloo")
    WAYS[HOW]()
    dist.barrier()
    dist.destroy_process_group()
