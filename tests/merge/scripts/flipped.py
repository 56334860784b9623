"""Trains a small model again and again, and flips a bit of one rank's memory in each run; ``flipped.py LAYOUT``.

``TRIALS`` has the runs as JSON: the directory of each, its dtype, and what is flipped when. With the fault ``design`` each rank
rounds its weights in its own way, in every step. Without a fault a run loads a checkpoint, averages weights and makes a new
optimizer in the middle. A run ends when ranks have seen that copies differ, or that they do not.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monitor.anomalies import copy_exchange, odd_copies
from monitor.pytorch import TrainerMon

LAYOUT = sys.argv[1]
STEPS = 5
copy_exchange.SHORTEST_PAUSE_S = 0.02
copy_exchange.MOST_WAITING = odd_copies.PATIENCE = 500  # as long as with turns of a second
LONGEST_S = 60.0


class Model(nn.Module):
    """No gradient of it is 0, so a flipped bit of a moment is not rounded away."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


Prepared = tuple[Any, Callable[[Any], torch.optim.Optimizer], dict[str, Any]]
"""The model to call, a function that makes an optimizer of its parameters, and more arguments of ``set_monitor``."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def replicated(model: Model) -> Prepared:
    return nn.parallel.DistributedDataParallel(model), adamw, {}


def zero1(model: Model) -> Prepared:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)

    return nn.parallel.DistributedDataParallel(model), optimizer, {}


def hybrid(model: Model) -> Prepared:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh), adamw, {}


def sharded(model: Model) -> Prepared:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))), adamw, {}


def tensor_parallel(model: Model) -> Prepared:
    """Every rank sees the same data, so reduced gradients are equal without a reduction."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    distribute_module(
        model.norm,
        mesh,
        None,
        lambda _, inputs, mesh: tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs),
        lambda _, output, _mesh: output.to_local(),
    )
    return model, adamw, {"tp_group": mesh.get_group()}


LAYOUTS = {"ddp": replicated, "zero1": zero1, "hsdp": hybrid, "fsdp2": sharded, "tp": tensor_parallel}


def flip(x: Any, place: int, bit: int) -> None:
    local = (x.to_local() if isinstance(x, DTensor) else x).detach()
    words = local.view(-1).view({2: torch.int16, 4: torch.int32}[local.itemsize])
    bits = 8 * local.itemsize
    words[place % len(words)] ^= (1 << bit) - ((1 << bits) if bit == bits - 1 else 0)


def run(trial: dict[str, Any]) -> None:
    os.environ["MONITOR_OUTPUT_DIR"] = trial["directory"]
    torch.manual_seed(0)
    model = Model().to(getattr(torch, trial["dtype"]))
    called, new_optimizer, groups = LAYOUTS[LAYOUT](model)
    optimizer, fault = new_optimizer(model.parameters()), trial["fault"]
    monitor = TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False)
    monitor.set_monitor(called, 1, optimizer, **groups)
    torch.manual_seed(1 if LAYOUT == "tp" else 1 + dist.get_rank())
    saved: Any = None
    for step in range(STEPS):
        called(torch.randn(6, 8, dtype=next(model.parameters()).dtype)).square().mean().backward()
        now = fault is not None and (fault["rank"], fault["step"]) == (dist.get_rank(), step)
        parameter = dict(model.named_parameters())[fault["name"]] if now else None
        if now and fault["of"] in ("weight", "gradient"):
            flip(parameter if fault["of"] == "weight" else parameter.grad, fault["place"], fault["bit"])
        optimizer.step()
        if now and fault["of"] in ("moment", "weight between steps"):
            flip(
                optimizer.state[parameter][fault["kind"]] if fault["of"] == "moment" else parameter,
                fault["place"],
                fault["bit"],
            )
        optimizer.zero_grad()
        if fault is not None and fault["of"] == "design":
            for weight in model.parameters():
                weight.detach().mul_(1 + 0.02 * torch.rand(weight.shape))
        if fault is None:
            saved = between(step, model, saved)
            if step == 3:
                optimizer = new_optimizer(model.parameters())
                monitor.set_monitor(called, 1, optimizer, start_iteration=step + 1, **groups)
    wait_for_verdict(monitor)
    monitor.close()


def wait_for_verdict(monitor: TrainerMon) -> None:
    """Until a rank has noted a difference, or all have compared the last step."""
    begun = time.monotonic()
    while time.monotonic() - begun < LONGEST_S:
        run = monitor._recordings[0].run
        exchange = run._bit_checks._exchange
        agreed = [one.agreed_until for one in exchange._comparisons.values()] if exchange else []
        led = [ranks for ranks in exchange._history.groups.values() if ranks[0] == dist.get_rank()] if exchange else []
        found = [one.check for one in run.manifest._wrong_bits]
        noted = "copies" in found or any(about.startswith("copies") for about in run.manifest.notes)
        waits = len(agreed) < len(led) or any(step != STEPS - 1 for step in agreed)
        state = torch.tensor([int(noted), int(waits)])
        dist.all_reduce(state)
        if state[0] or not state[1]:
            return
        time.sleep(0.02)


def between(step: int, model: Model, saved: Any) -> Any:
    """What healthy loops do between two steps."""
    if step == 0:
        return copy.deepcopy(model.state_dict())
    if step == 1:
        model.load_state_dict(saved)
    if step == 2 and LAYOUT in ("ddp", "zero1"):
        for parameter in model.parameters():
            dist.all_reduce(parameter.detach())
            parameter.detach().div_(dist.get_world_size()).add_(0.001)
    return saved


torch.set_num_threads(1)
dist.init_process_group("gloo")
for each in json.loads(os.environ["TRIALS"]):
    run(each)
dist.destroy_process_group()
