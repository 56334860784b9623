"""Megabytes that the peak of a process rises by when the spread of an attention over 8192 tokens is taken."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from monitor.pytorch.features.attention import Scores, spread, summed


def peak() -> int:
    """In KB. What ``getrusage`` tells begins with what the parent of this process held."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kilobytes)


torch.set_num_threads(1)
torch.manual_seed(0)
query, key = (torch.randn(2, heads, 8192, 64, dtype=torch.bfloat16) for heads in (8, 2))
short = Scores(query[:, :, :1], key[:, :, :1], True, 0.125)
spread(short)  # what the first products of a process need is no part of it
torch.bmm(torch.randn(1, 64, 64), torch.randn(1, 64, 64))
before = peak()
found = summed(spread(Scores(query, key, True, 0.125), heads=2))
assert found.queries == 2 * 8192
print((peak() - before) / 1024)
