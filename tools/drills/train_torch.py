"""The training of a drill in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from spec import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """What a fault of training does to a forward is in ``during``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.during: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.during is not None:
            self.during(x)
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


class TorchTraining:
    """Its steps depend on their number only, and on the weights."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self._job = job
        if job.world > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port), RANK=str(job.rank), WORLD_SIZE=str(job.world))
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 4))
        self.model: nn.Module = self.blocks if job.world == 1 or job.apart else DistributedDataParallel(self.blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self._called: Callable[[Tensor], Tensor] | None = None

    def step(self, step: int) -> str:
        if self._called is None:  # after the monitor was attached
            self._called = torch.compile(self.model, backend="aot_eager") if self._job.compiled else self.model
        random = torch.Generator().manual_seed(1 + step * self._job.world + self._job.rank)
        loss = self._called(torch.randn(4, 8, generator=random)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item().hex()

    def compile_again(self) -> None:
        """The monitor was attached: what was compiled before has none of its operators."""
        self._called = None
        torch.compiler.reset()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()

    def forward_only(self) -> None:
        """What a forked process may do."""
        with torch.no_grad():
            self.blocks(torch.ones(4, 8))

    def in_forward(self, call: Callable[[], None] | None) -> None:
        """Call ``call`` in the middle of each forward from now on."""
        self.blocks[1].during = None if call is None else lambda _: call()

    def in_backward(self, call: Callable[[], None] | None) -> None:
        """Call ``call`` in the middle of each backward from now on."""

        def during(x: Tensor) -> None:
            if call is not None and x.requires_grad:
                x.register_hook(lambda _: call())

        self.blocks[1].during = None if call is None else during

    def end(self) -> None:
        if self._job.world > 1 and not self._job.apart:
            dist.destroy_process_group()
