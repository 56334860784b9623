"""Modules that a model got after it was attached: that they have no rows is said."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from watching import Output, attached, train, warnings_in

ACTIVATIONS: dict[str, Any] = {"xy_distribution": True, "all_xy": True, "ops": ["norm"]}


class Adapted(nn.Module):
    """A layer with a small one beside it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.low_rank = layer, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.low_rank(x)
        return out


class Lazy(nn.Module):
    """Makes its layer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            self.layer = nn.Linear(4, 4)
        out: torch.Tensor = self.layer(x)
        return out


class Unnamed(nn.Sequential):
    """A model whose modules can no longer be listed once it is attached.

    Attributes:
        refused: How often that was tried.
    """

    refused: int | None = None

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        if self.refused is not None:
            self.refused += 1
            raise RuntimeError("it has no modules")
        return super().named_modules(*args, **kwargs)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def late(output: Output, caplog: pytest.LogCaptureFixture) -> str:
    """Which modules have no rows, in the warning and the note."""
    notes = output.manifest()["notes"]
    note = notes.get("modules_without_activations") or notes.get("modules_without_features")
    said = [one for one in warnings_in(caplog) if "got modules" in one or "other names" in one]
    assert said == ([f"[rank 0] {note}"] if note else [])
    return note.split("got modules after set_monitor was called: ")[1].split(". ")[0] if note else ""


def changed(change: Callable[[nn.Sequential], object], output: Output, **config: Any) -> None:
    """Train a model that ``change`` changes after it was attached."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attached(output, net, optimizer, **ACTIVATIONS | config):
        change(net)
        train(net, optimizer, 2, torch.ones(2, 4))


def in_place_of(number: int, make: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Sequential], None]:
    """A change that makes a module of one, which takes its place."""
    return lambda net: net.__setitem__(number, make(net[number]))


def test_a_module_that_was_replaced_is_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    changed(in_place_of(1, lambda _: nn.GELU()), output)
    assert late(output, caplog) == "1"
    assert "1.output" not in {row.name for row in output.rows("actv")}


def test_a_module_that_was_wrapped_is_recorded_and_what_is_new_in_the_wrapper_is_named(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    changed(in_place_of(2, Adapted), output)
    assert late(output, caplog) == "2.low_rank"
    assert "2.output" in {row.name for row in output.rows("actv")}


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapper_without_a_name_in_rows_is_not_late(wrap: Any, output: Output, caplog: pytest.LogCaptureFixture) -> None:
    with torch.compiler.set_stance("force_eager"):
        changed(in_place_of(2, wrap), output)
    assert late(output, caplog) == ""


def containers(net: nn.Sequential) -> None:
    net[0].lists, net[0].blocks, net[0].scales = nn.ModuleList([nn.ModuleDict()]), nn.Module(), nn.ParameterList()


def test_what_has_no_forward_is_not_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    changed(containers, output)
    assert late(output, caplog) == ""


def test_a_parametrization_and_the_list_that_calls_it_are_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    changed(lambda net: nn.utils.parametrizations.weight_norm(net[2]), output)
    assert late(output, caplog) == "2.parametrizations.weight, 2.parametrizations.weight.0"


def test_a_module_that_others_made_room_for_is_named_and_so_are_rows_under_names_of_others(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    changed(lambda net: net.insert(0, nn.Linear(4, 4)), output)
    assert late(output, caplog) == "0"
    assert "other names than when set_monitor was called: 0, 1, 2. Their rows keep" in warnings_in(caplog)[0]


def test_a_name_that_another_module_has_got_is_said(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    changed(lambda net: net.__delitem__(0), output)
    (said,) = warnings_in(caplog)
    assert said.startswith("[rank 0] Modules have other names than when set_monitor was called: 1. Their rows keep")


def test_attaching_again_names_nothing(
    output: Output, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monitor.recording.phases.SHARE", 1e9)  # a look at each step
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attached(output, net, optimizer, **ACTIVATIONS) as monitor:
        train(net, optimizer, 1, torch.ones(2, 4))
        net(torch.ones(2, 4))
        net.append(nn.Linear(4, 4))
        monitor.set_monitor(net, grad_acc_steps=1, optimizer=optimizer)
        train(net, optimizer, 1, torch.ones(2, 4))
    assert "3.output" in {row.name for row in output.rows("actv")}
    assert not [one for one in warnings_in(caplog) if "got modules" in one]


def test_what_takes_no_hooks_is_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    changed(in_place_of(1, lambda _: torch.jit.script(nn.Linear(4, 4))), output)
    assert late(output, caplog) == "1"


def test_what_the_first_forward_makes_is_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    changed(in_place_of(1, lambda _: nn.Sequential(Lazy())), output)
    assert late(output, caplog) == "1, 1.0, 1.0.layer"


def test_only_what_would_have_rows_is_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    changed(in_place_of(1, lambda _: nn.GELU()), output, all_xy=False, targets={"0": {}})
    assert late(output, caplog) == ""


def test_a_module_that_was_to_have_features_is_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    config = {"recording_l2_features": True, "l2_targets": {"linear_hook": ["2"]}, "xy_distribution": False}
    changed(in_place_of(2, lambda _: nn.Linear(4, 4)), output, **config)
    assert late(output, caplog) == "2"
    assert "Their features have no rows" in output.manifest()["notes"]["modules_without_features"]


def test_a_look_that_fails_is_said_and_not_repeated(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = Unnamed(*model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attached(output, net, optimizer, **ACTIVATIONS):
        net.refused = 0
        train(net, optimizer, 2, torch.ones(2, 4))
        assert net.refused == 1
    (said,) = [one for one in warnings_in(caplog) if "it has no modules" in one]
    assert "looking for new modules" in said
    assert {row.step for row in output.rows("actv")} == {0, 1}


def test_it_looks_again_while_the_model_trains(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attached(output, net, optimizer, **ACTIVATIONS):
        train(net, optimizer, 1, torch.ones(2, 4))
        net[1] = nn.GELU()
        deadline = time.monotonic() + 60
        while not warnings_in(caplog) and time.monotonic() < deadline:
            train(net, optimizer, 1, torch.ones(2, 4))
    assert late(output, caplog) == "1"


def test_hooks_that_fusing_for_quantization_moves_do_nothing(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with attached(output, layers, optimizer, **ACTIVATIONS):
        fused = torch.ao.quantization.fuse_modules_qat(layers, [["0", "1", "2"]], inplace=True)
        fused(torch.ones(1, 1, 4, 4)).sum().backward()
        optimizer.step()
    assert [said for said in warnings_in(caplog) if "failed" in said] == []
