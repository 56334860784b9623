"""A framework's traffic, counted by torch's profiler beside the monitor; ``traffic.py HOW``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from communicating import Attach, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

HOW = sys.argv[1]
if HOW.startswith("zero"):
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
STEPS = 3
Step = Callable[[], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def plain_step(model: Any, optimizer: Any) -> Step:
    def step() -> None:
        model(torch.ones(2, 4)).square().sum().backward()
        if HOW == "ddp-views":  # which changes what was communicated, at the first moment that the user can
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_sgd(attach: Attach, model: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    return plain_step(model, optimizer)


def ddp(attach: Attach) -> Step:
    return with_sgd(attach, nn.parallel.DistributedDataParallel(network(), gradient_as_bucket_view=HOW == "ddp-views"))


def fsdp1(attach: Attach) -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return with_sgd(attach, FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu")))


def fsdp2(attach: Attach) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model[0])
    fully_shard(model)
    return with_sgd(attach, model)


def tensor_parallel(attach: Attach) -> Step:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = parallelize_module(network(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return with_sgd(attach, model)


def pipelining(attach: Attach) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    part = network()[:1] if rank == 0 else network()[1:]
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), 2, loss_fn=lambda y, t: (y - t).square().sum())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    attach(part, optimizer, 2)

    def step() -> None:
        schedule.step(torch.ones(4, 4)) if rank == 0 else schedule.step(target=torch.zeros(4, 4))
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero(attach: Attach) -> Step:
    import deepspeed
    import deepspeed_uncompiled  # noqa: F401

    model = network()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(HOW[-1])},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    attach(engine, engine.optimizer)

    def step() -> None:
        engine.backward(engine(torch.ones(2, 4)).square().sum())
        engine.step()

    return step


BUILD = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "tp": tensor_parallel, "pp": pipelining, "zero": zero}


def train(attach: Attach) -> dict[str, Any]:
    """For each step the number of calls by operator of ``c10d``, as the profiler saw them."""
    step = BUILD[HOW.split("-")[0]](attach)
    counts: list[dict[str, int]] = []
    for _ in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
        of_c10d = [event for event in seen.key_averages() if event.key.startswith("c10d::")]
        counts.append({event.key: event.count for event in of_c10d})
    return {"counts": counts}


run(train)
