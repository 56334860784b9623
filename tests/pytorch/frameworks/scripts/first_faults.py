"""Trains a small GPT again and again, each time with one thing going wrong as it does in real runs; ``first_faults.py HOW``.

``HOW`` is ``alone``, ``ddp``, ``fsdp2`` or ``tp``. Every case has a directory of its own, named by the case. What goes wrong
goes wrong in step 3; in one of several micro-batches it is the second.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(sys.argv[0]).resolve().parents[4] / "tools" / "demo"))

from gpt import GPT, Block, GPTConfig
from monitor.pytorch import TrainerMon

HOW = sys.argv[1]
RESULTS = Path(os.environ["FRAMEWORK_RESULTS"])
RANK = int(os.environ.get("RANK", "0"))
STEP, MICRO_STEP = 3, 1
SIZES = GPTConfig(vocabulary=32, context=8, layers=2, heads=2, width=16)
NAN = math.nan

torch.set_num_threads(1)


@dataclass
class Now:
    """Where training is."""

    step: int = 0
    micro_step: int = 0

    @property
    def is_bad(self) -> bool:
        return (self.step, self.micro_step, RANK) == (STEP, MICRO_STEP, BAD_RANK)

    @property
    def is_between(self) -> bool:
        """Whether this rank's step 3 is the next to begin, or the one that ends."""
        return self.step == STEP and RANK == BAD_RANK


BAD_RANK = 0 if HOW == "alone" else 1
NOW = Now()
Model = Any
Plant = Callable[[Model], object]
Do = Callable[[Model, torch.optim.Optimizer], object]


def nothing(*_: object) -> None:
    pass


def model_of_the_demo() -> nn.Module:
    return GPT(SIZES)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        plant: Is given the model before it trains.
        before_step: Is called between a step's last backward and its optimizer's step; ``between`` before the first forward.
        build: Makes the model.
        config: What is monitored, beyond the configuration of all.
        loss: What becomes of it.
    """

    plant: Plant = nothing
    before_step: Do = nothing
    between: Do = nothing
    build: Callable[[], nn.Module] = model_of_the_demo
    config: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Tensor], Tensor] = lambda loss: loss
    steps: int = 5


def spoiled(tensor: Tensor, value: float = NAN) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


def output_of(name: str) -> Plant:
    """What a module gives has a NaN in it."""
    return lambda model: part(model, name).register_forward_hook(
        lambda _module, _inputs, output: spoiled(output) if NOW.is_bad else None
    )


def gradient_of_output_of(name: str) -> Plant:
    """So has the gradient of what it gives."""

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if NOW.is_bad and output.requires_grad:
            output.register_hook(spoiled)

    return lambda model: part(model, name).register_forward_hook(hook)


def gradient_of(name: str) -> Plant:
    """And that of a parameter."""
    return lambda model: weight(model, name).register_hook(lambda grad: spoiled(grad) if NOW.is_bad else None)


def part(model: Model, name: str) -> nn.Module:
    return getattr(model, "module", model).get_submodule(name)


def weight(model: Model, name: str) -> nn.Parameter:
    return part(model, name).weight


def put_into(tensor: Tensor, value: float) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.view(-1)[5] = value


def weight_becomes(name: str, value: float) -> Do:
    return lambda model, _optimizer: put_into(weight(model, name).data, value) if NOW.is_between else None


def moment_becomes(name: str, moment: str, value: float) -> Do:
    return lambda model, opt: put_into(opt.state[weight(model, name)][moment], value) if NOW.is_between else None


def aggregate_becomes(name: str, value: float) -> Do:
    return lambda model, _optimizer: put_into(weight(model, name).grad, value) if NOW.is_between else None


def clip(model: Model, _optimizer: object = None) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class BadResidual(Block):
    """A sum that no module makes goes wrong."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        x = spoiled(x) if NOW.is_bad else x
        return x + self.mlp(self.mlp_norm(x))


def with_a_bad_residual() -> nn.Module:
    model = GPT(SIZES)
    model.h[1].__class__ = BadResidual
    return model


def with_relu_in_place() -> nn.Module:
    model = GPT(SIZES)
    for block in model.h:
        block.mlp[1] = nn.ReLU(inplace=True)
    return model


def tied() -> nn.Module:
    model = GPT(SIZES)
    model.head.weight = model.tokens.weight
    return model


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self._reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self._reentrant)


def checkpointed(*, reentrant: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = GPT(SIZES)
        model.h = nn.ModuleList(Checkpointed(block, reentrant=reentrant) for block in model.h)
        return model

    return build


class Twice(nn.Module):
    """A module that is called twice, the second time badly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.linear.register_forward_hook(self._second)
        self._calls = 0

    def _second(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
        self._calls += 1
        return spoiled(output) if NOW.is_bad and self._calls % 2 == 0 else None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.linear(torch.tanh(self.linear(self.embed(tokens))))))


class Wide(nn.Module):
    """What tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.act = nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU()
        self.down, self.head = nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(self.act(self.up(x))))


def in_ddp() -> nn.Module:
    return DistributedDataParallel(GPT(SIZES))


def in_fsdp() -> nn.Module:
    model, mesh = GPT(SIZES), init_device_mesh("cpu", (2,))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_hsdp() -> nn.Module:
    """Two replicas of one shard each."""
    model = GPT(SIZES)
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def cut() -> nn.Module:
    return parallelize_module(Wide(), init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})


GRADIENTS = {"xy_distribution": False, "param_distribution": False, "mv_distribution": False}
ATTENTION, LINEAR = output_of("h.1.attn"), "h.1.mlp.0"

ALONE = {
    "attention": Case(ATTENTION),
    "residual": Case(build=with_a_bad_residual),
    "parameter": Case(gradient_of(LINEAR)),
    "parameter, clipped": Case(gradient_of(LINEAR), clip),
    "aggregate, clipped": Case(before_step=lambda *both: (aggregate_becomes(LINEAR, NAN)(*both), clip(*both))),
    "loss": Case(loss=lambda loss: loss * NAN if NOW.is_bad else loss),
    "in place": Case(output_of("h.1.mlp.1"), build=with_relu_in_place),
    "before in place": Case(output_of(LINEAR), build=with_relu_in_place),
    "twice": Case(build=Twice),
    "checkpoint": Case(output_of("h.1.block.attn.proj"), build=checkpointed(reentrant=False)),
    "reentrant": Case(output_of("h.1.block.attn.proj"), build=checkpointed(reentrant=True)),
    "checkpoint, back": Case(gradient_of_output_of("h.1.block.mlp.0"), build=checkpointed(reentrant=False)),
    "reentrant, back": Case(gradient_of_output_of("h.1.block.mlp.0"), build=checkpointed(reentrant=True)),
    "tied": Case(between=weight_becomes("tokens", NAN), build=tied),
    "container, back": Case(gradient_of_output_of("h.1.attn")),
    "weight": Case(between=weight_becomes(LINEAR, NAN)),
    "weight 1e6": Case(between=weight_becomes(LINEAR, 1e6)),
    "weight, unseen": Case(between=weight_becomes(LINEAR, NAN), config={"param_distribution": False}),
    "weight, alone": Case(
        between=weight_becomes(LINEAR, NAN), config={**GRADIENTS, "wg_distribution": False, "param_distribution": True}
    ),
    "moment": Case(between=moment_becomes(LINEAR, "exp_avg_sq", NAN)),
    "moment 1e6": Case(between=moment_becomes(LINEAR, "exp_avg", 1e6)),
    "moment, unseen": Case(between=moment_becomes(LINEAR, "exp_avg", NAN), config={"mv_distribution": False}),
    "gradients": Case(ATTENTION, config=GRADIENTS),
    "forward": Case(ATTENTION, config={**GRADIENTS, "xy_distribution": True, "wg_distribution": False, "forward_only": True}),
    "backward": Case(ATTENTION, config={**GRADIENTS, "xy_distribution": True, "wg_distribution": False, "backward_only": True}),
    "two targets": Case(output_of("h.0.attn"), config={"targets": {"h.0.mlp": {}, "h.1.mlp": {}}, "all_xy": False}),
    "combined": Case(ATTENTION, config={"micro_steps": "combined"}),
    "each": Case(gradient_of(LINEAR), config={"monitor_mbs_grad": True}),
    "late": Case(ATTENTION, config={"start_step": 4}),
    "interval": Case(ATTENTION, config={"step_interval": 3}),
    "long": Case(ATTENTION, steps=30),
}
INF = math.inf
ON_A_REPLICA = {
    **{f"weight {value:g}": Case(between=weight_becomes(LINEAR, value), build=in_ddp) for value in (NAN, INF, 1e6)},
    **{
        f"{moment} {value:g}": Case(between=moment_becomes(LINEAR, moment, value), build=in_ddp)
        for moment in ("exp_avg", "exp_avg_sq")
        for value in (NAN, INF, 1e6)
    },
    **{f"aggregate {value:g}": Case(before_step=aggregate_becomes(LINEAR, value), build=in_ddp) for value in (NAN, INF, 1e6)},
}
"""Faults of a rank that leaves its parameters to the other one: nothing of them is written there."""

DDP = {
    **ON_A_REPLICA,
    "attention": Case(ATTENTION, build=in_ddp),
    "clipped": Case(ATTENTION, clip, build=in_ddp),
    "gradients": Case(ATTENTION, build=in_ddp, config=GRADIENTS),
    "other rank": Case(ATTENTION, build=in_ddp, config={"module_ranks": [0]}),
    "weight, unseen": Case(between=weight_becomes(LINEAR, NAN), build=in_ddp, config={"replica_check": False}),
}
FSDP2 = {
    "attention": Case(ATTENTION, build=in_fsdp),
    "weight": Case(between=weight_becomes(LINEAR, NAN), build=in_fsdp),
    "weight 1e6": Case(between=weight_becomes(LINEAR, 1e6), build=in_fsdp),
    "replica": Case(between=weight_becomes(LINEAR, NAN), build=in_hsdp),
    "moment of a replica": Case(between=moment_becomes(LINEAR, "exp_avg_sq", INF), build=in_hsdp),
}
TP = {
    "before all-reduce": Case(output_of("act"), build=cut),
    "before all-reduce, back": Case(gradient_of_output_of("act"), build=cut),
    "weight": Case(between=weight_becomes("down", NAN), build=cut),
    "replica": Case(between=weight_becomes("head", NAN), build=cut),
    "moment of a replica": Case(between=moment_becomes("head", "exp_avg", 1e6), build=cut),
}
CASES: dict[str, Mapping[str, Case]] = {"alone": ALONE, "ddp": DDP, "fsdp2": FSDP2, "tp": TP}


def run(name: str, case: Case) -> str:
    """Where it recorded to."""
    base = RESULTS / name
    base.mkdir(exist_ok=True)
    os.environ["MONITOR_OUTPUT_DIR"] = str(base)
    config = base / f"config{RANK}.json"
    config.write_text(json.dumps({**json.loads(Path(os.environ["MONITOR_CONFIG"]).read_text()), **case.config}))
    with TrainerMon(str(config), params_have_main_grad=False) as monitor:
        train(case, monitor)
    return str(base)


def train(case: Case, monitor: TrainerMon) -> None:
    torch.manual_seed(0)
    model = case.build()
    case.plant(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    groups = {} if HOW == "alone" else {"tp_group" if HOW == "tp" else "dp_group": dist.group.WORLD}
    monitor.set_monitor(model, 2, optimizer, **groups)
    for NOW.step in range(case.steps):
        case.between(model, optimizer)
        torch.manual_seed(0 if HOW == "tp" else RANK)
        for NOW.micro_step in range(2):
            micro_step(model, case)
        case.before_step(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def micro_step(model: Model, case: Case) -> None:
    if HOW == "ddp":
        model.require_backward_grad_sync = NOW.micro_step == 1
    tokens = torch.randint(0, SIZES.vocabulary, (2, SIZES.context))
    case.loss(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())).backward()


dist.init_process_group("gloo")
told = {name: run(name, case) for name, case in CASES[HOW].items()}
(RESULTS / f"rank{RANK}.json").write_text(json.dumps({"plain": [], "monitored": told}))
dist.barrier()
dist.destroy_process_group()
