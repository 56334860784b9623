"""Trains from a checkpoint on, and leaves one after every step; ``resumable.py CHECKPOINTS START STEPS``.

With ``RANK`` set it is a rank of a data-parallel job. It tells, as ``killed.py`` does, up to which step the recording must be
there. ``waits`` as a fourth argument lets it wait at its end; ``forks`` gives it a child that outlives it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from small_run import monitored
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)


def main(checkpoints: Path, start: int, steps: int, how: str) -> None:
    together = "RANK" in os.environ
    if together:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if together else 0
    torch.manual_seed(rank)
    inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    model = DistributedDataParallel(inner) if together else inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if start:
        state = torch.load(checkpoints / f"{start}-rank{rank}")
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
    monitor = monitored(model, optimizer, start_iteration=start)
    if how == "forks":
        if (child := os.fork()) == 0:
            time.sleep(600)
        (checkpoints / "child").write_text(str(child))
    for step in range(start, steps):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(state, checkpoints / "draft" / f"{step + 1}-rank{rank}")
        os.replace(checkpoints / "draft" / f"{step + 1}-rank{rank}", checkpoints / f"{step + 1}-rank{rank}")
        if step % 3 == 2 and monitor is not None:
            monitor.generate_wgrad_metrics()
            print(f"delivered {step + 1}", flush=True)
    if how == "waits":
        print("waits", flush=True)
        time.sleep(600)


main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), "".join(sys.argv[4:]))
