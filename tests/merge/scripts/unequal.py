"""Two ranks of which one watches more than the other, or in another order; ``unequal.py HOW``."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from monitor.pytorch import TrainerMon

HOW = sys.argv[1]
STEPS = 3


class Network(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Teacher(Network):
    pass


class Deeper(nn.Module):
    """Its parameters have other names, and its class the name of another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)


def new_monitor() -> TrainerMon:
    return TrainerMon(os.environ["MONITOR_CONFIG"], process_group=GROUP, params_have_main_grad=False)


class Watched:
    """A model with its optimizer, monitored."""

    def __init__(self, model: nn.Module, monitor: TrainerMon | None = None, **groups: Any) -> None:
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
        self.monitor = new_monitor() if monitor is None else monitor
        self.monitor.set_monitor(model, 1, self.optimizer, **groups)

    def train(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(wrapped: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(Network()) if wrapped else Network()


def alone(model: nn.Module, **how: Any) -> Watched | None:
    """What rank 0 watches, and rank 1 does not."""
    return Watched(model, **how) if dist.get_rank() == 0 else None


def copy_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(getattr(model, "module", model))


def copy_first() -> list[Watched | None]:
    model = main()
    return [alone(copy_of(model)), Watched(model, dp_group=dist.group.WORLD)]


def copy_after() -> list[Watched | None]:
    model = main()
    return [Watched(model, dp_group=dist.group.WORLD), alone(copy_of(model))]


def one_monitor() -> list[Watched | None]:
    monitor, model = new_monitor(), main()
    return [alone(copy_of(model), monitor=monitor), Watched(model, monitor)]


def teacher() -> list[Watched | None]:
    """Neither is wrapped."""
    return [alone(Teacher()), Watched(main(wrapped=False))]


def alike() -> list[Watched | None]:
    """Nothing tells the copy from the model."""
    model = main(wrapped=False)
    return [alone(copy_of(model)), Watched(model)]


def same_class() -> list[Watched | None]:
    """Nothing but the names of parameters does."""
    Deeper.__name__ = "Network"
    return [alone(Deeper()), Watched(main(wrapped=False))]


def adversaries() -> list[Watched | None]:
    """Each rank has both, in an order of its own. Names alone tell them apart."""
    torch.manual_seed(0)
    Deeper.__name__ = "Network"
    made = [Network(), Deeper()]
    return [Watched(one) for one in (made if dist.get_rank() == 0 else made[::-1])]


def stages() -> list[Watched | None]:
    """Each rank has a stage, whose parameters have other names, and rank 0 an average of its own."""
    stage: nn.Module = Network() if dist.get_rank() == 0 else Deeper()
    average = torch.optim.swa_utils.AveragedModel(Network())
    return [alone(average), Watched(stage)]


WAYS = {
    "copy-first": copy_first,
    "copy-after": copy_after,
    "one-monitor": one_monitor,
    "teacher": teacher,
    "alike": alike,
    "same-class": same_class,
    "adversaries": adversaries,
    "stages": stages,
}

torch.set_num_threads(1)
dist.init_process_group("gloo")
GROUP = dist.group.WORLD if HOW == "stages" else None
watched = [one for one in WAYS[HOW]() if one is not None]
for _ in range(STEPS):
    for one in watched:
        one.train()
for one in watched:
    one.monitor.close()
dist.barrier()
dist.destroy_process_group()
