"""What a compiler does beside compiling a training step: transforms, control flow, exports. Nothing of ours is in its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from compiling import Ways, batch, recorded, trained
from evidence import sampled
from networks import InPlace, OneLayer
from torch import Tensor, nn
from watching import EVERYTHING, Output, attached, train, warnings_in

from monitor.pytorch import modules
from monitor.pytorch.compiled import operators
from monitor.pytorch.compiled.operators import NOT_OBSERVED, HookGuards


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.cond(x.sum() > 0, self.one, self.other, (x,)))
        return y


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.vmap(self.each)(x))
        return y


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.potential, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.func.grad(lambda z: self.potential(z).square().sum())(x))
        return y


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(Region(), Region()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.layers(x))
        return y


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever else in this process has a monitor."""
    monkeypatch.setattr(operators, "HOOK_GUARDS", HookGuards())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("model", [Branches, Mapped, Slopes, Regions])
def test_inside_of_transforms_and_control_flow_there_are_no_rows_and_training_is_the_same(
    model: Callable[[], nn.Module], output: Output
) -> None:
    alone = trained(model, Ways.whole, backend="aot_eager")

    monitored = trained(model, Ways.whole, output, backend="aot_eager")

    assert all(map(torch.equal, alone.numbers, monitored.numbers))
    assert (monitored.graphs, monitored.breaks) == (alone.graphs, alone.breaks)
    found = recorded(output)
    assert {name for kind, name, *_ in found if kind == "actv"} >= {"last.input", "last.output", ".output"}
    trained(model, Ways.eager, output)
    eager = recorded(output)
    for place, row in found.items():
        assert row.values == pytest.approx(eager[place].values, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_model_has_nothing_of_the_monitor(strict: bool, output: Output) -> None:
    model = InPlace().double()
    with attached(output, model, torch.optim.SGD(model.parameters(), lr=0.1), **EVERYTHING):
        exported = torch.export.export(model, (batch(0),), strict=strict)
    assert "monitor" not in str(exported.graph)


def test_a_model_that_was_compiled_before_is_said_to_have_no_rows(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = InPlace().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    train(compiled, optimizer, 1, batch(0))

    with attached(output, model, optimizer, **EVERYTHING):
        train(compiled, optimizer, 1, batch(0))

    (said,) = [message for message in warnings_in(caplog) if "compiled before" in message]
    assert "'InPlace'" in said
    assert "Torch may use this code again, also for another model of the class." in said
    assert "torch._dynamo.reset()" in said
    assert "first.input" not in {row.name for row in output.rows("actv")}


def with_one_code(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As decorators of transformers do: the functions that it returns share their code."""

    @wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, *args, **kwargs)

    return wrapper


class Decorated(OneLayer):
    forward = with_one_code(OneLayer.forward)


class AlsoDecorated(InPlace):
    forward = with_one_code(InPlace.forward)


@pytest.mark.parametrize(("first", "warned"), [(Decorated, 0), (AlsoDecorated, 1)])
def test_only_a_class_whose_own_forward_was_compiled_is_said_to_be_compiled_before(
    first: type[nn.Module], warned: int, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    assert Decorated.forward.__code__ is AlsoDecorated.forward.__code__
    torch.compile(first().double(), backend="eager")(batch(0)).sum().backward()
    model = AlsoDecorated().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **EVERYTHING):
        train(torch.compile(model, backend="eager"), optimizer, 1, batch(0))
    assert len([message for message in warnings_in(caplog) if "compiled before" in message]) == warned
    assert ("first.input" in {row.name for row in output.rows("actv")}) == (not warned)


def test_another_model_of_the_same_class_that_is_compiled_first_takes_no_rows_away(output: Output) -> None:
    unmonitored, model = InPlace().double(), InPlace().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **EVERYTHING):
        torch.compile(unmonitored, backend="eager")(batch(0)).sum().backward()
        train(torch.compile(model, backend="eager"), optimizer, 1, batch(0))
    assert "first.input" in {row.name for row in output.rows("actv")}


def test_torchs_own_settings_are_put_back(output: Output) -> None:
    model = InPlace().double()
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    first = attached(output, model, torch.optim.SGD(model.parameters(), lr=0.1), **EVERYTHING)
    second = attached(output, model, torch.optim.SGD(model.parameters(), lr=0.1), **EVERYTHING)
    first.close()
    assert not torch._dynamo.config.skip_nnmodule_hook_guards
    second.close()
    assert torch._dynamo.config.skip_nnmodule_hook_guards == before


def test_torchs_own_settings_are_put_back_when_no_one_has_the_monitor_any_more() -> None:
    class Holder:
        pass

    guards, holder = HookGuards(), Holder()
    guards.hold(holder)
    assert not torch._dynamo.config.skip_nnmodule_hook_guards
    del holder
    assert torch._dynamo.config.skip_nnmodule_hook_guards


def test_compiled_again_as_the_warning_says_it_has_them(output: Output) -> None:
    model = InPlace().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    train(compiled, optimizer, 1, batch(0))

    with attached(output, model, optimizer, **EVERYTHING):
        torch._dynamo.reset()
        train(compiled, optimizer, 1, batch(0))

    assert "first.input" in {row.name for row in output.rows("actv")}


@pytest.mark.parametrize("way", sampled([Ways.whole, Ways.within_a_function, Ways.layer_by_layer], 2))
def test_after_close_compiled_code_records_nothing_and_trains_on(way: Callable[..., Any], output: Output) -> None:
    model = OneLayer().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = way(model, backend="aot_eager")
    with attached(output, model, optimizer, **EVERYTHING):
        train(called, optimizer, 1, batch(0))

    train(called, optimizer, 2, batch(0))

    assert {row.step for kind in ("actv", "actv_grad") for row in output.rows(kind)} == {0}


def test_a_step_of_evaluation_in_between_has_no_rows(output: Output) -> None:
    model = OneLayer().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with attached(output, model, optimizer, **EVERYTHING):
        train(compiled, optimizer, 1, batch(0))
        model.eval()
        with torch.no_grad():
            compiled(batch(1) * 100)
        compiled(batch(1) * 100)
        model.train()
        train(compiled, optimizer, 1, batch(0))
    rows = [row for row in output.rows("actv") if row.name == "first.input"]
    assert [(row.step, row.values["max"]) for row in rows] == [(step, batch(0).max().item()) for step in (0, 1)]


def test_shapes_that_change_are_recorded_as_they_are(output: Output) -> None:
    model = OneLayer().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with attached(output, model, optimizer, **{**EVERYTHING, "ops": ["norm", "shape"]}):
        for rows in (3, 5, 2):
            train(compiled, optimizer, 1, torch.ones(rows, 4, dtype=torch.float64))
    shapes = [str(row.values["shape"]) for row in output.rows("actv") if row.name == "first.input"]
    assert shapes == ["[3, 4]", "[5, 4]", "[2, 4]"]


@pytest.mark.parametrize("way", sampled([Ways.whole, Ways.within_a_function, Ways.layer_by_layer], 2))
@pytest.mark.filterwarnings("ignore:reload_xy:DeprecationWarning")
def test_activations_that_are_switched_on_later_have_their_rows(
    way: Callable[..., Any], output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = InPlace().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = way(model, backend="eager")
    with attached(output, model, optimizer, **{**EVERYTHING, "xy_distribution": False}) as monitor:
        train(called, optimizer, 1, batch(0))
        monitor.reload_xy(xy_distribution=True)
        train(called, optimizer, 1, batch(0))
        monitor.reload_xy(xy_distribution=False)
        train(called, optimizer, 1, batch(0))
    rows = [row for kind in ("actv", "actv_grad") for row in output.rows(kind)]
    assert {row.step for row in rows} == {1}
    assert not [message for message in warnings_in(caplog) if "compiled before" in message]
    assert {"first.input", "layers.0.norm.output", "layers.1.mlp.2.input", "last.output"} <= {row.name for row in rows}


class OfTheUser(nn.Sequential):
    """Torch compiles modules of its own after a graph break only if they have hooks, and the monitor hides its hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_torch_that_cannot_keep_operators_says_once_that_compiled_code_has_no_rows(
    output: Output, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "TRACEABLE", False)
    torch._dynamo.reset()
    breaks = torch._dynamo.utils.counters["graph_break"]
    before = breaks.total()
    model = OfTheUser(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **EVERYTHING):
        train(model, optimizer, 2, torch.randn(3, 4))
    assert [message for message in warnings_in(caplog) if NOT_OBSERVED in message] == [f"[rank 0] {NOT_OBSERVED}"]
    assert breaks.total() == before
    assert {row.name for row in output.rows("actv")}.isdisjoint({"0.input", "1.input", "2.input"})
    assert len(output.rows("grad_reduced")) == 2 * 4
