"""Ways to train with DistributedDataParallel, each a step of the monitor's; ``data_parallel_ways.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from casewise import Case, each_in_a_step, numbers
from communicating import Attach, run
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

STEPS = 3
Told = dict[str, Any]
Steps = Callable[[Any, Any], list[Tensor]]
Built = Callable[[], Case]
"""Builds a model, and gives what trains it."""


class Network(nn.Module):
    """With buffers, and with a branch that not every batch goes through."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.branch = nn.Linear(width, width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(self.branch(hidden) if branch else hidden)


def built(width: int = 8, **options: Any) -> Any:
    torch.manual_seed(0)
    return DistributedDataParallel(Network(width), **options)


def batch(step: int) -> Tensor:
    return numbers(4, 4, salt=step)


def stepped(model: Any, optimizer: Any, step: int, *inputs: Any) -> Tensor:
    loss = model(batch(step), *inputs).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def plainly(model: Any, optimizer: Any) -> list[Tensor]:
    return [stepped(model, optimizer, step) for step in range(STEPS)]


def around_the_branch(model: Any, optimizer: Any) -> list[Tensor]:
    return [stepped(model, optimizer, step, step != 1) for step in range(STEPS)]


def accumulating(model: Any, optimizer: Any) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        for micro_step in range(2):
            with model.no_sync() if micro_step == 0 else nullcontext():
                loss = model(batch(2 * step + micro_step)).square().sum()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def unevenly(model: Any, optimizer: Any) -> list[Tensor]:
    with model.join():
        return [stepped(model, optimizer, step) for step in range(STEPS - dist.get_rank())]


def trained(model: Any, steps: Steps = plainly, optimizer: Any = None, counted: bool = True) -> Told:
    """Losses, weights and buffers, and how often torch's profiler saw a collective.

    Args:
        counted: Off where callbacks communicate, too, on threads of which the profiler sees what it happens to.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        losses = steps(model, optimizer)
    calls = sum(event.count for event in seen.key_averages() if event.key.startswith("c10d::"))
    return {"losses": losses, "state": model.state_dict(), "calls": calls if counted else None}


def with_options(steps: Steps = plainly, **options: Any) -> Built:
    def build() -> Case:
        return partial(trained, built(**options), steps)

    return build


def with_hook(state: Callable[[], Any], hook: Any, counted: bool = True) -> Built:
    def build() -> Case:
        model = built()
        model.register_comm_hook(state(), hook)
        return partial(trained, model, counted=counted)

    return build


def with_builtin_hook() -> Case:
    model = built()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return partial(trained, model)


def with_sharded_optimizer() -> Case:
    model = built()
    return partial(trained, model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def power() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1)


def gradients(**options: Any) -> Case:
    """One backward, and what the reducer has made of the gradients, which the loop then changes."""
    model = built(broadcast_buffers=False, **options)

    def case() -> Told:
        model(batch(0)).square().sum().backward()
        reduced = [p.grad.clone() for p in model.parameters()]
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return {"reduced": reduced, "clipped": [p.grad for p in model.parameters()]}

    return case


def summed() -> Case:
    """One backward with a hook of the user's, and what came back before it divided."""
    model, sums = built(broadcast_buffers=False), []

    def divide(future: Any) -> Tensor:
        sums.append(future.value()[0].clone())
        return future.value()[0].div_(dist.get_world_size())

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch takes no other types than its own
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(divide)

    model.register_comm_hook(None, hook)

    def case() -> Told:
        sums.clear()
        model(batch(0)).square().sum().backward()
        return {"reduced": sums, "grads": [p.grad for p in model.parameters()]}

    return case


WORLD: Callable[[], Any] = lambda: dist.group.WORLD  # noqa: E731
WAYS: dict[str, Built] = {
    "as it is": with_options(),
    "views of buckets": with_options(gradient_as_bucket_view=True),
    "static graph": with_options(static_graph=True),
    "unused parameters": with_options(around_the_branch, find_unused_parameters=True),
    "several buckets": with_options(width=300, bucket_cap_mb=0.1),
    "no buffers": with_options(broadcast_buffers=False),
    "accumulating": with_options(accumulating),
    "join": with_options(unevenly, broadcast_buffers=False),
    "fp16 hook": with_hook(WORLD, default_hooks.fp16_compress_hook),
    "all-reduce hook": with_hook(WORLD, default_hooks.allreduce_hook),
    "hook in a hook": with_hook(WORLD, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "PowerSGD": with_hook(power, powerSGD_hook.powerSGD_hook, counted=False),
    "hook below Python": with_builtin_hook,
    "sharded optimizer": with_sharded_optimizer,
}
VALUES: dict[str, Built] = {
    "gradients": gradients,
    "gradients in views": partial(gradients, gradient_as_bucket_view=True),
    "sums": summed,
}


def train(attach: Attach) -> dict[str, Any]:
    """No one records yet while the models are built."""
    return each_in_a_step(attach, {name: build() for name, build in (WAYS | VALUES).items()})


if __name__ == "__main__":
    run(train)
