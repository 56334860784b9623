"""Two data-parallel ranks train one small model after the other, each monitored in another way; ``ranks.py RESULT``.

What a rank computed goes to ``RESULT/rank{rank}.json``. No monitor is closed.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from monitor.pytorch import TrainerMon

torch.set_num_threads(1)


class Section:
    """One model of the job, and the base directory of its recording.

    Attributes:
        monitor: None if the job is not monitored.
    """

    def __init__(self, name: str, **config: Any) -> None:
        self.name = name
        self.monitor = self._monitor(config) if "MONITOR_CONFIG" in os.environ else None
        self._losses: list[str] = []
        self._gradients: list[dict[str, float]] = []

    def _monitor(self, config: dict[str, Any]) -> TrainerMon:
        given = Path(os.environ["MONITOR_CONFIG"])
        own = given.with_name(f"{self.name}-of-{os.environ['RANK']}.json")
        own.write_text(json.dumps(json.loads(given.read_text()) | config))
        os.environ["MONITOR_OUTPUT_DIR"] = str(Path(os.environ["MONITOR_OUTPUT_DIR"]).with_name(self.name))
        return TrainerMon(own, params_have_main_grad=False)

    def train(self, dp_group: Any = None, micro_steps: int = 1, sync_each: bool = False, **options: Any) -> dict[str, Any]:
        """Train for three steps on data that differs between the ranks."""
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if self.monitor is not None:
            self.monitor.set_monitor(model, micro_steps, optimizer, dp_group)
        torch.manual_seed(dist.get_rank() + 1)
        for _ in range(3):
            for micro_step in range(micro_steps):
                self._backward(model, sync=sync_each or micro_step == micro_steps - 1)
            self._gradients.append({name: _norm(p.grad) for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": self._losses, "gradients": self._gradients}

    def _backward(self, model: DistributedDataParallel, sync: bool) -> None:
        with nullcontext() if sync else model.no_sync():
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
        self._losses.append(loss.item().hex())


def _norm(gradient: torch.Tensor | None) -> float:
    assert gradient is not None
    return gradient.double().norm().item()


def main(result: str) -> None:
    early = Section("early")
    dist.init_process_group("gloo")
    found = {
        "early": early.train(),
        "second-rank": Section("second-rank", module_ranks=[1]).train(),
        "views": Section("views").train(gradient_as_bucket_view=True),
        "accumulated": Section("accumulated").train(micro_steps=2),
        "accumulated-views": Section("accumulated-views").train(micro_steps=2, gradient_as_bucket_view=True),
        "aggregated-early": Section("aggregated-early").train(micro_steps=2, sync_each=True),
        "grouped": Section("grouped").train(dp_group=dist.group.WORLD),
        "second-rank-grouped": Section("second-rank-grouped", module_ranks=[1]).train(dp_group=dist.group.WORLD),
    }
    Path(result, f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main(sys.argv[1])
