"""Calls of one cell in compiled code: those that depend on each other, and those that do not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from attaching import Output, warnings_in
from compiled_steps import WHOLE, Rows, recorded
from evidence import in_turn
from mindspore import Tensor, nn, ops
from training import Recurrent

from monitor.mindspore.compiled.order import INDEPENDENT

SIZE = 64
STEPS = 12


class Siamese(nn.Cell):
    """The results of two independent calls are used in another order than that of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.SequentialCell(nn.Dense(SIZE, SIZE), nn.ReLU(), nn.Dense(SIZE, SIZE))

    def construct(self, x: Tensor) -> Tensor:
        one, other = self.encode(ops.cos(x)), self.encode(x)
        return (other - one).square().mean() + ops.tanh(one * other).mean()


class Tree(nn.Cell):
    """Some calls depend on others."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Recurrent(SIZE)

    def construct(self, x: Tensor) -> Tensor:
        first, second = self.cell(x * 2.0, x), self.cell(x, ops.sin(x))
        both = self.cell(second, first)
        return (self.cell(both, second) * second + self.cell(first, both)).mean()


class Chain(nn.Cell):
    """Each call depends on the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.SequentialCell(nn.Dense(SIZE, SIZE), nn.Tanh())

    def construct(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.cell(x)
        return x.mean()


def alike(_step: int) -> Tensor:
    return Tensor(np.random.default_rng(7).normal(size=(16, SIZE)).astype(np.float32))


def rows_of(how: str, make: Any, output: Output) -> Rows:
    """The rows of steps that are all alike: neither batches nor weights change."""
    _, rows = recorded(
        how, make, output, lambda parameters: nn.SGD(parameters, 0.0), loop={"steps": STEPS, "given": alike}, ops=["norm"]
    )
    return {key: values for key, values in rows.items() if key[0].startswith("actv")}


def calls_in(rows: Rows) -> Counter[Any]:
    """What each call of a cell has in step 1: its place in the row's name says which call it is."""
    calls: dict[tuple[str, str], list[Any]] = {}
    for (kind, name, step, _), values in rows.items():
        if step == 1:
            cell, _, slot = name.rpartition(".")
            slot, _, call = slot.partition("#")
            calls.setdefault((cell, call), []).append((kind, slot, float(f"{values['norm']:.4g}")))
    return Counter((cell, tuple(sorted(found))) for (cell, _), found in calls.items())


@pytest.mark.parametrize(("make", "how"), in_turn([Siamese, Tree], WHOLE))
def test_independent_calls_have_the_same_numbers_in_each_step(how: str, make: Any, output: Output) -> None:
    rows = rows_of(how, make, output)
    by_name: dict[Any, set[float]] = {}
    for (kind, name, *_), values in rows.items():
        by_name.setdefault((kind, name), set()).add(float(f"{values['norm']:.4g}"))
    assert len(rows) == STEPS * len(by_name)
    assert {name for name, norms in by_name.items() if len(norms) > 1} == set()


@pytest.mark.parametrize(("make", "how"), in_turn([Tree, Siamese], WHOLE))
def test_all_rows_of_an_independent_call_have_its_number(how: str, make: Any, output: Output) -> None:
    assert calls_in(rows_of(how, make, output)) == calls_in(rows_of("dynamic", make, output))


def test_one_warning_says_that_calls_are_independent(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    rows_of("graph", Siamese, output)
    said = [one for one in warnings_in(caplog) if "do not depend on each other" in one]
    assert said == ["[rank 0] " + INDEPENDENT.format(name="SequentialCell")]


@pytest.mark.parametrize("how", WHOLE)
def test_dependent_calls_have_the_numbers_of_the_dynamic_graph(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    found, expected = rows_of(how, Chain, output), rows_of("dynamic", Chain, output)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key]["norm"] == pytest.approx(values["norm"], rel=1e-5), key
    assert not [one for one in warnings_in(caplog) if "do not depend on each other" in one]
