"""Networks that are dumped, and how their dumps are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monitor.pytorch import PrecisionDebugger


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(4, 2, 3, bias=False)
        self.fc = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv2(self.relu(self.conv1(x))).flatten(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + scale * self.out(nn.functional.dropout(attended, 0.1, self.training))


class Transformer(nn.Module):
    def __init__(self, width: int = 8, layers: int = 2, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def images() -> Tensor:
    return torch.sin(torch.arange(2 * 3 * 8 * 8) * 1.7).view(2, 3, 8, 8)


def tokens() -> Tensor:
    return torch.arange(12).view(2, 6) % 11


def loss_of(network: nn.Module) -> Tensor:
    """A loss of the network's own kind of input."""
    if isinstance(network, Convolutional):
        return nn.functional.cross_entropy(network(images()), torch.tensor([0, 2]))
    return nn.functional.cross_entropy(network(tokens()).flatten(0, 1), tokens().flatten())


class Dump:
    """What a rank's step holds.

    Attributes:
        data: Of ``dump.json``, or of ``debug.json``.
    """

    def __init__(self, base: Path, step: int = 0, name: str = "dump.json") -> None:
        (self.directory,) = (base / f"step{step}").iterdir()
        self.whole: dict[str, Any] = json.loads((self.directory / name).read_text())
        self.data: dict[str, Any] = self.whole["data"]

    @property
    def construct(self) -> dict[str, Any]:
        return json.loads((self.directory / "construct.json").read_text())

    @property
    def stack(self) -> dict[str, Any]:
        return json.loads((self.directory / "stack.json").read_text())

    def tensor(self, leaf: dict[str, Any]) -> np.ndarray:
        return np.load(self.directory / "dump_tensor_data" / leaf["data_name"])


@contextmanager
def dumping(base: Path, model: Any = None, **arguments: Any):
    """One step."""
    debugger = PrecisionDebugger(dump_path=base, **arguments)
    debugger.start(model)
    yield debugger
    debugger.stop()
    debugger.step()
    debugger.close()


def described(x: Tensor) -> dict[str, Any]:
    """What a dump says of ``x``, by hand."""
    wide = x.detach().double()
    numbers = {"Max": wide.max(), "Min": wide.min(), "Mean": wide.mean(), "Norm": wide.norm()}
    told = {"type": "torch.Tensor", "dtype": str(x.dtype), "shape": list(x.shape)}
    return {**told, **{key: number.item() for key, number in numbers.items()}, "requires_grad": x.requires_grad}


def same(told: Any, expected: Any) -> bool:
    """Equal, sums as close as they can be computed."""
    if isinstance(expected, dict):
        return isinstance(told, dict) and list(told) == list(expected) and all(same(told[key], expected[key]) for key in told)
    if isinstance(expected, list):
        return isinstance(told, list) and len(told) == len(expected) and all(map(same, told, expected))
    if isinstance(expected, float):
        return bool(np.isclose(told, expected, rtol=2e-6, atol=1e-8))
    return told == expected
