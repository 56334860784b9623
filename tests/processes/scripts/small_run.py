"""A small training run on one thread, monitored if ``MONITOR_CONFIG`` names a configuration.

Every step prints ``step {number} {loss}`` when it has ended, the loss in hexadecimal: tests compare it bit for bit.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from monitor.pytorch import TrainerMon

torch.set_num_threads(1)


def monitored(model: nn.Module, optimizer: Any, **arguments: Any) -> TrainerMon | None:
    """A monitor on ``model``, if this run is to be monitored."""
    config = os.environ.get("MONITOR_CONFIG")
    if config is None:
        return None
    monitor = TrainerMon(config, params_have_main_grad=False)
    monitor.set_monitor(model, **{"grad_acc_steps": 1, **arguments}, optimizer=optimizer)
    return monitor


class SmallRun:
    """The run, a step at a time. The dropout makes it depend on the random state, too.

    Attributes:
        ended: How many steps have ended.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ended = 0
        self.monitor = monitored(self.model, self.optimizer)

    def forward(self) -> torch.Tensor:
        return self.model(torch.randn(4, 8)).square().sum()

    def step(self) -> None:
        self.finish(self.forward())

    def finish(self, loss: torch.Tensor) -> None:
        """The rest of a step, from its backward on."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        print(f"step {self.ended} {loss.item().hex()}", flush=True)
        self.ended += 1

    def train_to(self, steps: int) -> None:
        """Train until ``steps`` steps have ended in all."""
        while self.ended < steps:
            self.step()

    def delivered(self) -> None:
        """Return when the writer has handed every step that ended to every sink."""
        if self.monitor is not None:
            self.monitor.generate_wgrad_metrics()
