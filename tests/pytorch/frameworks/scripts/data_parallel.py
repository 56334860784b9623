"""DistributedDataParallel; ``data_parallel.py HOW``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, norm_of, run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

HOW = sys.argv[1]
MICRO_STEPS = 2 if HOW == "no-sync" else 1


def train(attach: Attach) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), gradient_as_bucket_view=HOW == "views"
    )
    if HOW == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dp_group = None if HOW == "no-group" else dist.group.WORLD
    attach(model, optimizer, MICRO_STEPS, dp_group=dp_group)
    torch.manual_seed(1 + dist.get_rank())
    told: dict[str, list[Any]] = {"losses": [], "gradients": [], "before": [], "after": [], "moments": [], "local": []}
    for _ in range(3):
        told["before"].append(norm_of(model.parameters()))
        told["moments"].append(
            [norm_of(s[name] for s in optimizer.state.values()) for name in ("exp_avg", "exp_avg_sq")]
            if optimizer.state
            else None
        )
        for micro_step in range(MICRO_STEPS):
            with nullcontext() if micro_step == MICRO_STEPS - 1 else model.no_sync():
                loss = model(torch.randn(4, 8)).square().sum()
                loss.backward()
        told["losses"].append(loss.item().hex())
        told["gradients"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        told["after"].append(norm_of(model.parameters()))
    return told


run(train)
