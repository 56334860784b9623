"""A model that trains, and its configuration file, which is looked at when the test says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from monitor_threads import no_thread_left
from torch import nn
from watching import Output

from monitor.pytorch import TrainerMon
from monitor.recording.recording import Recording

GRADIENTS: dict[str, Any] = {"dynamic_on": True, "wg_distribution": True, "ops": ["norm"]}
"""The cheapest that has rows in every step."""


class Training:
    """A process that trains one small model under dynamic monitoring.

    Attributes:
        path: Of the configuration file.
        step: The next one.
    """

    def __init__(self, output: Output, text: str = "{}", **config: Any) -> None:
        self.output = output
        self.path = output.base.parent / "config.json"
        self.path.write_text(json.dumps(config) if config else text)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.monitor = TrainerMon(self.path, params_have_main_grad=False)
        self.attach()
        self.step = 0

    def attach(self, **options: Any) -> None:
        self.monitor.set_monitor(self.model, 1, self.optimizer, **options)

    @property
    def recording(self) -> Recording:
        return self.monitor._recordings[0]

    def look(self, times: int = 1) -> None:
        """Look at the file, as the thread does once a second."""
        switching = self.recording.switching
        assert switching is not None
        assert switching._control is not None
        assert switching._control._watching is not None
        for _ in range(times):
            switching._control._watching.turn()

    def edit(self, **config: Any) -> None:
        self.path.write_text(json.dumps(config))
        self.look()

    def train(self, steps: int, x: float = 1.0) -> None:
        for _ in range(steps):
            self.model(torch.full((2, 3), x)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def steps(self, kind: str = "grad_reduced") -> list[int]:
        """Those that there are rows of, once the monitor is closed."""
        return sorted({row.step for row in self.output.rows(kind)})

    def log(self) -> list[tuple[str, int, bool]]:
        """Origin, step and on or off of what the manifest says was in force."""
        return [(one["origin"], one["since"], one["on"]) for one in self.output.manifest()["configurations"]]


@contextmanager
def training(output: Output, text: str = "{}", **config: Any) -> Iterator[Training]:
    """Closes the monitor in the end, and sees to it that no thread is left."""
    with no_thread_left():
        one = Training(output, text, **config)
        try:
            yield one
        finally:
            one.monitor.close()
