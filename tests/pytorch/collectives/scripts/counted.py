"""Calls that can be counted by hand, and what the program itself sees of them; ``counted.py``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import communicating  # noqa: F401 - communication can be recorded from here on
import torch
import torch.distributed as dist
from torch import nn

from monitor.pytorch import TrainerMon


def train() -> list[dict[str, Any]]:
    """In step s each rank calls ``all_reduce`` s + 2 times, and the optimizer's gradients are scaled. What the monitor tells of
    each step when it has ended.
    """
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    told: list[dict[str, Any]] = []
    with TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, 1, optimizer)
        for step in range(2):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            for _ in range(step + 2):
                dist.all_reduce(torch.ones(3))
            before = monitor.generate_cc_metrics()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told.append({"before": before, "after": monitor.generate_cc_metrics()})
    return told


torch.set_num_threads(1)
dist.init_process_group("gloo")
told = {"plain": None, "monitored": train()}
(Path(os.environ["FRAMEWORK_RESULTS"]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
