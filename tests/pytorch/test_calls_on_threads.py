"""Modules that threads call: the gradient of an input is that of the call's own uses, or absent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from observing import Observed, observed
from torch import Tensor, nn
from watching import Output, warnings_in

SAID = "other threads may have recorded"


def values() -> Tensor:
    return torch.sin(torch.arange(12, dtype=torch.float64)).view(3, 4)


def numbered(many: int = 50) -> Tensor:
    """A leaf; on the thread that calls this autograd has counted further than on a new one."""
    x = values().requires_grad_()
    for _ in range(many):
        x * 1.0
    return x


def on_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Branches(nn.Module):
    """A branch on a thread of its own, and one on the thread of the caller."""

    def __init__(self, call: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.branch, self.other = Square(), Square(), Square()
        self.call = call or self.branch
        self.handed: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        g = h.exp()
        g.register_hook(lambda gradient: self.handed.__setitem__("branch", gradient))
        return on_a_thread(self.call, g) + self.other(h)


def step(output: Output, model: nn.Module, run: Callable[[], object]) -> Observed:
    return observed(output, model, run)


def of_inputs(found: Observed) -> dict[str, float]:
    return {name: norm for name, norm in found.norms("actv_grad").items() if ".input" in name or name.startswith("input")}


def test_a_module_that_another_thread_calls_has_the_gradient_of_its_input(output: Output) -> None:
    model = Branches()
    found = of_inputs(step(output, model, lambda: model(numbered()).sum().backward()))
    assert found["branch.input"] == pytest.approx(float(model.handed["branch"].norm()))
    assert {"first.input", "other.input"} <= set(found)


@pytest.mark.parametrize("known", [True, False], ids=["a module", "a function"])
def test_a_module_with_operations_on_another_thread_has_none_and_that_is_said(
    output: Output, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    model = Branches(None if known else torch.square)
    inner = nn.Sequential(model)
    found = of_inputs(step(output, inner, lambda: inner(numbered()).sum().backward()))
    assert "0.input" not in found
    assert "0.first.input" in found
    assert sum(SAID in line for line in warnings_in(caplog)) == 1


class Captures(nn.Module):
    """Uses a tensor that it was not called with."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() + self.kept * 2


def test_what_another_thread_has_made_before_is_no_part_of_a_call(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"inner": Captures()})

    def run() -> None:
        x = numbered()
        model["inner"].kept = x * x
        on_a_thread(model["inner"], x).sum().backward()

    assert of_inputs(step(output, model, run)) == {}
    assert any(SAID in line for line in warnings_in(caplog))


def test_what_the_same_thread_has_made_before_is_no_part_of_a_call(output: Output) -> None:
    model = nn.ModuleDict({"inner": Captures()})

    def run() -> None:
        x = numbered()
        model["inner"].kept = x * x
        model["inner"](x).sum().backward()

    assert of_inputs(step(output, model, run)) == {"inner.input": pytest.approx(float(values().exp().norm()))}


class Meeting(nn.Module):
    """Two threads are in the forward at the same time, and leave it in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.both_in, self.first_out = threading.Barrier(2), threading.Event()

    def forward(self, x: Tensor, factor: float) -> Tensor:
        y = (x * factor).exp()
        self.both_in.wait(20)
        if factor == 3.0:
            self.first_out.wait(20)
        return y * 2


def test_calls_of_one_module_by_two_threads_at_a_time_are_kept_apart(output: Output) -> None:
    model = nn.ModuleDict({"inner": Meeting()})
    inputs = [numbered(), numbered(7)]

    def call(x: Tensor, factor: float, before: int) -> Tensor:
        numbered(before)
        y: Tensor = model["inner"](x, factor)
        model["inner"].first_out.set()
        return y

    def run() -> None:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(call, inputs, (1.0, 3.0), (0, 40)))
        torch.stack(results).sum().backward()

    expected = sorted(float((2 * factor * (values() * factor).exp()).norm()) for factor in (1.0, 3.0))
    assert sorted(of_inputs(step(output, model, run)).values()) == pytest.approx(expected)


def test_training_on_another_thread_has_the_rows_that_it_has_on_this_one(output: Output) -> None:
    model = nn.Sequential(Square(), Square())

    def run() -> None:
        model(numbered()).sum().backward()

    here, there = (of_inputs(step(output, model, one)) for one in (run, lambda: on_a_thread(run)))
    assert {".input", "0.input", "1.input"} == set(here)
    assert here == there
