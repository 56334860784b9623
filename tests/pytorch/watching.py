"""What tests of the PyTorch room share: a monitor with a configuration given as keywords, and its rows read back."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reading_back import EVERYTHING, Output, Row
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from monitor.pytorch import TrainerMon

__all__ = ["EVERYTHING", "Output", "Row"]


def assert_statistics(values: Mapping[str, Any], x: torch.Tensor, eps: float = 1e-8) -> None:
    """The ops of one row are those of ``x`` in float64: counts exactly, extremes to the 17 decimals of a file, and sums to
    1e-6 of their scale.
    """
    wide = x.detach().to_dense().double().flatten()
    scale = 1e-6 * wide.abs().mean().item()
    for op, expected, relative, absolute in (
        ("min", wide.min().item(), 1e-13, 1e-17),
        ("max", wide.max().item(), 1e-13, 1e-17),
        ("nans", wide.isnan().sum().item(), 0.0, 0.0),
        ("infs", wide.isinf().sum().item(), 0.0, 0.0),
        ("zeros", (wide.abs() < eps).double().mean().item(), 1e-13, 0.0),
        ("norm", wide.norm().item(), 1e-6, 0.0),
        ("mean", wide.mean().item(), 0.0, scale),
        ("std", wide.std(correction=0).item(), 2e-6, scale),
    ):
        if op in values:
            same = math.isnan(expected) and math.isnan(values[op])
            close = math.isclose(expected, values[op], rel_tol=relative, abs_tol=absolute)
            assert same or close, f"{op}: {expected} and not {values[op]}"


def assert_rows(
    output: Output, kind: str, expected: Mapping[tuple[str, int, int | None], torch.Tensor], directory: Path | None = None
) -> None:
    """A kind has exactly these rows, ``{(name, step, micro_step): what was measured}``."""
    rows = output.rows(kind, directory)
    found = {(row.name, row.step, row.micro_step): row.values for row in rows}
    assert sorted(expected, key=str) == sorted(found, key=str)
    assert len(found) == len(rows)
    for place, x in expected.items():
        assert_statistics(found[place], x)


def footprint(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """How many hooks stand in every place where one can be."""
    places: dict[str, Any] = {"before any step": _global_optimizer_pre_hooks, "after any step": _global_optimizer_post_hooks}
    owners = {"optimizer": optimizer, **{f"module {name!r}": module for name, module in model.named_modules()}}
    for owner, one in owners.items():
        places |= {f"{attribute} of {owner}": value for attribute, value in vars(one).items() if "hooks" in attribute}
    for name, p in model.named_parameters():
        places |= {f"hooks of {name}": p._backward_hooks, f"later hooks of {name}": p._post_accumulate_grad_hooks}
    counts = {place: len(hooks) for place, hooks in places.items() if hooks is not None}
    return {
        **{place: number for place, number in counts.items() if number},
        "own step": int("step" in vars(optimizer)),
        "scaler's step": id(GradScaler.step),
    }


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def attached(
    output: Output,
    model: nn.Module | list[nn.Module],
    optimizer: Any,
    grad_acc_steps: int = 1,
    params_have_main_grad: bool = False,
    start_iteration: int = 0,
    **config: Any,
) -> TrainerMon:
    """A monitor on ``model`` with this configuration, without the run's own numbers unless they are asked for. Close it, or use
    it as a context manager.
    """
    config = {"run_numbers": False, **config}
    # A file of each process: ranks of one test share the directory.
    path = output.base.parent / f"config-{os.getpid()}-{len(list(output.base.parent.glob('config-*')))}.json"
    path.write_text(json.dumps(config))
    monitor = TrainerMon(path, params_have_main_grad=params_have_main_grad)
    monitor.set_monitor(model, grad_acc_steps=grad_acc_steps, optimizer=optimizer, start_iteration=start_iteration)
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


def on_two_ranks(check: Callable[[Output], object], tmp_path: Path) -> None:
    """Call ``check`` on each of two gloo ranks, in processes of their own, with an output directory of the rank."""
    torch.multiprocessing.start_processes(_as_rank, args=(str(tmp_path), check), nprocs=2, start_method="fork")


def _as_rank(rank: int, directory: str, check: Callable[[Output], object]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patched:
        base = Path(directory) / f"out{rank}"
        base.mkdir()
        patched.setenv("MONITOR_OUTPUT_DIR", str(base))
        check(Output(base))
    dist.destroy_process_group()
