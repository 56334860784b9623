"""Communication under what may stand between a call and the operators: modes, transforms, checkpoints and subclasses."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from casewise import Case, each_in_a_step, numbers
from communicating import Attach, run
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

PLACEMENTS: dict[str, Any] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate(), "sums": Partial()}


class Operators(TorchDispatchMode):
    """The names of all operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """The names of all functions, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def reduced(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def some_traffic() -> list[Tensor]:
    leaf = numbers(4).requires_grad_()
    reduced(leaf * 2).square().sum().backward()
    x = numbers(4)
    dist.all_reduce(x)
    large = numbers(6000)  # which is read where it lies
    work = dist.all_reduce(large, async_op=True)
    work.wait()
    return [x, large.sum(), leaf.grad.clone()]


def under(mode: Any) -> list[Any]:
    with mode() as watching:
        result = some_traffic()
    return [watching.seen, result]


def elsewhere() -> Any:
    with torch.device("meta"):  # where whatever is made meanwhile would lie
        x = numbers_of_the_host()
        dist.all_reduce(x, async_op=True).wait()
        dist.all_reduce(x)
        leaf = numbers_of_the_host().requires_grad_()
        reduced(leaf * 2).square().sum().backward()
    return [x, leaf.grad.clone()]


def numbers_of_the_host() -> Tensor:
    return torch.arange(4.0, device="cpu") + dist.get_rank()


def counted() -> Any:
    with CommDebugMode() as counting:
        result = some_traffic()
    return [{str(op): count for op, count in counting.get_comm_counts().items()}, result]


def checkpointed(reentrant: bool) -> list[Any]:
    leaf = numbers(4).requires_grad_()
    calls: Counter[str] = Counter()

    def segment(x: Tensor) -> Tensor:
        calls["segment"] += 1
        return reduced(x * 2).sin()

    checkpoint(segment, leaf, use_reentrant=reentrant).square().sum().backward()
    return [calls, leaf.grad.clone()]


def transformed(transform: str) -> Any:
    x = numbers(2, 3)
    if transform == "jvp":
        return torch.func.jvp(lambda one: reduced(one) * 2, (x,), (torch.ones(2, 3),))
    return torch.func.grad(lambda one: reduced(one * 2).square().sum())(x)


def fake() -> list[Any]:
    with FakeTensorMode():
        x = torch.empty(4)
        y = reduced(x)
        return [list(y.shape), list((y + 1).shape)]


def meta() -> list[Any]:
    x = torch.empty(4, device="meta")
    return [list((torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)).shape)]


def traced() -> str:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: reduced(x) + 1, tracing_mode="fake")(torch.ones(3)).code


class Scaled(torch.Tensor):
    """A subclass of the user's that is a tensor in all other ways."""


def subclassed() -> list[Any]:
    x = numbers(4).as_subclass(Scaled)
    dist.all_reduce(x)
    p = nn.Parameter(numbers(3))
    with torch.no_grad():
        dist.broadcast(p, 0)
    return [x, p, p.data]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def moved(source: str, target: str) -> list[Any]:
    """A distributed tensor placed anew, and the gradient that comes back from there."""
    local = numbers(4, 6).requires_grad_()
    before = DTensor.from_local(local * 2, mesh(), [PLACEMENTS[source]], run_check=False)
    after = before.redistribute(mesh(), [PLACEMENTS[target]])
    there = after.to_local()
    (there * numbers(*there.shape, salt=7)).square().sum().backward()
    return [str(after.placements), list(after.shape), there, local.grad]


def moved_without_gradients(mode: Any) -> list[Any]:
    with mode():
        before = DTensor.from_local(numbers(4, 6), mesh(), [Shard(0)], run_check=False)
        return [before.redistribute(mesh(), [target]).to_local() for target in (Replicate(), Shard(1))] + [before.full_tensor()]


def matched() -> list[Any]:
    """A product whose parts need communication, and both gradients."""
    left = distribute_tensor(torch.sin(torch.arange(24.0)).view(4, 6), mesh(), [Shard(1)]).requires_grad_()
    right = distribute_tensor(torch.cos(torch.arange(12.0)).view(6, 2), mesh(), [Shard(0)]).requires_grad_()
    product = (left @ right).redistribute(mesh(), [Replicate()]).to_local()
    product.square().sum().backward()
    return [product, left.grad.to_local(), right.grad.to_local()]


def exchanged_below() -> Tensor:
    """Issued and waited for in C++, by an operator of another namespace."""
    return torch.ops._dtensor.shard_dim_alltoall(numbers(2, 6), 0, 1, dist.group.WORLD.group_name)


MODES: dict[str, Case] = {
    "operators": partial(under, Operators),
    "functions": partial(under, Functions),
    "default device": elsewhere,
    "communication debugged": counted,
    "checkpoint": partial(checkpointed, False),
    "reentrant checkpoint": partial(checkpointed, True),
    "grad": partial(transformed, "grad"),
    "jvp": partial(transformed, "jvp"),
    "fake": fake,
    "meta": meta,
    "traced": traced,
    "subclassed": subclassed,
}
MOVES: dict[str, Case] = {
    f"{source} to {target}": partial(moved, source, target)
    for source in PLACEMENTS
    for target in PLACEMENTS
    if target not in (source, "sums")
}
DTENSORS: dict[str, Case] = MOVES | {
    "no_grad": partial(moved_without_gradients, torch.no_grad),
    "inference_mode": partial(moved_without_gradients, torch.inference_mode),
    "product": matched,
    "below": exchanged_below,
}


def train(attach: Attach) -> dict[str, Any]:
    mesh()
    return each_in_a_step(attach, MODES | DTENSORS)


if __name__ == "__main__":
    run(train)
