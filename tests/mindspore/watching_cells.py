"""What tests of the MindSpore room share: a monitor with a configuration given as keywords, and a network with a reference."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray
from reading_back import Output

Array = NDArray[np.float64]

PARAMETERS = ("a.weight", "a.bias", "b.weight", "b.bias")
OPS = {
    "min": np.min,
    "max": np.max,
    "mean": np.mean,
    "norm": np.linalg.norm,
    "std": np.std,
    "nans": lambda x: np.isnan(x).sum(),
    "zeros": lambda x: (np.abs(x) < 1e-8).mean(),
}


def written(output: Output, **config: Any) -> str:
    """The path of a configuration file, without the run's own numbers unless they are asked for."""
    config = {"run_numbers": False, **config}
    # A file of each process: ranks of one test share the directory.
    path = output.base.parent / f"config-{os.getpid()}-{len(list(output.base.parent.glob('config-*')))}.json"
    path.write_text(json.dumps(config))
    return str(path)


class TwoLayers(nn.Cell):
    """``b(relu(a(x)))``, with weights that are the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(4, 5)
        self.b = nn.Dense(5, 2)
        for name, parameter in self.parameters_and_names():
            parameter.set_data(Tensor(first_weights()[name]))
        self.set_train(True)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(ops.relu(self.a(x)))


def first_weights() -> dict[str, NDArray[np.float32]]:
    shapes = {"a.weight": (5, 4), "a.bias": (5,), "b.weight": (2, 5), "b.bias": (2,)}
    return {name: drawn(place, *shape) for place, (name, shape) in enumerate(shapes.items())}


def drawn(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def batch(step: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return drawn(100 + step, 6, 4), drawn(200 + step, 6, 2)


def arrays(cell: nn.Cell) -> dict[str, Array]:
    """The parameters as they are now, in float64."""
    return {name: parameter.asnumpy().astype(np.float64) for name, parameter in cell.parameters_and_names()}


class Reference:
    """The forward and backward of ``TwoLayers`` under the mean of squares, in float64."""

    def __init__(self, weights: Mapping[str, Array], x: Array, y: Array) -> None:
        x, y = x.astype(np.float64), y.astype(np.float64)
        first = x @ weights["a.weight"].T + weights["a.bias"]
        bent = np.maximum(first, 0)
        out = bent @ weights["b.weight"].T + weights["b.bias"]
        d_out = 2 * (out - y) / out.size
        d_bent = d_out @ weights["b.weight"]
        d_first = d_bent * (first > 0)
        self.loss = np.mean((out - y) ** 2)
        self.activations = {
            ".input": x, "a.input": x, "a.output": first, "b.input": bent, "b.output": out, ".output": out
        }  # fmt: skip
        self.activation_gradients = {
            "a.output": d_first, "b.input": d_bent, "b.output": d_out, ".output": d_out
        }  # fmt: skip
        self.gradients = {
            "a.weight": d_first.T @ x, "a.bias": d_first.sum(0), "b.weight": d_out.T @ bent, "b.bias": d_out.sum(0)
        }  # fmt: skip


def loss_of(net: nn.Cell) -> Any:
    return lambda x, y: ((net(x) - y) ** 2).mean()


def train(net: nn.Cell, optimizer: nn.Cell, steps: range = range(3), look: Any = None) -> list[bytes]:
    """The losses, and what ``look`` is to be told of before and after each step: ``look(step, "before" or "after")``."""
    gradients_of = ms.value_and_grad(loss_of(net), None, optimizer.parameters)
    losses = []
    for step in steps:
        if look is not None:
            look(step, "before")
        loss, gradients = gradients_of(*map(Tensor, batch(step)))
        optimizer(gradients)
        losses.append(loss.asnumpy().tobytes())
        if look is not None:
            look(step, "after")
    return losses


def assert_rows(output: Output, kind: str, expected: Mapping[tuple[str, int], Array], rel: float = 2e-6) -> None:
    """A kind has exactly these rows, ``{(name, step): what was measured}``, to float32's precision of a short computation."""
    rows = output.rows(kind)
    found = {(row.name, row.step): row.values for row in rows}
    assert len(found) == len(rows)
    assert sorted(found) == sorted(expected)
    for place, x in expected.items():
        scale = np.abs(x).max(initial=1e-30)
        for op, of in OPS.items():
            assert abs(found[place][op] - of(x)) <= rel * scale * max(1.0, x.size**0.5), (kind, place, op)
