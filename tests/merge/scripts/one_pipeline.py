"""One model of layers, trained in one piece or as the stages of a pipeline; ``one_pipeline.py HOW``.

``counting-from-0``: each stage has a list of its own layers; ``interleaved``: so have both stages of each rank;
``names-of-the-model``: a stage keeps the names that its layers have in the whole.
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from monitor.pytorch import TrainerMon

HOW = sys.argv[1]
STEPS, MICRO_STEPS, LAYERS, WIDTH = 3, 4, 6, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """The whole, of which a stage keeps some layers; the first one also ``enter``, the last one also ``leave``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, WIDTH)
        self.layers: Any = nn.ModuleDict({str(number): Layer() for number in range(LAYERS)})
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) if hasattr(self, "enter") else x
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x)
        return self.leave(x) if hasattr(self, "leave") else x

    def stage(self, stage: int, stages: int) -> Model:
        first, after = (LAYERS * place // stages for place in (stage, stage + 1))
        own = {number: self.layers[number] for number in map(str, range(first, after))}
        self.layers = nn.ModuleDict(own) if HOW == "names-of-the-model" else nn.ModuleList(own.values())
        if stage > 0:
            del self.enter
        if stage < stages - 1:
            del self.leave
        return self


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Its eps is large: where a gradient cancels to nothing, rounding would otherwise decide the sign of a whole update."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def whole() -> None:
    """Unmonitored. Writes the norms of each tensor: by step, kind and name."""
    model, told = Model(), []
    optimizer = optimizer_of(list(model.parameters()))
    for x, target in batches():
        loss_of(model(x), target).backward()
        told.append({"param_origin": norms(model), "grad_reduced": norms(model, grad=True)})
        optimizer.step()
        optimizer.zero_grad()
    Path(os.environ["RESULTS"]).write_text(json.dumps(told))


def norms(model: nn.Module, *, grad: bool = False) -> dict[str, float]:
    return {name: float((p.grad if grad else p.detach()).double().norm()) for name, p in model.named_parameters()}


def pipeline() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 2 * size if HOW == "interleaved" else size
    stages = [
        PipelineStage(Model().stage(stage, count), stage, count, torch.device("cpu"), group=dist.group.WORLD)
        for stage in range(rank, count, size)
    ]
    modules = [one.submod for one in stages]
    optimizer = optimizer_of([p for module in modules for p in module.parameters()])
    schedule = (
        ScheduleInterleaved1F1B(stages, MICRO_STEPS, loss_fn=loss_of)
        if len(stages) > 1
        else Schedule1F1B(stages[0], MICRO_STEPS, loss_fn=loss_of)
    )
    monitor = TrainerMon(os.environ["MONITOR_CONFIG"], dist.group.WORLD, params_have_main_grad=False)
    monitor.set_monitor(modules if len(modules) > 1 else modules[0], MICRO_STEPS, optimizer)
    for x, target in batches():
        schedule.step(*([x] if rank == 0 else []), target=target if rank == size - 1 else None)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


torch.set_num_threads(1)
if HOW == "whole":
    whole()
else:
    dist.init_process_group("gloo")
    pipeline()
    dist.barrier()
    dist.destroy_process_group()
