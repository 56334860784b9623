"""What a monitor gives of a loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loop_rows import EVERYTHING, Place, recorded
from loop_training import Observer, Training

from monitor.config import MonitorConfig
from monitor.pytorch import TrainerMon


class Monitored(Observer):
    """A monitor of every kind.

    Attributes:
        rows: ``{place: {op: value}}``.
        manifest: As it was when the monitor was closed.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self.rows: dict[Place, dict[str, Any]] = {}
        self.manifest: dict[str, Any] = {}

    def attach(self, training: Training) -> None:
        config = MonitorConfig(**EVERYTHING, monitor_mbs_grad=training.loop.each_micro_batch)
        self._monitor = TrainerMon.of_config(config, self._base, params_have_main_grad=False)
        self._monitor.set_monitor(training.network, training.loop.micro_batches, training.handed)

    def close(self) -> None:
        self._monitor.close()
        (directory,) = self._base.glob("*-rank0-*")
        self.manifest = json.loads((directory / "manifest.json").read_text())
        self.rows = recorded(directory)
