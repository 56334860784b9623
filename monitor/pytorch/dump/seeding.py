"""Randomness fixed, so that two runs can be compared."""

from __future__ import annotations

import os

import torch
from torch import nn

from monitor.dump.seeding import seed_python


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed every generator: of Python, numpy and torch on all devices.

    Args:
        mode: Whether to have torch use deterministic algorithms alone. Slower, and an error where there is none.
        rm_dropout: Whether dropout modules that are made from now on drop nothing.

    Raises:
        ValueError: ``seed`` is no whole number from 0 to 2^32 - 1, which is as many as numpy takes.
    """
    seed_python(seed)
    torch.manual_seed(seed)
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if rm_dropout:
        _let_nothing_drop()


def _let_nothing_drop() -> None:
    """From now on modules are made with a probability of 0, which is written into their ``p``."""
    base = nn.modules.dropout._DropoutNd
    if getattr(base.__init__, "drops_nothing", False):
        return
    original = base.__init__

    def without(self: nn.modules.dropout._DropoutNd, p: float = 0.5, inplace: bool = False) -> None:
        original(self, p, inplace)
        self.p = 0.0

    without.drops_nothing = True  # type: ignore[attr-defined]
    base.__init__ = without  # type: ignore[method-assign]
