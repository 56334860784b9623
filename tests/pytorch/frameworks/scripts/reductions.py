"""Two data-parallel ranks that reduce their gradients in one way after the other; ``reductions.py HOW...``, of those below.

Of each way a rank tells the norms in float64 of the means of what the ranks had when backward ended, by step and parameter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from framework_run import Attach, run
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS = 2
WRAPPED = ("wrapped", "wrapped-inside", "no-sync", "noop", "wrapped-in-the-end", "called-inside", "stepped-by-hooks")
LOCAL_SGD = {"before-local": 100, "local": 0}
"""Ways of torch's local SGD, and the step from which on gradients are local."""
SEVERAL_MICRO_STEPS = ("micro-steps", "early", "wrapped-in-the-end", "hooked-twice")


class ReducesInside(torch.optim.SGD):
    """As optimizers that share out their work do."""

    def step(self, closure: Any = None) -> Any:
        for p in parameters_of(self):
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad.div_(dist.get_world_size())
        return super().step(closure)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def nothing(_model: nn.Module) -> None:
    pass


def one_by_one(model: nn.Module) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


def behind_the_version(model: nn.Module) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad.data)
        p.grad.data /= dist.get_world_size()


def awaited(model: nn.Module) -> None:
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients(model)]
    for work in works:
        work.wait()
    torch._foreach_div_(gradients(model), dist.get_world_size())


def by_futures(model: nn.Module) -> None:
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients(model)]
    for work in works:
        work.get_future().wait()
    torch._foreach_div_(gradients(model), dist.get_world_size())


def coalesced(model: nn.Module) -> None:
    with dist._coalescing_manager():
        for gradient in gradients(model):
            dist.all_reduce(gradient)
    torch._foreach_div_(gradients(model), dist.get_world_size())


def flat(model: nn.Module) -> None:
    bucket = _flatten_dense_tensors(gradients(model))
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    for gradient, reduced in zip(gradients(model), _unflatten_dense_tensors(bucket, gradients(model)), strict=True):
        gradient.copy_(reduced)


def flat_at_once(model: nn.Module) -> None:
    bucket = torch.cat([gradient.reshape(-1) for gradient in gradients(model)]).double()
    dist.all_reduce(bucket)
    mean = (bucket / dist.get_world_size()).float()
    parts = mean.split([gradient.numel() for gradient in gradients(model)])
    torch._foreach_copy_(gradients(model), [part.view_as(g) for part, g in zip(parts, gradients(model), strict=True)])


def views(model: nn.Module) -> None:
    bucket, start = _flatten_dense_tensors(gradients(model)), 0
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    for p in model.parameters():
        p.grad = bucket[start : start + p.numel()].view_as(p)
        start += p.numel()


def in_slices(model: nn.Module) -> None:
    bucket, start = torch.zeros(sum(p.numel() for p in model.parameters())), 0
    for gradient in gradients(model):
        bucket[start : start + gradient.numel()] = gradient.flatten()
        start += gradient.numel()
    dist.all_reduce(bucket)
    start = 0
    for gradient in gradients(model):
        gradient[...] = bucket[start : start + gradient.numel()].view_as(gradient) / dist.get_world_size()
        start += gradient.numel()


def under_a_device(model: nn.Module) -> None:
    with torch.device("cpu"):
        flat(model)
    with torch.device("cpu"):
        torch.zeros(1)


def with_a_default_device(model: nn.Module) -> None:
    torch.set_default_device("cpu")
    flat(model)
    torch.set_default_device(None)


def scattered(model: nn.Module) -> None:
    bucket = _flatten_dense_tensors(gradients(model))
    bucket = torch.cat([bucket, torch.zeros(-len(bucket) % dist.get_world_size())])
    part = torch.empty(len(bucket) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, bucket)
    dist.all_gather_into_tensor(bucket, part / dist.get_world_size())
    sizes = [gradient.numel() for gradient in gradients(model)]
    for gradient, reduced in zip(gradients(model), bucket[: sum(sizes)].split(sizes), strict=True):
        gradient.copy_(reduced.view_as(gradient))


def functionally(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.copy_(functional.all_reduce(p.grad, "sum", dist.group.WORLD) / dist.get_world_size())


def over_a_part(group: Any, model: nn.Module) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient, group=group)


def greatest(model: nn.Module) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient, op=dist.ReduceOp.MAX)


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def loss_alone(model: nn.Module) -> None:
    """The mean of a scalar, and gradients changed by it: none is reduced."""
    loss = torch.full((), 2.0)
    dist.all_reduce(loss)
    clipped(model)
    for gradient in gradients(model):
        gradient.mul_(loss)
        gradient.copy_(gradient * loss)


def some(model: nn.Module) -> None:
    dist.all_reduce(model[0].weight.grad)
    model[0].weight.grad.div_(dist.get_world_size())


def zeroed_and_added(model: nn.Module) -> None:
    """What was reduced is written back, and thrown away."""
    local = [gradient.clone() for gradient in gradients(model)]
    flat(model)
    torch._foreach_zero_(gradients(model))
    torch._foreach_add_(gradients(model), local)


def averaged_by_hooks(model: nn.Module) -> Callable[[], None]:
    works: list[Any] = []

    def reduce(p: Tensor) -> None:
        HELD.append(p.grad.double())
        p.grad.div_(dist.get_world_size())
        works.append(dist.all_reduce(p.grad, async_op=True))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(reduce)

    def wait() -> None:
        while works:
            works.pop().wait()

    return wait


def hooked(model: nn.Module) -> None:
    """Hooks that change a gradient in place before it is accumulated."""

    def reduce(gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())

    for p in model.parameters():
        p.register_hook(reduce)


def hooked_by_another(model: nn.Module) -> None:
    """Hooks that give another gradient, summed in two parts by collectives that Python waits for."""

    def reduce(gradient: Tensor) -> Tensor:
        parts = [part.contiguous() for part in gradient.double().reshape(-1).chunk(2)]
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            work.wait()
        return (torch.cat(parts) / dist.get_world_size()).float().view_as(gradient)

    for p in model.parameters():
        p.register_hook(reduce)


def hooked_functionally(model: nn.Module) -> None:
    for p in model.parameters():
        p.register_hook(lambda gradient: functional.all_reduce(gradient, "avg", dist.group.WORLD) * 1.0)


class SumsGradients(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.div_(dist.get_world_size())


class SummedInBackward(nn.Linear):
    """A layer whose weights go through a function that sums their gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, SumsGradients.apply(self.weight), SumsGradients.apply(self.bias))


def masked_then_summed(model: nn.Module) -> None:
    """Hooks that mask gradients, and others that sum what was accumulated."""
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient * (gradient > 0))

        def reduce(p: Tensor) -> None:
            HELD.append(p.grad.double())
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())

        p.register_post_accumulate_grad_hook(reduce)


def hooked_over(group: Any, model: nn.Module) -> None:
    """What a group sums up that shares no data-parallel batch, as tensor-parallel ranks do."""
    for p in model.parameters():
        p.register_hook(lambda gradient: dist.all_reduce(gradient, group=group))


def stepped_by_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer steps in the hook of the parameter that is reached last."""
    reached: list[Tensor] = []

    def step(p: Tensor) -> None:
        reached.append(p)
        if len(reached) == len(list(model.parameters())):
            reached.clear()
            optimizer.step()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


BETWEEN = {
    "one-by-one": one_by_one,
    "no-group": one_by_one,
    "micro-steps": one_by_one,
    "behind-the-version": behind_the_version,
    "awaited": awaited,
    "futures": by_futures,
    "coalesced": coalesced,
    "flat": flat,
    "flat-at-once": flat_at_once,
    "views": views,
    "in-slices": in_slices,
    "under-a-device": under_a_device,
    "default-device": with_a_default_device,
    "elsewhere": flat,
    "scattered": scattered,
    "functionally": functionally,
    "greatest": greatest,
    "clipped": clipped,
    "loss-alone": loss_alone,
    "some": some,
    "zeroed": zeroed_and_added,
}
HOOKED = {
    "hooked": hooked,
    "hooked-twice": hooked,
    "hooked-by-another": hooked_by_another,
    "hooked-functionally": hooked_functionally,
    "masked": masked_then_summed,
}
HELD: list[Tensor] = []
ELSEWHERE = ThreadPoolExecutor(1)


def whole_mean(local: list[Tensor]) -> list[float]:
    """The norms of the means over all ranks, in float64, by a way that the monitor does not look at."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [x.tolist() for x in local])
    return [float(torch.tensor(one, dtype=torch.float64).mean(0).norm()) for one in zip(*every, strict=True)]


def wrapped(how: str, model: nn.Module) -> nn.Module:
    if how not in (*WRAPPED, *LOCAL_SGD):
        return model
    made = DistributedDataParallel(model)
    if how in LOCAL_SGD:
        state = PostLocalSGDState(None, None, LOCAL_SGD[how], post_local_gradient_allreduce=False)
        made.register_comm_hook(state, post_localSGD_hook)
    if how == "noop":
        made.register_comm_hook(None, noop_hook)
    return made


def train(attach: Attach) -> Any:
    return {how: trained(how, attach) for how in sys.argv[1:]}


def trained(how: str, attach: Attach) -> Any:
    os.environ["MONITOR_OUTPUT_DIR"] = f"{BASE}/{how}"
    torch.manual_seed(0)
    layer = SummedInBackward if how == "summed-in-backward" else nn.Linear
    inner = nn.Sequential(layer(8, 16), nn.Tanh(), layer(16, 4))
    model, micro_steps = wrapped(how, inner), 2 if how in SEVERAL_MICRO_STEPS else 1
    optimizer = (ReducesInside if how == "inside" else torch.optim.SGD)(inner.parameters(), lr=0.01)
    wait = averaged_by_hooks(inner) if how == "hooks" else lambda: None
    HOOKED.get(how, nothing)(inner)
    alone = dist.new_subgroups(1)[0]
    if how == "hooked-alone":
        hooked_over(alone, inner)
    group = {"alone": alone, "no-group": None}.get(how, dist.group.WORLD)
    attach(inner if how == "wrapped-inside" else model, optimizer, micro_steps, dp_group=group)
    if how == "stepped-by-hooks":
        stepped_by_hooks(inner, optimizer)
    torch.manual_seed(1 + dist.get_rank())
    reduce = partial(over_a_part, alone) if how == "over-a-part" else BETWEEN.get(how, nothing)
    told: dict[str, Any] = {"means": [], "names": [name for name, _ in inner.named_parameters()], "weights": [], "local": []}
    for _ in range(STEPS):
        HELD.clear()
        for micro_step in range(micro_steps):
            quiet = how == "no-sync" or (how == "wrapped-in-the-end" and micro_step == 0)
            with model.no_sync() if quiet else nullcontext():
                (inner if how == "called-inside" else model)(torch.randn(4, 8)).square().sum().backward()
            if how == "early" and micro_step == 0:
                one_by_one(inner)
        local = HELD[::-1] if how in ("hooks", "masked") else [gradient.double() for gradient in gradients(inner)]
        told["means"].append(whole_mean(local))
        told["local"].append([float(x.norm()) for x in local])
        reduce(inner)
        wait()
        if how == "stepped-by-hooks":
            pass
        elif how == "elsewhere":
            ELSEWHERE.submit(optimizer.step).result()
        else:
            optimizer.step()
        told["modes"] = torch._C._len_torch_function_stack() > 1
        optimizer.zero_grad(set_to_none=how != "micro-steps")
        told["weights"].append([float(p.detach().double().norm()).hex() for p in inner.parameters()])
    return told


BASE = os.environ["MONITOR_OUTPUT_DIR"]
run(train)
