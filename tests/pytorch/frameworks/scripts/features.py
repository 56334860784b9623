"""Features of weights on two ranks; ``features.py HOW...``: one way to train after the other, in a directory each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if "zero3" in sys.argv:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}

import torch
import torch.distributed as dist
from framework_run import Attached
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

PLAN = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
OUTPUT = Path(os.environ["MONITOR_OUTPUT_DIR"])


class Router(nn.Module):
    """Returns no logits, and has its weight gathered for forward where weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(torch.softmax(nn.functional.linear(x, self.weight), -1), 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down, self.router = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), Router()

    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.down(torch.tanh(self.norm(self.up(x)))))[0]


def built(how: str) -> tuple[Any, Any]:
    """The model as it trains, and its optimizer."""
    torch.manual_seed(0)
    model: Any = Model()
    if how == "ddp":
        model = DistributedDataParallel(model)
    elif how == "fsdp1":
        model.down = FullyShardedDataParallel(model.down, use_orig_params=True, device_id=torch.device("cpu"))
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif how == "fsdp2":
        for part in (model.down, model.router):
            fully_shard(part)
        fully_shard(model, mp_policy=MixedPrecisionPolicy())
    elif how == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (2,)), PLAN)
    elif how == "zero3":
        return engine(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def engine(model: nn.Module) -> tuple[Any, Any]:
    import deepspeed  # which takes seconds
    import deepspeed_uncompiled  # noqa: F401

    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    made, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    return made, made


def steps(model: Any, optimizer: Any, number: int) -> None:
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(number):
        loss = model(torch.randn(3, 8)).square().sum()
        if hasattr(model, "backward"):
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def collectives(model: Any, optimizer: Any) -> int:
    """How many calls of communication operators a step makes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        steps(model, optimizer, 1)
    return sum(event.count for event in profiled.key_averages() if "c10d::" in event.key)


def told(how: str) -> dict[str, Any]:
    os.environ["MONITOR_OUTPUT_DIR"] = str(OUTPUT / how)
    model, optimizer = built(how)
    steps(model, optimizer, 1)
    alone = collectives(model, optimizer)
    model, optimizer = built(how)
    with Attached() as attach:
        attach(model, optimizer)
        steps(model, optimizer, 1)
        return {"alone": alone, "watched": collectives(model, optimizer)}


torch.set_num_threads(1)
dist.init_process_group("gloo")
answers = {how: told(how) for how in sys.argv[1:]}
torch.manual_seed(0)
whole = {name: p.detach().double() for name, p in Model().named_parameters() if p.dim() == 2}
spectra = {name: torch.linalg.svdvals(x).tolist() for name, x in whole.items()}
cuts = {"up": whole["up.weight"].chunk(2, 0), "down": whole["down.weight"].chunk(2, 1)}
halves = {name: [torch.linalg.svdvals(half).tolist() for half in cut] for name, cut in cuts.items()}
result = {"plain": {"whole": spectra, "halves": halves}, "monitored": answers}
(Path(os.environ["FRAMEWORK_RESULTS"]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
dist.barrier()
dist.destroy_process_group()
