"""Randomness fixed, so that two runs can be compared."""

from __future__ import annotations

import os

import mindspore as ms
from mindspore import mint, nn

from monitor.dump.seeding import seed_python


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed every generator: of Python, numpy and MindSpore.

    Args:
        mode: Whether to have MindSpore compute deterministically, communication included. Slower.
        rm_dropout: Whether dropout cells that are made from now on drop nothing.

    Raises:
        ValueError: ``seed`` is no whole number from 0 to 2^32 - 1, which is as many as numpy takes.
    """
    seed_python(seed)
    ms.set_seed(seed)
    ms.manual_seed(seed)
    if mode:
        ms.set_context(deterministic="ON")
        os.environ["HCCL_DETERMINISTIC"] = "true"
    if rm_dropout:
        for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, mint.nn.Dropout):
            _let_nothing_drop(kind)


def _let_nothing_drop(kind: type[nn.Cell]) -> None:
    """From now on cells of a class are made with a probability of 0."""
    if getattr(kind.__init__, "drops_nothing", False):
        return
    original = kind.__init__

    def without(self: nn.Cell, *_: object, **__: object) -> None:
        original(self, p=0.0)

    without.drops_nothing = True  # type: ignore[attr-defined]
    kind.__init__ = without
