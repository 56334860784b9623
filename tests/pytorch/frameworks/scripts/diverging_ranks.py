"""DistributedDataParallel whose rank 1 steps with another learning rate from step ``AT`` on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from monitor.pytorch import TrainerMon

STEPS, AT = 36, 20


def batch(step: int, truth: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1000 * dist.get_rank() + step)
    x = torch.randn(32, 12)
    return x, torch.tanh(x @ truth)


def train() -> None:
    torch.manual_seed(0)
    truth = torch.randn(12, 3)
    layers = [nn.Linear(12, 16), *(layer for _ in range(3) for layer in (nn.Tanh(), nn.Linear(16, 16))), nn.Linear(16, 3)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, 1, optimizer, dp_group=dist.group.WORLD)
        for step in range(STEPS):
            if step == AT and dist.get_rank() == 1:
                optimizer.param_groups[0]["lr"] *= 100
            x, y = batch(step, truth)
            loss = (model(x) - y).square().mean()
            loss.backward()
            monitor.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


torch.set_num_threads(1)
dist.init_process_group("gloo")
train()
(Path(os.environ["FRAMEWORK_RESULTS"]) / f"rank{dist.get_rank()}.json").write_text(json.dumps({"plain": [], "monitored": []}))
dist.barrier()
dist.destroy_process_group()
