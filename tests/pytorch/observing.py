"""What tests of activations share: models of every shape, one observed step, and the numbers that its rows must hold."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from watching import Output, Row, attached

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "demo"))

from gpt import GPT, GPTConfig

OPS = ("min", "max", "mean", "norm", "zeros", "nans", "infs", "std")
ACTIVATIONS: dict[str, Any] = {"xy_distribution": True, "all_xy": True, "ops": [*OPS], "ndigits": 17}

Numbers = dict[tuple[str, str], float]
"""``{(name, op): value}``."""


class Observed:
    """The rows of one recording.

    Attributes:
        directory: Where they stand.
    """

    def __init__(self, output: Output, directory: Path) -> None:
        self.directory = directory
        self._output = output

    def rows(self, kind: str) -> list[Row]:
        return self._output.rows(kind, self.directory)

    def names(self, kind: str) -> list[str]:
        return [row.name for row in self.rows(kind)]

    def places(self, kind: str) -> list[tuple[str, int | None]]:
        return [(row.name, row.micro_step) for row in self.rows(kind)]

    def norms(self, kind: str) -> dict[str, float]:
        found = {row.name: row.values["norm"] for row in self.rows(kind)}
        assert len(found) == len(self.rows(kind))
        return found

    def numbers(self, kind: str) -> Numbers:
        return {(row.name, op): value for row in self.rows(kind) for op, value in row.values.items() if value is not None}


def observed(output: Output, model: nn.Module, run: Callable[[], object], **config: Any) -> Observed:
    """One step in which ``run`` does forward and backward. Weights stay as they are."""
    optimizer = torch.optim.SGD([*model.parameters()] or [nn.Parameter(torch.zeros(1))], lr=0.0)
    before = set(output.directories())
    with attached(output, model, optimizer, **{**ACTIVATIONS, **config}):
        run()
        optimizer.step()
    (directory,) = set(output.directories()) - before
    return Observed(output, directory)


def statistics(name: str, x: Tensor) -> Numbers:
    """What the rows of ``x`` hold, by definition."""
    wide = x.detach().to(torch.float64).flatten()
    found = {
        "min": wide.min(),
        "max": wide.max(),
        "mean": wide.mean(),
        "norm": wide.norm(),
        "zeros": (wide.abs() < 1e-8).double().mean(),
        "nans": wide.isnan().sum(),
        "infs": wide.isinf().sum(),
        "std": wide.std(correction=0),
    }
    return {(name, op): value.item() for op, value in found.items()}


def backward(result: Tensor) -> None:
    """Whose gradients differ from element to element."""
    (result * torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)).square().sum().backward()


class Witness:
    """Something that lives as long as the node it is fastened to."""

    @classmethod
    def of(cls, result: Tensor) -> weakref.ref[Witness]:
        return weakref.ref(result.grad_fn.metadata.setdefault("witness", cls()))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers, the same on every device."""
    numbers = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return build().to(dtype)


class Residual(nn.Module):
    """x + f(norm(x)), the block of most language models."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class SelfAttention(nn.Module):
    """One input that three modules consume, and chunks of a projection."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, dim=-1)
        return torch.softmax(self.q(x) @ k.transpose(-1, -2), dim=-1) @ v * torch.sigmoid(self.gate(x))


class BertBlock(nn.Module):
    """norm(x + attn(x)) and norm(x + mlp(x)): observing it through identities in the graph changes its bits."""

    def __init__(self, width: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = SelfAttention(width)
        self.attn_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout))
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn_norm(x + self.attn(x))
        return self.mlp_norm(x + self.mlp(x))


class Twice(nn.Module):
    """One module, called twice, on two different inputs."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))


def small_gpt(layers: int = 2) -> GPT:
    return GPT(GPTConfig(vocabulary=16, context=8, layers=layers, heads=2, width=8))


def tokens(batch: int = 2) -> Tensor:
    return torch.arange(8 * batch).view(batch, 8) % 16
