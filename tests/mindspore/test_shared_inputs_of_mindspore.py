"""Gradients of inputs that a cell gives back, or is given in several places: no row holds what is not its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import attached
from mindspore import Tensor, nn
from reading_back import Output

CONFIG: dict[str, Any] = {"xy_distribution": True, "all_xy": True, "ops": ["max"], "ndigits": 15}


class Passing(nn.Cell):
    """Uses ``b`` three times over, and gives it back."""

    def construct(self, x: Tensor, b: Tensor) -> Any:
        return x + 3 * b, b


class Bag:
    """An object of no class that the monitor knows."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Hiding(nn.Cell):
    """Uses ``b`` once for what it returns as a tensor, and three times for what it returns in a bag."""

    def construct(self, x: Tensor, b: Tensor) -> Any:
        return x + b, Bag(3 * b), ms.float32


def taken_out(inner: nn.Cell, x: Tensor, b: Tensor) -> Tensor:
    y, bag, _ = inner(x, b)
    return y + bag.y


class Around(nn.Cell):
    def __init__(self, inner: nn.Cell) -> None:
        super().__init__()
        self.inner = inner

    def construct(self, x: Tensor, b: Tensor) -> Any:
        return self.inner(x, b)


class Weighs(nn.Cell):
    """Two of the first and half of the second."""

    def construct(self, a: Tensor, b: Tensor) -> Tensor:
        return 2 * a + 0.5 * b


class Model(nn.Cell):
    """Uses what it makes beside ``inner``, before and after."""

    def __init__(self, inner: nn.Cell, give: Callable[[nn.Cell, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.inner, self.give = nn.Dense(4, 4), inner, give
        self.set_train(True)

    def construct(self, x: Tensor) -> Tensor:
        b = self.make(x)
        before = 10 * b.sum()
        return self.give(self.inner, x, b).sum() + before + 100 * b.sum()


def pair(inner: nn.Cell, x: Tensor, b: Tensor) -> Tensor:
    return inner(x, b)[0]


CASES: dict[str, tuple[nn.Cell, Callable[[nn.Cell, Tensor, Tensor], Tensor], dict[str, float]]] = {
    "given back": (Passing(), pair, {"inner.input_1": 3.0}),
    "given back within": (Around(Passing()), pair, {"inner.input_1": 3.0, "inner.inner.input_1": 3.0}),
    "in an object": (Hiding(), taken_out, {"inner.input_1": 4.0}),
    "broadcast": (Passing(), lambda f, x, b: f(x, b[0])[0], {"inner.input_1": 9.0}),
    "nothing else": (nn.Identity(), lambda f, _, b: 2 * f(b), {}),
    "given twice": (Weighs(), lambda f, _, b: f(b, b), {"inner.input_0+1": 2.5}),
    "a view of it": (Weighs(), lambda f, _, b: f(b, b.view(3, 4)), {"inner.input_0": 2.0, "inner.input_1": 0.5}),
}


def step(model: nn.Cell) -> tuple[Any, Any]:
    x = Tensor(np.sin(np.arange(12) * 1.7).reshape(3, 4).astype(np.float32))
    return ms.value_and_grad(model, None, model.trainable_params())(x)


@pytest.mark.parametrize("case", CASES)
def test_a_row_holds_what_the_cell_hands_back_and_nothing_else(case: str, output: Output) -> None:
    inner, give, expected = CASES[case]
    model = Model(inner, give)
    optimizer = nn.SGD(model.trainable_params(), 0.1)
    with attached(output, model, optimizer, **CONFIG):
        _, gradients = step(model)
        optimizer(gradients)
    found = {row.name: row.values["max"] for row in output.rows("actv_grad") if ".input" in row.name}
    assert {name: value for name, value in found.items() if name.startswith("inner")} == expected
