"""Small models, each with something that a compiler may treat in a way of its own."""

from __future__ import annotations

from typing import Any

import torch
from evidence import examples
from observing import Residual
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class InPlace(nn.Module):
    """Changes what it is given, and adds it to what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.activation = nn.ReLU(inplace=True)
        self.layers = nn.ModuleList([Residual(), Residual()])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.last(x)
        return y


class OneLayer(InPlace):
    """Half as long to compile."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[1]


class NoLayer(InPlace):
    """Of which inductor makes few kernels: each takes a C++ compiler more than a second."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[:]


class Structured(nn.Module):
    """Takes tuples, keywords and a tensor twice, and returns a dictionary with what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.same = nn.Identity()

    def forward(self, x: Tensor, pair: tuple[Tensor, int], *, scale: Tensor) -> dict[str, Any]:
        y = self.linear(x) * scale + pair[0]
        return {"sum": self.same(y.tanh()), "rest": (y, x, None)}


class Shared(nn.Module):
    """Calls one module several times, and others with structures."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList([Structured(), Structured()])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.norm(x) + x)
        for layer in self.layers:
            found = layer(x, (x, 1), scale=x)
            x = self.norm(found["sum"] + found["rest"][1])
        y: Tensor = self.last(x)
        return y


class Checkpointed(InPlace):
    """Computes its layers once more in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        y: Tensor = self.last(x)
        return y


class Interrupted(InPlace):
    """Has a place in it that cannot be compiled."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.last(x)
        return y


class AroundTorchsOwn(nn.Module):
    """Cannot be compiled, and calls modules of torch, which can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))

    @torch._dynamo.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Fork(nn.Module):
    """Uses what it is given several times, and looks at whether that is what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, told: dict[str, list[Tensor]]) -> Tensor:
        if told["here"][0] is not x:
            raise ValueError("something else was given")
        y: Tensor = self.one(x) * self.other(x).tanh() + self.third(x)
        return y


class Forked(nn.Module):
    """Whose layers are not alone in using what they are given: sums of gradients are long, and their order shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Fork() for _ in range(3)])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.1
        for layer in self.layers:
            x = x + layer(x, {"here": [x]}) + x.square() * 0.01
        y: Tensor = self.last(x)
        return y


class Encoder(nn.Module):
    """A layer of the model's own: torch compiles none of its own by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encode(x)
        return y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Encoder() for _ in range(examples(1, 2))])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.last(x)
        return y
