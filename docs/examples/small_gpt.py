"""What the examples share: a small GPT and real text, the source of a module of Python's standard library."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 256, 16, 32, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=hidden, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rows_of_text(count: int) -> Tensor:
    """So many rows of bytes, each one longer than the context; shape ``(count, CONTEXT + 1)``."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse), "utf-8"), dtype=torch.uint8).long()
    return text[: count * (CONTEXT + 1)].view(count, CONTEXT + 1)


def batches(rank: int, ranks: int, size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a rank without end: tokens and the tokens that follow them."""
    rows = rows_of_text(size * ranks * 16)
    while True:
        for batch in rows.split(size)[rank::ranks]:
            yield batch[:, :-1], batch[:, 1:]


def report(step: int, norm: float | Tensor) -> None:
    """Print the norm of all gradients, as the training framework computes it."""
    say(f"step {step} norm {float(norm):.9g}")


def report_weights(weights: Iterable[Tensor]) -> None:
    """Print every bit of the sum of all weights that are on this rank."""
    say(f"weights {sum(float(one.detach().double().sum()) for one in weights).hex()}")


def say(line: str) -> None:
    """Write a line in one piece: all ranks write to one place."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
