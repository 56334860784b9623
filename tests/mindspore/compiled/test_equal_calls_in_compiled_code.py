"""Calls whose arguments or gradients are the same tensor have all their rows. The compiler could take them for one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output
from compiled_steps import STEPS, WHOLE, Deep, Rows, assert_same, plain, recorded
from evidence import in_turn
from mindspore import Tensor, nn, ops, parallel


def batches(step: int) -> Tensor:
    return Tensor(np.random.default_rng(step).normal(size=(6, 4)).astype(np.float32))


LOOP: dict[str, Any] = {"given": batches}


class Before(nn.Cell):
    """Calls another cell first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Dense(4, 4), Deep()


class EqualGradients(Before):
    def construct(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.again(y) + self.again(ops.sin(y)) + self.again(ops.cos(y))


class EqualArguments(Before):
    def construct(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return ops.sin(self.again(y)) + ops.tanh(self.again(y)) + ops.cos(self.again(y))


class EqualCalls(Before):
    def construct(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return 3.0 * self.again(ops.sin(y)) + self.again(y) + self.again(y)


class CompiledGradients(EqualGradients):
    """A compiled cell, which the dynamic graph differentiates."""

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.again(y) + self.again(ops.sin(y)) + self.again(ops.cos(y))


class CompiledCalls(EqualCalls):
    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return 3.0 * self.again(ops.sin(y)) + self.again(y) + self.again(y)


MICRO_BATCHES: dict[str, Callable[[], nn.Cell]] = {
    "GradAccumulationCell": lambda: nn.GradAccumulationCell(Deep(), 2),
    "MicroBatchInterleaved": lambda: nn.MicroBatchInterleaved(Deep(), 2),
    "PipelineCell": lambda: nn.PipelineCell(Deep(), 2),
    "parallel.GradAccumulation": lambda: parallel.nn.GradAccumulation(Deep(), 3),
}


@pytest.mark.parametrize(("name", "how"), in_turn(MICRO_BATCHES, WHOLE))
def test_micro_batches_of_one_compiled_step_have_the_rows_of_the_dynamic_graph(name: str, how: str, output: Output) -> None:
    make = MICRO_BATCHES[name]
    _, expected = recorded("dynamic", make, output, loop=LOOP)
    bits, rows = recorded(how, make, output, loop=LOOP)
    assert bits == plain(how, make, **LOOP)
    assert_same(rows, expected)


@pytest.mark.parametrize(("make", "how"), in_turn([EqualGradients, EqualArguments, EqualCalls], WHOLE))
def test_equal_calls_have_a_row_each(make: type[nn.Cell], how: str, output: Output) -> None:
    _, expected = recorded("dynamic", make, output, loop=LOOP)
    bits, rows = recorded(how, make, output, loop=LOOP)
    assert bits == plain(how, make, **LOOP)
    assert_same(in_order_of_norms(rows), in_order_of_norms(expected), 1e-5)


def test_equal_gradients_in_a_compiled_cell_have_a_row_each(output: Output) -> None:
    _, expected = recorded("dynamic", EqualGradients, output, loop=LOOP)
    bits, rows = recorded("dynamic", CompiledGradients, output, loop=LOOP)
    assert bits == plain("dynamic", CompiledGradients, **LOOP)
    of_input = {key for key in rows if key[:2] == ("actv_grad", ".input")}
    assert len(of_input) == STEPS  # its backward computes this gradient in any case
    rows = {key: values for key, values in rows.items() if key not in of_input}
    assert_same(in_order_of_norms(rows), in_order_of_norms(expected), 1e-5)


def test_equal_calls_in_a_compiled_cell_are_one_call_as_without_a_monitor(output: Output) -> None:
    bits, rows = recorded("dynamic", CompiledCalls, output, loop=LOOP)
    assert bits == plain("dynamic", CompiledCalls, **LOOP)
    results = {name for kind, name, *_ in rows if kind == "actv" and name.startswith("again.output")}
    assert results == {"again.output", "again.output#1"}


def in_order_of_norms(rows: Rows) -> Rows:
    """The calls of a cell numbered by their norms: these calls do not depend on each other."""
    calls: dict[Any, list[dict[str, Any]]] = {}
    for (kind, name, *at), values in rows.items():
        calls.setdefault((kind, name.partition("#")[0], *at), []).append(values)
    return {
        (*key, place): values
        for key, every in calls.items()
        for place, values in enumerate(sorted(every, key=lambda one: float(one["norm"])))
    }
