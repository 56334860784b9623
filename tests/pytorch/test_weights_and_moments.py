"""Weights around the optimizer's step, and its moments before it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from watching import Output, Row, assert_rows, attached, train

OPS = {"ops": ["min", "max", "mean", "norm", "zeros", "nans", "infs", "std"], "ndigits": 17}
WEIGHTS = {"param_distribution": True, **OPS}
MOMENTS = {"mv_distribution": True, **OPS}
KINDS = {"exp_avg": ("exp_avg", "momentum_buffer"), "exp_avg_sq": ("exp_avg_sq",), "max_exp_avg_sq": ("max_exp_avg_sq",)}
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
Rows = dict[tuple[str, int, int | None], torch.Tensor]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def weights(model: nn.Module, step: int) -> Rows:
    return {(name, step, None): p.detach().clone() for name, p in model.named_parameters()}


def moments(model: nn.Module, optimizer: Optimizer, kind: str, step: int) -> Rows:
    """Copies of what the optimizer keeps now."""
    kept = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    return {(name, step, None): state[key].clone() for name, state in kept.items() for key in KINDS[kind] if key in state}


def test_weights_are_read_before_and_after_the_step(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters(), lr=0.1)
    origin: Rows = {}
    updated: Rows = {}
    with attached(output, model, optimizer, **WEIGHTS):
        for step in range(3):
            origin |= weights(model, step)
            train(model, optimizer, 1, X)
            updated |= weights(model, step)
    assert_rows(output, "param_origin", origin)
    assert_rows(output, "param_updated", updated)


def test_weights_changed_behind_their_version_between_steps_are_seen(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    origin: Rows = {}
    with attached(output, model, optimizer, **WEIGHTS):
        for step in range(2):
            origin |= weights(model, step)
            train(model, optimizer, 1, X)
            for p in model.parameters():
                p.data.clamp_(-0.01, 0.01)
    assert_rows(output, "param_origin", origin)


def test_frozen_and_unused_weights_have_rows(output: Output) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(2))
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **WEIGHTS):
        train(nn.Sequential(model[0], model[1], model[2]), optimizer, 1, X)
    assert [row.name for row in output.rows("param_updated")] == ["spare", "0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_weight_under_two_names_has_one_row(output: Output) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].weight = model[0].weight
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, **WEIGHTS, mv_distribution=True):
        train(model, optimizer, 2, X)
    for kind in ("param_origin", "param_updated"):
        assert [row.name for row in output.rows(kind)] == ["0.weight", "0.bias", "1.bias"] * 2
    assert [row.name for row in output.rows("exp_avg")] == ["0.weight", "0.bias", "1.bias"]


OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], list[str]]] = {
    "Adam": (lambda p, **way: Adam(p, lr=0.01, **way), ["exp_avg", "exp_avg_sq"]),
    "AdamW": (lambda p, **way: AdamW(p, lr=0.01, **way), ["exp_avg", "exp_avg_sq"]),
    "AMSGrad": (lambda p, **way: Adam(p, lr=0.01, amsgrad=True, **way), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    "momentum": (lambda p, **way: SGD(p, lr=0.01, momentum=0.9, **way), ["exp_avg"]),
}


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_those_before_the_step_and_the_first_step_has_none(output: Output, name: str, way: dict[str, Any]) -> None:
    make, kinds = OPTIMIZERS[name]
    model = small_model()
    optimizer = make(model.parameters(), **way)
    expected: dict[str, Rows] = {kind: {} for kind in KINDS}
    with attached(output, model, optimizer, **MOMENTS):
        for step in range(3):
            for kind, rows in expected.items():
                rows |= moments(model, optimizer, kind, step)
            train(model, optimizer, 1, X)
    assert [kind for kind, rows in expected.items() if rows] == kinds
    for kind, rows in expected.items():
        assert_rows(output, kind, rows)
    assert {row.step for row in output.rows("exp_avg")} == {1, 2}


def test_an_optimizer_that_was_loaded_has_moments_in_its_first_step(output: Output) -> None:
    model = small_model()
    earlier = Adam(model.parameters())
    train(model, earlier, 2, X)
    optimizer = Adam(model.parameters())
    optimizer.load_state_dict(earlier.state_dict())
    expected = moments(model, optimizer, "exp_avg_sq", 0)
    with attached(output, model, optimizer, **MOMENTS):
        train(model, optimizer, 1, X)
    assert len(expected) == 4
    assert_rows(output, "exp_avg_sq", expected)


def test_an_optimizer_without_momentum_has_no_moments(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **MOMENTS):
        train(model, optimizer, 2, X)
    assert list(output.directory().glob("*.csv")) == []


def test_reading_moments_makes_no_state(output: Output) -> None:
    """An optimizer's state is a dictionary that makes what it is asked for."""
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = Adam(model.parameters())
    seen = []
    with attached(output, model, optimizer, **MOMENTS):
        optimizer.register_step_pre_hook(lambda *_: seen.append(len(optimizer.state)))
        train(model, optimizer, 2, X)
    assert seen == [0, 2]
    assert len(optimizer.state) == 2


def test_the_optimizer_ends_in_the_same_state_as_without_a_monitor(output: Output) -> None:
    model = small_model()
    twin = copy.deepcopy(model)
    optimizer, other = Adam(model.parameters(), amsgrad=True), Adam(twin.parameters(), amsgrad=True)
    with attached(output, model, optimizer, **MOMENTS, param_distribution=True, wg_distribution=True):
        train(model, optimizer, 3, X)
    train(twin, other, 3, X)
    ours, theirs = optimizer.state_dict(), other.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert all(torch.equal(value, ours["state"][index][key]) for key, value in state.items())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_tiny_second_moments_are_not_written_as_zero(output: Output) -> None:
    """Peers, fault 2: exp_avg_sq of a LayerNorm printed as 0.0 in every column."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, mv_distribution=True, ops=["max", "mean", "norm"]):
        for _ in range(2):
            (model(X).square().mean() * 1e-6).backward()
            optimizer.step()
    rows: list[Row] = [row for row in output.rows("exp_avg_sq") if row.name == "1.bias"]
    assert len(rows) == 1
    state = optimizer.state[model[1].bias]["exp_avg_sq"]
    assert 0 < state.max().item() < 1e-12
    assert all(0 < value < 1e-12 for value in rows[0].values.values())
