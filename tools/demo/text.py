"""The demo's text: the sources of Python's standard library, a byte a token."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library(limit: int = 4_000_000) -> Tensor:
    """The first ``limit`` bytes of the standard library's sources, as int64 of shape ``(bytes,)``.

    Raises:
        SystemExit: This Python came without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for source in sorted(folder.glob("*.py")):
        text += source.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise SystemExit(f"No .py file in {folder}: this Python came without its sources. Run the demo with one that has them.")
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def random_batch(text: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``batch`` windows of ``length`` tokens and, for each token, the one that follows: both of shape ``(batch, length)``."""
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
    window = text[starts + torch.arange(length + 1)]
    return window[:, :-1], window[:, 1:]
