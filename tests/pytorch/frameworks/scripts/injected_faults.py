"""Trains a pipeline again and again, each time with a fault planted in one place; ``injected_faults.py HOW FIRST LAST``.

``HOW`` is ``1f1b`` or ``interleaved`` (one pipeline of two ranks), or ``dp2pp2`` (two of them). A case is a number; it decides
on the place and on the fault. What was planted is written for the test to compare with what the ranking finds.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from monitor.pytorch import TrainerMon

HOW, FIRST, LAST = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
RESULTS = Path(os.environ["FRAMEWORK_RESULTS"])
CHUNKS = 2 if HOW == "interleaved" else 1
STAGES = 2 * CHUNKS
MICRO_STEPS, LAYERS, STEPS, WIDTH = 4, 4, 5, 8

torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()
        for p in self.parameters():  # a weight that starts at zero would double with every step
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(self.norm(x)))


class Model(nn.Module):
    """The layers of one stage, under the names that they have in the whole model."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        each = LAYERS // STAGES
        layers = {str(i): Layer() for i in range(LAYERS)}
        self.layers = nn.ModuleDict({str(i): layers[str(i)] for i in range(stage * each, (stage + 1) * each)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@dataclass(frozen=True)
class Fault:
    """What is planted where.

    Attributes:
        rank: Of all ranks.
        forward: Whether in the output of the module, or in the gradient of that.
        what: ``nan``, ``inf``, ``spike`` or ``zeroed``.
    """

    rank: int
    chunk: int
    step: int
    micro_step: int
    module: str
    forward: bool
    what: str

    @classmethod
    def of(cls, case: int) -> Fault:
        draw = random.Random(case)
        rank, chunk = draw.randrange(dist.get_world_size()), draw.randrange(CHUNKS)
        stage = rank % 2 + 2 * chunk
        names = [name for name, module in Model(stage).named_modules() if name and not isinstance(module, nn.ModuleDict)]
        forward = draw.random() < 0.5
        faults = ("nan", "inf", "spike") if forward else ("nan", "inf", "spike", "zeroed")
        return cls(
            rank, chunk, draw.randrange(2, 4), draw.randrange(MICRO_STEPS), draw.choice(names), forward, draw.choice(faults)
        )

    def put_into(self, tensor: Tensor) -> Tensor:
        if self.what in ("spike", "zeroed"):
            return tensor * (1e4 if self.what == "spike" else 0.0)
        faulty = tensor.clone()
        faulty.view(-1)[3] = float(self.what)
        return faulty


class Planted:
    """A hook on a module that spoils one micro-batch of one step."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._calls = 0
        self.step = -1

    def begin(self, step: int) -> None:
        self.step, self._calls = step, 0

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        here = (self.step, self._calls) == (self._fault.step, self._fault.micro_step)
        self._calls += 1
        if here and self._fault.forward:
            return self._fault.put_into(output)
        if here:
            output.register_hook(self._fault.put_into)
        return output


def pipelines() -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """This rank's pipeline, and those that have the same stage of another one."""
    if HOW != "dp2pp2":
        return dist.group.WORLD, None
    own, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    same, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return own, same


def built(group: dist.ProcessGroup) -> list[PipelineStage]:
    rank = dist.get_rank(group)
    stages = range(rank, STAGES, 2)
    return [PipelineStage(Model(stage), stage, STAGES, torch.device("cpu"), group=group) for stage in stages]


def loss_of(result: Tensor, target: Tensor) -> Tensor:
    return (result - target).square().mean()


def train(fault: Fault, group: dist.ProcessGroup, same: dist.ProcessGroup | None) -> None:
    stages = built(group)
    modules = [stage.submod for stage in stages]
    planted = Planted(fault)
    if fault.rank == dist.get_rank():
        modules[fault.chunk].get_submodule(fault.module).register_forward_hook(planted)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-5)
    schedule: Any = (
        ScheduleInterleaved1F1B(stages, MICRO_STEPS, loss_fn=loss_of)
        if CHUNKS > 1
        else Schedule1F1B(stages[0], MICRO_STEPS, loss_fn=loss_of)
    )
    with TrainerMon(os.environ["MONITOR_CONFIG"], group, params_have_main_grad=False) as monitor:
        monitor.set_monitor(modules if CHUNKS > 1 else modules[0], MICRO_STEPS, optimizer, dp_group=same)
        for step in range(STEPS):
            planted.begin(step)
            step_of(schedule, group)
            if same is not None:
                for p in parameters:
                    dist.all_reduce(p.grad, group=same)
            optimizer.step()
            optimizer.zero_grad()


def step_of(schedule: Any, group: dist.ProcessGroup) -> None:
    """The same text every step, so that nothing but the fault turns anything."""
    torch.manual_seed(dist.get_rank() // 2)
    x, target = torch.randn(2 * MICRO_STEPS, WIDTH), torch.randn(2 * MICRO_STEPS, WIDTH)
    first = dist.get_rank(group) == 0
    schedule.step(*([x] if first else []), target=None if first else target, losses=[])


def tried(case: int, group: dist.ProcessGroup, same: dist.ProcessGroup | None) -> dict[str, Any]:
    base = RESULTS / f"case-{case}"
    os.environ["MONITOR_OUTPUT_DIR"] = str(base)
    fault = Fault.of(case)
    train(fault, group, same)
    return {"base": str(base), **asdict(fault)}


dist.init_process_group("gloo")
told = [tried(case, *pair) for pair in [pipelines()] for case in range(FIRST, LAST)]
(RESULTS / f"rank{dist.get_rank()}.json").write_text(json.dumps({"plain": [], "monitored": told}))
dist.barrier()
dist.destroy_process_group()
