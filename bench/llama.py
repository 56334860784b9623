"""A small Llama, whose parts are modules of their own, so that each has rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, HIDDEN, WORDS, LAYERS = 64, 4, 96, 64, 4


class Rotary(nn.Module):
    """Rotates queries and keys by their positions. ``dtype`` is that of the angles' sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.stretch, self.dtype = 10_000.0, 1.0, torch.float64

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(q)
        cos, sin = (part.to(self.dtype).to(q.dtype) for part in (angles.cos(), angles.sin()))
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    def angles(self, q: Tensor) -> Tensor:
        """For each position and each pair of columns: ``[positions, columns / 2]``, in float64."""
        return torch.outer(self.stretch * torch.arange(q.shape[-2], dtype=torch.float64), self.rates(q))

    def rates(self, q: Tensor) -> Tensor:
        """Of each pair of columns, the angle from one position to the next: ``[columns / 2]``, in float64."""
        half = q.shape[-1] // 2
        return self.base ** -(torch.arange(half, dtype=torch.float64) / half)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.chunk(2, -1)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1)


class Attention(nn.Module):
    """Causal attention. Under tensor parallelism a rank has some of the heads.

    ``mask`` says which keys a query sees (``[queries, keys]``, True where it does), instead of all before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.rotary, self.causal, self.scale = Rotary(), True, (WIDTH // HEADS) ** -0.5
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self.rotary(q, k)
        causal = self.causal and self.mask is None
        found = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=causal, scale=self.scale)
        mixed: Tensor = self.o(found.transpose(1, 2).flatten(2))
        return mixed


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.act, self.down = nn.SiLU(), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return gated


class Layer(nn.Module):
    """``kept`` is the weight of the residual around the attention, ``skipped`` leaves the whole layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH, eps=1e-5), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH, eps=1e-5), Gated()
        self.kept, self.skipped = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        if self.skipped:
            return x * 1.0
        x = self.kept * x + self.attention(self.attention_norm(x))
        whole: Tensor = x + self.mlp(self.mlp_norm(x))
        return whole


class Llama(nn.Module):
    """The whole model, or a stage of it: then some layers, perhaps without ``embed``, or without ``norm`` and ``head``."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers: nn.ModuleList | nn.ModuleDict = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head: nn.Linear | None = nn.Linear(WIDTH, WORDS, bias=False)
        with torch.no_grad():
            self.embed.weight.mul_(0.1)
            if tied:
                self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))
