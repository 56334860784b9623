"""Two ranks train. One then waits in a collective for the other, which never comes; ``blocked.py HOW``."""

from __future__ import annotations

import signal
import sys
import time

import torch
import torch.distributed as dist
from small_run import monitored
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if sys.argv[1] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
monitor = monitored(model, optimizer)
for _ in range(7):
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
if dist.get_rank() == 1:
    time.sleep(600)
print("blocking", flush=True)
dist.all_reduce(torch.ones(1))
