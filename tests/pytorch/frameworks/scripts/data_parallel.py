"""DistributedDataParallel; ``data_parallel.py HOW``, one of those the test lists."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, norm_of, run
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

HOW = sys.argv[1]
MICRO_STEPS = 2 if HOW in ("no-sync", "no-sync-views", "synced", "synced-views", "no-sync-reentrant", "one-backward") else 1
STEPS = 3
LIMITS = {"clipped": 1e-3, "not-bound": 1e9}
OPTIONS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "no-sync-views": {"gradient_as_bucket_view": True},
    "synced-views": {"gradient_as_bucket_view": True},
    "own-hook": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "one-rank": {"find_unused_parameters": True},
}


class Network(nn.Module):
    """Of its layers one is called by no rank, or by rank 1 alone, where ``HOW`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.spare = nn.Linear(16, 16) if HOW in ("unused", "one-rank") else None
        self.segments = nn.ModuleList(nn.Linear(16, 16) for _ in range(2 if "reentrant" in HOW else 0))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) if HOW == "linear" else torch.tanh(self.first(x))
        if HOW == "one-rank" and dist.get_rank() == 1:
            assert self.spare is not None
            hidden = self.spare(hidden)
        if self.segments:
            # The backward of the first segment has no parameter of its own, and another backward within it.
            hidden = checkpoint(checkpoint, self.segments[0], hidden, use_reentrant=True)
            hidden = checkpoint(self.segments[1], hidden, use_reentrant=True)
        return self.last(hidden)


def average(group, bucket):  # annotations as text are refused
    """A communication hook as users write them, which divides in place what it was given."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


def wrapped() -> DistributedDataParallel:
    network = Network()
    if HOW == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["first.bias"])
    if HOW == "delayed":
        later = [("last.bias", network.last.bias)]
        OPTIONS[HOW] = {"delay_all_reduce_named_params": later, "param_to_hook_all_reduce": network.first.weight}
    model = DistributedDataParallel(network, **OPTIONS.get(HOW, {}))
    if HOW == "fp16-hook":
        model.register_comm_hook(None, fp16_compress_hook)
    elif HOW == "own-hook":
        model.register_comm_hook(dist.group.WORLD, average)
    return model.train(HOW != "evaluation-mode")


def loss_of(model: nn.Module) -> Tensor:
    if HOW != "linear":
        return model(torch.randn(4, 8)).square().sum()
    # The gradients of the ranks are multiples of each other, and so is every statistic that is no count.
    return (1 + dist.get_rank()) * model(torch.arange(32.0).reshape(4, 8)).mean()


def backward(model: DistributedDataParallel) -> Tensor:
    """Of all micro-batches; the last one's loss."""
    if HOW == "one-backward":
        loss = loss_of(model) + loss_of(model)
        loss.backward()
        return loss
    for micro_step in range(MICRO_STEPS):
        with nullcontext() if micro_step == MICRO_STEPS - 1 or HOW.startswith("synced") else model.no_sync():
            loss = loss_of(model)
            loss.backward()
    if HOW == "delayed":
        dist.barrier()  # which waits for the reduction that the wrapper only begins: the optimizer may read before it ends
    return loss


def train(attach: Attach) -> Any:
    torch.manual_seed(0)
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach(model, optimizer, MICRO_STEPS, dp_group=None if HOW == "no-group" else dist.group.WORLD)
    torch.manual_seed(1 + dist.get_rank())
    told: dict[str, list[Any]] = {name: [] for name in ("losses", "gradients", "ignored", "before", "after", "moments")}
    for _ in range(STEPS):
        told["before"].append(norm_of(model.parameters()))
        told["losses"].append(backward(model).item().hex())
        told["gradients"].append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        told["ignored"].append(norm_of([model.module.first.bias.grad]))
        if HOW in LIMITS:
            nn.utils.clip_grad_norm_(model.parameters(), LIMITS[HOW])
        optimizer.step()
        optimizer.zero_grad()
        told["after"].append(norm_of(model.parameters()))
        told["moments"].append([norm_of(s[name] for s in optimizer.state.values()) for name in ("exp_avg", "exp_avg_sq")])
    return told


run(train)
