"""One rank of a job that trains twice in a process: as it is, and monitored."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from monitor.pytorch import TrainerMon

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).resolve().parents[4] / "tools" / "demo"))


class Attach(Protocol):
    def __call__(self, model: Any, optimizer: Any, grad_acc_steps: int = 1, **options: Any) -> None:
        """Attach a monitor, if this time there is one.

        Args:
            options: ``dp_group``, ``tp_group``, ``process_group``, ``params_have_main_grad``, ``start_iteration``.
        """


def run(train: Callable[[Attach], Any]) -> None:
    """Train unmonitored, then monitored, and write what ``train`` returned (as JSON holds it) for the test to compare.

    ``train`` seeds, builds model and optimizer, attaches, trains, and returns losses and norms, floats as ``float.hex``
    where they are to be compared bit for bit.
    """
    dist.init_process_group("gloo")
    told = {"plain": train(_no_one)}
    with Attached() as attach:
        told["monitored"] = train(attach)
    (Path(os.environ["FRAMEWORK_RESULTS"]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _no_one(_model: Any, _optimizer: Any, _grad_acc_steps: int = 1, **_options: Any) -> None:
    pass


class Attached:
    """Attaches monitors as ``MONITOR_CONFIG`` says, and closes them."""

    def __init__(self) -> None:
        self._monitors: list[TrainerMon] = []

    def __call__(
        self,
        model: Any,
        optimizer: Any,
        grad_acc_steps: int = 1,
        *,
        process_group: Any = None,
        params_have_main_grad: bool = False,
        **options: Any,
    ) -> None:
        monitor = TrainerMon(os.environ["MONITOR_CONFIG"], process_group, params_have_main_grad)
        monitor.set_monitor(model, grad_acc_steps, optimizer, **options)
        self._monitors.append(monitor)

    @property
    def fields(self) -> dict[str, Any]:
        """Of the configuration, for what takes fields and no file."""
        fields: dict[str, Any] = json.loads(Path(os.environ["MONITOR_CONFIG"]).read_text())
        return fields

    def release(self) -> None:
        """Hold the monitors no longer: they record on, and keep nothing alive."""
        self._monitors.clear()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        for monitor in self._monitors:
            monitor.close()


def norm_of(tensors: Any) -> float:
    """The norm of all elements of some tensors, in float64."""
    squares = [torch.sum(t.detach().double() ** 2) for t in tensors]
    return float(torch.sqrt(torch.stack(squares).sum()))
