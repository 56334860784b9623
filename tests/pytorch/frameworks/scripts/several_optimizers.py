"""Several optimizers, or one of several kinds, on two ranks; ``several_optimizers.py nanochat|torchtitan|redundant``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

HOW = sys.argv[1]
STEPS = 3
WIDE = 256


class DistMuonAdamW(Optimizer):
    """Lays out its state over the ranks as nanochat's does, and reduces gradients inside its step; its rules are simpler."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            (self._step_matrices if group["kind"] == "muon" else self._step_others)(group["params"])

    def _step_matrices(self, parameters: Sequence[Tensor]) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        chunk = -(-len(parameters) // world)
        stacked = torch.zeros(chunk * world, *parameters[0].shape)
        stacked[: len(parameters)] = torch.stack([p.grad for p in parameters])
        mine = torch.empty(chunk, *parameters[0].shape)
        dist.reduce_scatter_tensor(mine, stacked, op=dist.ReduceOp.SUM)
        state = self.state[parameters[0]]
        momenta = state.setdefault("momentum_buffer", torch.zeros_like(mine))
        state.setdefault("second_momentum_buffer", torch.zeros(*mine.shape[:-1], 1))
        momenta.lerp_(mine / world, 0.1)
        updated = torch.zeros_like(mine)
        for place, p in enumerate(parameters[rank * chunk : (rank + 1) * chunk]):
            updated[place] = p - 0.1 * momenta[place]
        dist.all_gather_into_tensor(stacked, updated)
        for p, whole in zip(parameters, stacked, strict=False):
            p.copy_(whole)

    def _step_others(self, parameters: Sequence[Tensor]) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        for p in parameters:
            gradient, part = p.grad, p
            if p.numel() < 1024:
                dist.all_reduce(gradient)
            else:
                rows = p.shape[0] // world
                part = p[rank * rows : (rank + 1) * rows]
                whole, gradient = gradient, torch.empty_like(part)
                dist.reduce_scatter_tensor(gradient, whole)
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(part))
            state["exp_avg"].lerp_(gradient / world, 0.1)
            state["exp_avg_sq"].lerp_((gradient / world).square(), 0.1)
            part.sub_(0.1 * state["exp_avg"])
            if part is not p:
                dist.all_gather_into_tensor(p, part.clone())


class Container(Optimizer):
    """Holds its optimizers as torchtitan's container does."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for one in self.optimizers:
            one.step()


def network() -> nn.Sequential:
    matrices = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, WIDE, bias=False), nn.LayerNorm(WIDE), nn.Linear(WIDE, 8, bias=False), *matrices)


def nanochat(model: nn.Sequential) -> Optimizer:
    matrices = [one.weight for one in model[3:]]
    others = [p for one in model[:3] for p in one.parameters()]
    return DistMuonAdamW([{"params": others, "kind": "adamw"}, {"params": matrices, "kind": "muon"}])


def torchtitan(model: nn.Sequential) -> Optimizer:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return Container([SGD(matrices, lr=0.01, momentum=0.9), AdamW(rest, lr=0.01)])


def redundant(model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)


def state_of(model: nn.Module, optimizer: Any) -> dict[str, dict[str, float]]:
    """By kind and parameter, the norm of the moment that this rank holds."""
    names = {id(p): name for name, p in model.named_parameters()}
    told: dict[str, dict[str, float]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for one in getattr(optimizer, "optimizers", [getattr(optimizer, "optim", optimizer)]):
        for group in one.param_groups:
            for place, p in enumerate(group["params"]):
                for kind, x in moments_of(one, group, place).items():
                    local = getattr(x, "_local_tensor", x)
                    told[kind][names[id(p)]] = float(local.double().norm())
    return told


def moments_of(optimizer: Optimizer, group: Any, place: int) -> dict[str, Tensor]:
    parameters = group["params"]
    if group.get("kind") == "muon":
        stack = optimizer.state[parameters[0]].get("momentum_buffer")
        index = place - dist.get_rank() * -(-len(parameters) // dist.get_world_size())
        return {} if stack is None or not 0 <= index < len(stack) else {"exp_avg": stack[index]}
    state = optimizer.state.get(parameters[place], {})
    named = {"exp_avg": state.get("exp_avg", state.get("momentum_buffer")), "exp_avg_sq": state.get("exp_avg_sq")}
    return {kind: x for kind, x in named.items() if x is not None}


def train(attach: Attach) -> Any:
    torch.manual_seed(0)
    model: Any = network()
    if HOW == "redundant":
        model = DistributedDataParallel(model)
    optimizer = {"nanochat": nanochat, "torchtitan": torchtitan, "redundant": redundant}[HOW](model)
    attach(model, optimizer, 1, dp_group=None if HOW == "torchtitan" else dist.group.WORLD)
    torch.manual_seed(1 + dist.get_rank())
    told: dict[str, list[Any]] = {"losses": [], "moments": [], "before": [], "after": []}
    for _ in range(STEPS):
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()
        told["losses"].append(loss.item().hex())
        told["moments"].append(state_of(model, optimizer))
        told["before"].append(weights(model))
        optimizer.step()
        optimizer.zero_grad()
        told["after"].append(weights(model))
    return told


def weights(model: nn.Module) -> dict[str, float]:
    return {name: float(getattr(p, "_local_tensor", p).detach().double().norm()) for name, p in model.named_parameters()}


run(train)
