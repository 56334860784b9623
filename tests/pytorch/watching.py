"""What tests of the PyTorch room share: a monitor with a configuration given as keywords, and its rows read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from monitor.pytorch import TrainerMon
from monitor.sinks.csv import read_csv

EVERYTHING: dict[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "ops": ["min", "max", "mean", "norm", "zeros", "nans", "infs", "std"],
    "ndigits": 17,
}


class Row(NamedTuple):
    """One row of a CSV file. ``values`` holds its ops; a missing one is None."""

    kind: str
    name: str
    step: int
    micro_step: int | None
    values: dict[str, Any]


class Output:
    """The base directory of a test's recordings."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def directories(self) -> list[Path]:
        """The rank directories, in order of rank."""
        found = [path for path in self.base.iterdir() if "-rank" in path.name]
        return sorted(found, key=lambda path: (int(path.name.split("-rank")[1].split("-")[0]), path.name))

    def directory(self) -> Path:
        """The only rank directory."""
        (only,) = self.directories()
        return only

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.directory() / "manifest.json").read_text())

    def rows(self, kind: str, directory: Path | None = None) -> list[Row]:
        """All rows of a kind, file by file in order of steps, in the order in which they stand."""
        directory = directory or self.directory()
        files = [path for path in directory.glob(f"{kind}_*.csv") if path.stem[len(kind) + 1 :].replace("-", "").isdigit()]
        found: list[Row] = []
        for path in sorted(files, key=lambda path: int(path.stem[len(kind) + 1 :].split("-")[0])):
            for record in read_csv(path).to_pylist():
                place = [record.pop(key, None) for key in ("name", "step", "micro_step")]
                record.pop("vpp_stage")
                found.append(Row(kind, *place, record))
        return found

    def table(self, kind: str, op: str) -> dict[tuple[str, int, int | None], Any]:
        """``{(name, step, micro_step): value}``; a row that stands twice fails."""
        rows = self.rows(kind)
        found = {(row.name, row.step, row.micro_step): row.values[op] for row in rows}
        assert len(found) == len(rows)
        return found


def attached(
    output: Output,
    model: nn.Module | list[nn.Module],
    optimizer: Any,
    grad_acc_steps: int = 1,
    params_have_main_grad: bool = False,
    **config: Any,
) -> TrainerMon:
    """A monitor on ``model`` with this configuration. Close it, or use it as a context manager."""
    path = output.base.parent / f"config-{len(list(output.base.parent.glob('config-*')))}.json"
    path.write_text(json.dumps(config))
    monitor = TrainerMon(path, params_have_main_grad=params_have_main_grad)
    monitor.set_monitor(model, grad_acc_steps=grad_acc_steps, optimizer=optimizer)
    return monitor


def train(model: nn.Module, optimizer: Any, steps: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Plain steps on the sum of squares of what the model returns; the losses."""
    losses = []
    for _ in range(steps):
        loss = model(*inputs).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
