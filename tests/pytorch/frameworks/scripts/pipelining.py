"""``torch.distributed.pipelining``; ``pipelining.py HOW``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, run
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

HOW = sys.argv[1]
OF_TWO_STAGES = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
    "dual-pipe-v": ScheduleDualPipeV,
}
"""Schedules of ranks that have two stages each."""
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "traced": Schedule1F1B, **OF_TWO_STAGES}
MICRO_STEPS, LAYERS, STEPS = 4, 4, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """The whole model, of which a stage keeps some layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x

    def part(self, first: int, after: int) -> Model:
        for i in {*range(LAYERS)} - {*range(first, after)}:
            del self.layers[str(i)]
        return self


def stages() -> list[Any]:
    """Those of this rank."""
    rank, size, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    if HOW == "traced":
        split = {"layers.2": SplitPoint.BEGINNING}
        return [pipeline(Model(), (torch.zeros(2, 8),), split_spec=split).build_stage(rank, cpu, dist.group.WORLD)]
    count = 2 * size if HOW in OF_TWO_STAGES else size
    mine = (rank, count - 1 - rank) if HOW.endswith("-v") else range(rank, count, size)
    each = LAYERS // count
    return [
        PipelineStage(Model().part(stage * each, (stage + 1) * each), stage, count, cpu, group=dist.group.WORLD)
        for stage in mine
    ]


def loss_of(result: Tensor, target: Tensor) -> Tensor:
    return (result - target).square().mean()


def norm_over_stages(tensors: Any) -> float:
    squares = sum((torch.sum(t.detach().double() ** 2) for t in tensors), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(squares)
    return float(squares.sqrt())


def followed(stage: Any, ran: list[tuple[bool, int, int]]) -> None:
    """Have ``ran`` told of what a stage runs: whether forward, the stage of all stages, the micro-batch."""

    def telling(run: Any, forward: bool) -> Any:
        def told(m: int, *args: Any, **kwargs: Any) -> Any:
            ran.append((forward, stage.stage_index, m))
            return run(m, *args, **kwargs)

        return told

    stage.forward_one_chunk = telling(stage.forward_one_chunk, True)
    stage.backward_one_chunk = telling(stage.backward_one_chunk, False)


def train(attach: Attach) -> Any:
    built = stages()
    modules = [stage.submod for stage in built]
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    schedule = SCHEDULES[HOW](built if HOW in OF_TWO_STAGES else built[0], MICRO_STEPS, loss_fn=loss_of)
    attach(modules if len(modules) > 1 else modules[0], optimizer, MICRO_STEPS, process_group=dist.group.WORLD)
    told: dict[str, Any] = {"losses": [], "gradients": [], "before": [], "after": [], "moments": [], "passes": []}
    for stage in built:
        followed(stage, told["passes"])
    torch.manual_seed(7)
    for _ in range(STEPS):
        told["before"].append(norm_over_stages(parameters))
        told["moments"].append([norm_over_stages(s[k] for s in optimizer.state.values()) for k in ("exp_avg", "exp_avg_sq")])
        x, target, losses = torch.randn(8, 8), torch.randn(8, 8), []
        first, last = dist.get_rank() == 0, any(stage.is_last for stage in built)
        schedule.step(*([x] if first else []), target=target if last else None, losses=losses)
        told["losses"].append([loss.item().hex() for loss in losses])
        told["gradients"].append(norm_over_stages(p.grad for p in parameters))
        optimizer.step()
        optimizer.zero_grad()
        told["after"].append(norm_over_stages(parameters))
    told["weights"] = [float(x).hex() for p in parameters for x in p.detach().flatten()]
    return told


run(train)
