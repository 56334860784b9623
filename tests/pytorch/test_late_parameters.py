"""Parameters that a model got, lost or moved after it was attached: no row is of a tensor that the model does not use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from watching import Output, assert_rows, attached, train, warnings_in

X = torch.ones(2, 4)
WEIGHTS: dict[str, Any] = {
    "param_distribution": True,
    "mv_distribution": True,
    "update_ratio": True,
    "ops": ["norm"],
    "ndigits": 17,
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks may take all the time, so that each step is looked at."""
    monkeypatch.setattr("monitor.recording.phases.SHARE", 1e9)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def assigned(net: nn.Sequential) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def replaced(net: nn.Sequential) -> None:
    net[2].weight = nn.Parameter(torch.ones(4, 4))


def frozen_and_replaced(net: nn.Sequential) -> None:
    net[2].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)


def tied(net: nn.Sequential) -> None:
    net[2].weight = net[0].weight


def removed(net: nn.Sequential) -> None:
    del net[2]


def normed(net: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(net[2])


REPLACED = ["2.weight"]
NORMED = ["2.parametrizations.weight.original0", "2.parametrizations.weight.original1"]
EVERY = ["0.weight", "0.bias", "2.weight and 1 more"]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("change", "left", "new"),
    [
        (assigned, EVERY, EVERY),
        (replaced, REPLACED, REPLACED),
        (frozen_and_replaced, REPLACED, REPLACED),
        (tied, REPLACED, []),
        (removed, ["2.weight", "2.bias"], []),
        (normed, REPLACED, NORMED),
    ],
)
def test_parameters_that_left_the_model_have_no_rows_and_are_named(
    change: Callable[[nn.Sequential], None],
    left: list[str],
    new: list[str],
    output: Output,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    kept = {id(p): name for name, p in net.named_parameters()}
    expected = {}
    with attached(output, net, optimizer, **WEIGHTS):
        for step in range(2):
            if step == 1:
                change(net)
            train(net, optimizer, 1, X)
            for p in net.parameters():
                if id(p) in kept:
                    expected[kept[id(p)], step, None] = p.detach().clone()
    assert_rows(output, "param_updated", expected)
    assert {row.name for row in output.rows("update_ratio") if row.step == 1} == {
        name for name, step, _ in expected if step == 1
    }
    notes = output.manifest()["notes"]
    said = [one for one in warnings_in(caplog) if "Parameters" in one]
    assert said == [f"[rank 0] {notes[key]}" for key in ("new_parameters", "left_parameters") if key in notes]
    assert f"({', '.join(left)}). From step 1 on they have no rows" in notes["left_parameters"]
    assert (f"({', '.join(new)}). They have no rows" in notes.get("new_parameters", "")) == bool(new)


def test_the_steps_between_two_looks_are_said_to_be_doubtful(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with attached(output, net, optimizer, **WEIGHTS) as monitor:
        train(net, optimizer, 1, X)
        replaced(net)
        deadline = time.monotonic() + 60
        while not warnings_in(caplog) and time.monotonic() < deadline:
            last = monitor.step
            train(net, optimizer, 1, X)
    rows = {row.step for row in output.rows("param_updated") if row.name == "2.weight"}
    assert rows == set(range(last))
    said = f"From step {last} on they have no rows, unless they return. In steps 1 to {last - 1} their rows may be of tensors"
    assert said in output.manifest()["notes"]["left_parameters"]


def test_loaded_parameters_are_named_in_their_first_step_though_the_optimizer_still_steps_the_old_ones(output: Output) -> None:
    """However soon after the last look: the old tensors keep their gradients, and no row of a later step is theirs."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with attached(output, net, optimizer, **WEIGHTS):
        train(net, optimizer, 2, X)
        net(X).square().mean().backward()
        assigned(net)
        optimizer.step()
    notes = output.manifest()["notes"]
    assert {row.step for row in output.rows("param_updated")} == {0, 1}
    assert f"({', '.join(EVERY)}). From step 2 on they have no rows" in notes["left_parameters"]
    assert f"({', '.join(EVERY)}). They have no rows" in notes["new_parameters"]


@pytest.mark.usefixtures("always")
def test_a_parameter_that_returns_has_rows_again(output: Output) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    own, steps = net[2].weight, []
    with attached(output, net, optimizer, **WEIGHTS) as monitor:
        for weight in (own, nn.Parameter(torch.ones(4, 4)), own):
            net[2].weight = weight
            steps.append(monitor.step)
            train(net, optimizer, 1, X)
    assert steps == [0, 1, 2]
    assert {row.step for row in output.rows("param_updated") if row.name == "2.weight"} == {0, 2}


def test_rows_under_a_name_that_another_parameter_has_got_are_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with attached(output, net, optimizer, **WEIGHTS):
        net[0], net[1] = net[1], net[0]
        train(net, optimizer, 1, X)
    note = output.manifest()["notes"]["moved_parameters"]
    assert "(0.weight, 0.bias, 1.weight and 1 more). Their rows keep the names of that time" in note
    assert f"[rank 0] {note}" in warnings_in(caplog)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.compile(backend="eager"),
        lambda net: nn.utils.parametrizations.orthogonal(net[0], orthogonal_map="householder"),
        lambda net: net.__setitem__(2, torch.compile(net[2], backend="eager")),
        lambda net: net.double().float(),
        lambda net: net.load_state_dict(net.state_dict()),
    ],
)
def test_parameters_that_stay_are_not_said_to_have_left(
    change: Callable[[nn.Sequential], object], output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with attached(output, net, optimizer, **WEIGHTS):
        change(net)
        train(net, optimizer, 2, X)
    assert len({row.name for row in output.rows("param_updated") if row.step == 1}) == 4
    assert warnings_in(caplog) == []
