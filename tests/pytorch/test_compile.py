"""torch.compile: compiled code is not observed yet, and nothing of it is broken, slowed down or made up."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from observing import Residual, seeded
from torch import Tensor, nn
from watching import EVERYTHING, Output, Row, attached

STEPS = 3
MICRO_STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.activation = nn.ReLU(inplace=True)
        self.block = Residual()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.activation(self.first(x))))


class Interrupted(Net):
    """Has a place in it that cannot be compiled."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        torch._dynamo.graph_break()
        return self.last(self.block(x))


class Graphs:
    """A backend that runs what it is given as it is, and counts how often it was asked."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self.compiled += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(number: int) -> Tensor:
    return torch.sin(torch.arange(12, dtype=torch.float64) + number).view(3, 4)


class Compiled:
    """What is called in training, what is monitored, and what was compiled, in each way of compiling."""

    @staticmethod
    def whole(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
        compiled = torch.compile(model, **options)
        return compiled, compiled

    @staticmethod
    def after_it_was_attached(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
        return torch.compile(model, **options), model

    @staticmethod
    def in_place(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
        model.compile(**options)
        return model, model

    @staticmethod
    def a_part(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
        model.block = torch.compile(model.block, **options)
        return model, model

    @staticmethod
    def a_part_in_place(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
        model.block.compile(**options)
        return model, model


WAYS = {name: getattr(Compiled, name) for name in ("whole", "after_it_was_attached", "in_place", "a_part", "a_part_in_place")}
KINDS = ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")


def run(called: nn.Module, watched: nn.Module, output: Output | None) -> list[Tensor]:
    """The losses of a few steps of three micro-batches, and the weights at the end."""
    optimizer = torch.optim.Adam(watched.parameters(), lr=0.1)
    monitor = None if output is None else attached(output, watched, optimizer, MICRO_STEPS, **EVERYTHING)
    losses = []
    for step in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            loss = called(batch(step + micro_step)).square().sum()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
    return [*losses, *(p.detach() for p in watched.parameters())]


def rows(output: Output, directory: Path) -> dict[tuple[str, str, int, int | None], Row]:
    found = [row for kind in KINDS for row in output.rows(kind, directory)]
    by_place = {(row.kind, row.name, row.step, row.micro_step): row for row in found}
    assert len(by_place) == len(found)
    return by_place


def rows_of_eager(model: Callable[[], nn.Module], output: Output) -> dict[tuple[str, str, int, int | None], Row]:
    twin = seeded(model)
    run(twin, twin, output)
    (directory,) = output.directories()
    found = rows(output, directory)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    return found


@pytest.mark.parametrize("model", [Net, Interrupted])
@pytest.mark.parametrize("compiled", WAYS.values(), ids=WAYS)
def test_training_is_the_same_and_what_is_recorded_is_right(
    compiled: Callable[..., tuple[nn.Module, nn.Module]], model: type[Net], output: Output
) -> None:
    """Fault 14 of the tool before: it recompiled until the limit, and names gained ``_orig_mod.``."""
    eager = rows_of_eager(model, output)
    alone, beside = Graphs(), Graphs()

    expected = run(*compiled(seeded(model), backend=alone), None)
    torch._dynamo.reset()
    found = run(*compiled(seeded(model), backend=beside), output)

    assert all(map(torch.equal, expected, found))
    assert beside.compiled == alone.compiled > 0
    recorded = rows(output, output.directory())
    assert recorded.keys() <= eager.keys()
    for place, row in recorded.items():
        assert row.values == pytest.approx(eager[place].values, rel=1e-9, abs=1e-12)
    assert {place for place in eager if place[0] not in ("actv", "actv_grad", "grad_unreduced")} <= recorded.keys()


@pytest.mark.parametrize("compiled", WAYS.values(), ids=WAYS)
def test_a_full_graph_stays_one(compiled: Callable[..., tuple[nn.Module, nn.Module]], output: Output) -> None:
    graphs = Graphs()

    run(*compiled(seeded(Net), backend=graphs, fullgraph=True), output)

    assert graphs.compiled == 1


def test_around_what_is_compiled_everything_is_recorded(output: Output) -> None:
    eager = rows_of_eager(Net, output)

    run(*Compiled.a_part(seeded(Net), backend="aot_eager", fullgraph=True), output)

    missing = {(kind, name) for kind, name, *_ in eager.keys() - rows(output, output.directory()).keys()}
    assert missing == {
        (kind, name) for kind, name, *_ in eager if name.startswith("block.") and kind in ("actv", "actv_grad")
    } - {(kind, f"block.{side}") for kind in ("actv", "actv_grad") for side in ("input", "output")}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_trains_as_without_a_monitor(output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    # One thread: no pool of compiling processes outlives the test.
    with torch._inductor.config.patch(compile_threads=1):
        expected = run(*Compiled.whole(seeded(Net), fullgraph=True), None)
        torch._dynamo.reset()
        found = run(*Compiled.whole(seeded(Net), fullgraph=True), output)

    assert all(map(torch.equal, expected, found))
    actv = {(name, micro_step) for kind, name, _, micro_step in rows(output, output.directory()) if kind == "actv"}
    assert actv == {(name, micro_step) for name in (".input", ".output") for micro_step in range(MICRO_STEPS)}
