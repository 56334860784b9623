"""Ends after its first step, on every rank, if ``cc_log_only`` does what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import communicating  # noqa: F401  lets the configuration through
import torch
import torch.distributed as dist
from torch import nn

from monitor.pytorch import TrainerMon

dist.init_process_group("gloo")
rank = dist.get_rank()
monitor = TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
monitor.set_monitor(model, 1, optimizer)
Path(os.environ["FRAMEWORK_RESULTS"], f"rank{rank}.json").write_text(json.dumps({"plain": 0, "monitored": 0}))
for _ in range(3):
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
raise SystemExit("the run went on")
