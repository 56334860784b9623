"""What tests share that train under a monitor: one with a configuration given as keywords, and what it leaves behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from reading_back import EVERYTHING, Output, Row
from training import inputs
from watching_cells import written

from monitor.mindspore import TrainerMon, tensor_reader
from monitor.stats.mindspore import tensors

__all__ = ["EVERYTHING", "Output", "Row"]

Cell = TypeVar("Cell", bound=nn.Cell)


def attached(
    output: Output,
    model: nn.Cell | list[nn.Cell],
    optimizer: Any,
    grad_acc_steps: int = 1,
    start_iteration: int = 0,
    **config: Any,
) -> TrainerMon:
    """A monitor on ``model`` with this configuration. Close it, or use it as a context manager."""
    monitor = TrainerMon(written(output, **config))
    monitor.set_monitor(model, grad_acc_steps, optimizer, start_iteration=start_iteration)
    return monitor


def as_measured(tmp: Path, patched: pytest.MonkeyPatch, *, there: bool) -> Output:
    """A base directory for what is measured on the host, or ``there``: as on a device, on tensors in host memory."""
    base = tmp / f"there-{there}" / "out"
    base.mkdir(parents=True)
    patched.setenv("MONITOR_OUTPUT_DIR", str(base))
    if there:
        for reads in (tensors, tensor_reader):
            patched.setattr(reads, "on_the_host", lambda: False)
    return Output(base)


def with_fixed_weights(net: Cell) -> Cell:
    """The same in every run, and in training mode."""
    for seed, parameter in enumerate(net.trainable_params()):
        drawn = np.random.default_rng(seed).normal(size=parameter.shape)
        parameter.set_data(Tensor(drawn.astype(np.float32)))
    return net.set_train(True)


def step_with(net: nn.Cell, optimizer: nn.Cell, number: int = 0) -> None:
    """A plain step, of a model that returns its loss."""
    _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(number))
    optimizer(gradients)


def steps_of(output: Output, kind: str) -> list[int]:
    """The steps that a kind has rows of."""
    return sorted({row.step for row in output.rows(kind)})


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def footprint(net: nn.Cell, optimizer: nn.Cell) -> dict[str, int]:
    """How many hooks stand on cells and their parameters; places without any are left out."""
    counts: dict[str, int] = {}
    for root in (net, optimizer):
        for name, cell in root.cells_and_names():
            hooks = {key: value for key, value in vars(cell).items() if "hook" in key and isinstance(value, dict)}
            counts |= {f"{key} of {type(root).__name__} {name}": len(value) for key, value in hooks.items()}
        counts |= {f"hooks of {parameter.name}": len(parameter.hooks()) for parameter in root.get_parameters()}
    return {place: number for place, number in counts.items() if number}
