"""What tests of compiled code share: ways of compiling, steps of training, and what a compiler was asked for meanwhile."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import seeded
from torch import Tensor, nn
from watching import EVERYTHING, Output, Row, attached

needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
STEPS = 3
MICRO_STEPS = 2
KINDS = ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")

Make = Callable[[], nn.Module]
Compile = Callable[..., Callable[..., Any]]
Place = tuple[str, str, int, int | None]


class Ways:
    """How a model is compiled: each returns what is called in training."""

    @staticmethod
    def eager(model: nn.Module, **_: Any) -> Callable[..., Any]:
        return model

    @staticmethod
    def whole(model: nn.Module, **options: Any) -> Callable[..., Any]:
        return torch.compile(model, **options)

    @staticmethod
    def in_place(model: nn.Module, **options: Any) -> Callable[..., Any]:
        model.compile(**options)
        return model

    @staticmethod
    def within_a_function(model: nn.Module, **options: Any) -> Callable[..., Any]:
        def forward(x: Tensor) -> Any:
            return model(x)

        return torch.compile(forward, **options)

    @staticmethod
    def layer_by_layer(model: nn.Module, **options: Any) -> Callable[..., Any]:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile(**options)
        return model

    @staticmethod
    def replaced_layer_by_layer(model: nn.Module, **options: Any) -> Callable[..., Any]:
        for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
            model.layers[number] = torch.compile(layer, **options)  # type: ignore[index]
        return model


_NAMES = ("whole", "in_place", "within_a_function", "layer_by_layer", "replaced_layer_by_layer")
WAYS: dict[str, Compile] = {name: getattr(Ways, name) for name in _NAMES}


@dataclass
class Trained:
    """What a few steps came to.

    Attributes:
        numbers: Losses, and the weights at the end.
        graphs: How many were compiled.
        breaks: Why graphs were broken, and how often.
    """

    numbers: list[Tensor]
    graphs: int
    breaks: Counter[str] = field(default_factory=Counter)


def batch(number: int) -> Tensor:
    return torch.sin(torch.arange(12, dtype=torch.float64) + number).view(3, 4)


def trained(
    make: Make,
    way: Compile,
    output: Output | None = None,
    inputs: Callable[[int], Tensor] = batch,
    watch_what_is_called: bool = False,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Trained:
    """Train a model that is compiled in some way, monitored if there is an ``output``. The micro-batches of a step go forward
    one after the other before the first goes back, as in a pipeline.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = seeded(make)
    called = way(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    watched: Any = called if watch_what_is_called else model
    monitor = None if output is None else attached(output, watched, optimizer, MICRO_STEPS, **(config or EVERYTHING))
    losses = []
    for step in range(STEPS):
        micro_batches = [called(inputs(step + number)).square().sum() for number in range(MICRO_STEPS)]
        for loss in micro_batches:
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    counters = torch._dynamo.utils.counters
    result = Trained([*losses, *(p.detach() for p in model.parameters())], counters["stats"]["unique_graphs"])
    result.breaks = Counter(counters["graph_break"])
    if monitor is not None:
        monitor.close()
    return result


def recorded(output: Output, directory: Path | None = None) -> dict[Place, Row]:
    """Every row of the latest recording, taken away from there."""
    directory = directory or output.directories()[-1]
    found = [row for kind in KINDS for row in output.rows(kind, directory)]
    by_place = {(row.kind, row.name, row.step, row.micro_step): row for row in found}
    assert len(by_place) == len(found)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    return by_place
