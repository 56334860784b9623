"""Networks of MindSpore that are dumped, and how their dumps are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from monitor.mindspore import PrecisionDebugger


class Convolutional(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, has_bias=True, pad_mode="valid")
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(4, 2, 3, pad_mode="valid")
        self.fc = nn.Dense(32, 3)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(self.conv2(self.relu(self.conv1(x))).reshape(2, -1))


class Block(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((width,))
        self.qkv = nn.Dense(width, 3 * width)
        self.out = nn.Dense(width, width)

    def construct(self, x: Tensor) -> Tensor:
        q, k, v = ops.chunk(self.qkv(self.norm(x)), 3, axis=-1)
        return x + self.out(ops.softmax(ops.matmul(q, ops.transpose(k, (0, 2, 1)))) @ v)


class Transformer(nn.Cell):
    def __init__(self, width: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.CellList([Block(width) for _ in range(2)])
        self.head = nn.Dense(width, vocabulary)

    def construct(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def input_of(network: nn.Cell) -> Tensor:
    if isinstance(network, Convolutional):
        return Tensor(np.sin(np.arange(2 * 3 * 8 * 8) * 1.7).reshape(2, 3, 8, 8).astype(np.float32))
    return Tensor(np.arange(12).reshape(2, 6) % 11, ms.int32)


def seeded(kind: type[nn.Cell]) -> nn.Cell:
    network = kind()
    random = np.random.default_rng(0)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32) * 0.3))
    return network.set_train(True)


def gradients_of(network: nn.Cell) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, and the gradients of all parameters."""
    x = input_of(network)

    def loss(x: Tensor) -> Tensor:
        return (network(x) ** 2).sum()

    return ms.value_and_grad(loss, None, network.trainable_params())(x)


class Dump:
    """What a rank's step holds."""

    def __init__(self, base: Path, step: int = 0, name: str = "dump.json") -> None:
        (self.directory,) = (base / f"step{step}").iterdir()
        self.whole: dict[str, Any] = json.loads((self.directory / name).read_text())
        self.data: dict[str, Any] = self.whole["data"]

    def read(self, name: str) -> Any:
        return json.loads((self.directory / name).read_text())

    def tensor(self, leaf: dict[str, Any]) -> np.ndarray:
        return np.load(self.directory / "dump_tensor_data" / leaf["data_name"])


@contextmanager
def dumping(base: Path, model: Any = None, **arguments: Any) -> Iterator[PrecisionDebugger]:
    """One step."""
    debugger = PrecisionDebugger(dump_path=base, **arguments)
    debugger.start(model)
    yield debugger
    debugger.stop()
    debugger.step()
    debugger.close()


def described(x: Tensor) -> dict[str, Any]:
    """What a dump says of ``x``, by hand."""
    wide = x.asnumpy().astype(np.float64)
    numbers = {"Max": wide.max(), "Min": wide.min(), "Mean": wide.mean(), "Norm": np.sqrt((wide * wide).sum())}
    told = {"type": "mindspore.Tensor", "dtype": str(x.dtype), "shape": list(x.shape)}
    return {**told, **{key: float(number) for key, number in numbers.items()}}


def same(told: Any, expected: Any) -> bool:
    """Equal, sums as close as they can be computed."""
    if isinstance(expected, dict):
        return isinstance(told, dict) and list(told) == list(expected) and all(same(told[key], expected[key]) for key in told)
    if isinstance(expected, list):
        return isinstance(told, list) and len(told) == len(expected) and all(map(same, told, expected))
    if isinstance(expected, float):
        return bool(np.isclose(told, expected, rtol=1e-6, atol=1e-9))
    return told == expected
