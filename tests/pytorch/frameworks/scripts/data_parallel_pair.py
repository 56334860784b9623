"""Two parts in DistributedDataParallel, and two micro-batches; ``data_parallel_pair.py HOW``: ``synced`` or ``no-sync``, which
reduces once, with ``-alone`` if the module around them is not called. With ``-shared`` each part is called twice in reentrant
segments, so that nested backwards add to each gradient, in a single micro-batch.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

HOW = sys.argv[1]
STEPS = 3
MICRO_STEPS = 1 if "shared" in HOW else 2


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if "shared" not in HOW:
            return super().forward(x).tanh()
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=True).tanh()
        return x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = DistributedDataParallel(Layer(4, 4), static_graph="shared" in HOW)
        self.other = DistributedDataParallel(Layer(4, 4), static_graph="shared" in HOW)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


def train(attach: Attach) -> Any:
    torch.manual_seed(0)
    pair = Pair()
    optimizer = torch.optim.AdamW(pair.parameters(), lr=0.01)
    attach(pair, optimizer, MICRO_STEPS, dp_group=dist.group.WORLD)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            with ExitStack() as apart:
                if "no-sync" in HOW and micro_step == 0:
                    apart.enter_context(pair.one.no_sync())
                    apart.enter_context(pair.other.no_sync())
                x = torch.randn(6, 4, requires_grad=True)
                result = pair.other(pair.one(x)) if "alone" in HOW else pair(x)
                loss = result.square().sum()
                loss.backward()
                losses.append(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses


run(train)
