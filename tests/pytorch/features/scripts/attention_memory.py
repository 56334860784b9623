"""Megabytes that the peak of a process rises by when the spread of an attention over 8192 tokens is taken; ``flex`` as argument
gives it the functions of a FlexAttention.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from monitor.pytorch.features.attention import Modification, Scores, spread, summed


def peak() -> int:
    """In KB. What ``getrusage`` tells begins with what the parent of this process held."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kilobytes)


torch.set_num_threads(1)
torch.manual_seed(0)
query, key = (torch.randn(2, heads, 8192, 64, dtype=torch.bfloat16) for heads in (8, 2))
how = Modification(lambda s, _b, _h, i, j: s + (i - j), lambda _b, _h, i, j: i >= j) if "flex" in sys.argv else None
causal = how is None
short = Scores(query[:, :, :1], key[:, :, :1], causal, 0.125, modification=how)
spread(short)  # what the first products of a process need is no part of it
torch.bmm(torch.randn(1, 64, 64), torch.randn(1, 64, 64))
before = peak()
found = summed(spread(Scores(query, key, causal, 0.125, modification=how), heads=2))
assert found.queries == 2 * 8192
print((peak() - before) / 1024)
