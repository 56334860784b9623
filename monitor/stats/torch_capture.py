"""Whether the current stream is being captured: what is called then goes into a graph of the device, and runs when it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def capturing(device: torch.device) -> bool:
    """Whether what is launched on ``device`` now is not run, but captured to be run again and again without us."""
    return device.type != "cpu" and _question(device.type)()


@cache
def _question(kind: str) -> Callable[[], bool]:
    """What the backend of a kind of device answers; one that cannot be asked captures nothing."""
    return getattr(getattr(torch, kind, None), "is_current_stream_capturing", _no)


def _no() -> bool:
    return False
