"""Gradients through communication, and communication where there are none; ``gradients.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as of_nn
from casewise import Case, each_in_a_step, numbers
from communicating import Attach, run
from torch import Tensor

WORLD: Any = None  # the default group has no name before it is made
WHOLE = torch.ops._c10d_functional
OLD = torch.ops._c10d_functional_autograd


def through(call: Callable[..., Any], *sizes: int | tuple[int, ...], again: bool = False) -> Case:
    """The result of ``call`` on tensors that require gradients, and the gradients of what follows from it.

    Args:
        again: The gradients of the gradients, too.
    """

    def case() -> list[Any]:
        leaves = [numbers(*(size if isinstance(size, tuple) else (size,)), salt=salt) for salt, size in enumerate(sizes)]
        leaves = [one.requires_grad_() for one in leaves]
        inputs = [one * 2 for one in leaves]
        result = call(*inputs)
        outputs = [*result] if isinstance(result, (list, tuple)) else [result]
        seen = [type(one).__name__ for one in outputs], [one.requires_grad for one in outputs]
        losses = [(one * numbers(*one.shape, salt=50 + salt)).square().sum() for salt, one in enumerate(outputs)]
        grads: Sequence[Any] = torch.autograd.grad(sum(losses), leaves, create_graph=again, allow_unused=True)
        if again:
            grads = [*grads, *torch.autograd.grad(sum(one.square().sum() for one in grads), leaves)]
        return [seen, leaves, inputs, outputs, list(grads)]

    return case


def waited(overload: Any, *arguments: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: WHOLE.wait_tensor(overload(x, *arguments, dist.group.WORLD.group_name))


def grouped(call: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return lambda *xs: call(*xs, *arguments, dist.group.WORLD)


def listed(call: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return lambda *xs: call([*xs], *arguments, dist.group.WORLD)


def permuted(x: Tensor) -> Tensor:
    return functional.permute_tensor(x, [1, 0], dist.group.WORLD)


FUNCTIONAL: dict[str, Case] = {
    "all_reduce": through(grouped(functional.all_reduce, "sum"), 5),
    "all_reduce, twice": through(grouped(functional.all_reduce, "sum"), 5, again=True),
    "all_reduce of the largest": through(grouped(functional.all_reduce, "max"), 5),
    "broadcast": through(grouped(functional.broadcast, 0), 5),
    "all_gather_single": through(grouped(functional.all_gather_single, 0), 5),
    "all_gather_single, twice": through(grouped(functional.all_gather_single, 0), 5, again=True),
    "all_gather_single along rows": through(grouped(functional.all_gather_single, 1), (2, 3)),
    "all_gather_single_autograd": through(grouped(functional.all_gather_single_autograd, 0), 5),
    "all_gather_tensor_autograd": through(grouped(functional.all_gather_tensor_autograd, 0), 5),
    "reduce_scatter_single": through(grouped(functional.reduce_scatter_single, "sum", 0), 4),
    "reduce_scatter_single along rows": through(grouped(functional.reduce_scatter_single, "sum", 1), (2, 6)),
    "reduce_scatter_single_autograd": through(grouped(functional.reduce_scatter_single_autograd, "sum", 0), 4),
    "reduce_scatter_tensor_autograd": through(grouped(functional.reduce_scatter_tensor_autograd, "sum", 0), 4),
    "all_to_all_single": through(grouped(functional.all_to_all_single, None, None), 4),
    "all_to_all_single_autograd": through(grouped(functional.all_to_all_single_autograd, [2, 2], [2, 2]), 4),
    "permute_tensor": through(permuted, 4),
    "all_reduce_coalesced": through(listed(functional.all_reduce_coalesced, "sum"), 3, 5),
    "all_gather_single_coalesced": through(listed(functional.all_gather_single_coalesced), 3, 5),
    "reduce_scatter_single_coalesced": through(listed(functional.reduce_scatter_single_coalesced, "sum", [0, 0]), 4, 2),
    "operator all_reduce": through(waited(WHOLE.all_reduce, "sum"), 5),
    "operator all_gather_into_tensor": through(waited(WHOLE.all_gather_into_tensor, 2), 5),
    "operator reduce_scatter_tensor": through(waited(WHOLE.reduce_scatter_tensor, "sum", 2), 4),
    "operator all_to_all_single": through(waited(WHOLE.all_to_all_single, [2, 2], [2, 2]), 4),
    "old operator all_gather_into_tensor": through(waited(OLD.all_gather_into_tensor, 2), 5),
    "old operator reduce_scatter_tensor": through(waited(OLD.reduce_scatter_tensor, "sum", 2), 4),
    "old operator all_to_all_single": through(waited(OLD.all_to_all_single, [2, 2], [2, 2]), 4),
}

OF_NN: dict[str, Case] = {
    "nn broadcast": through(lambda x: of_nn.broadcast(x, 0), 5),
    "nn gather": through(lambda x: of_nn.gather(x, 1), 5),
    "nn scatter": through(lambda *xs: of_nn.scatter([*xs], 1), 5, 5),
    "nn reduce": through(lambda x: of_nn.reduce(x, 1), 5),
    "nn reduce_scatter": through(lambda *xs: of_nn.reduce_scatter(torch.empty(5), [*xs]), 5, 5),
    "nn all_gather": through(of_nn.all_gather, 5),
    "nn _all_gather_base": through(lambda x: of_nn._all_gather_base(torch.empty(10), x), 5),
    "nn all_to_all": through(lambda *xs: of_nn.all_to_all([torch.empty(5), torch.empty(5)], [*xs]), 5, 5),
    "nn all_to_all_single": through(lambda x: of_nn.all_to_all_single(torch.empty(4), x), 4),
    "nn all_reduce": through(of_nn.all_reduce, 5),
}


def in_place(call: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        call(x)
        return x

    return changed


def of_a_leaf() -> list[Tensor]:
    leaf = numbers(5).requires_grad_()
    dist.all_reduce(leaf)
    leaf.square().sum().backward()
    return [leaf, leaf.grad.clone()]


def of_a_view() -> list[Tensor]:
    leaf = numbers(3, 4).requires_grad_()
    whole = leaf * 2
    dist.all_reduce(whole[1])
    whole.square().sum().backward()
    return [leaf, whole, leaf.grad.clone()]


def gathered_views() -> list[Tensor]:
    leaf = numbers(4).requires_grad_()
    whole = torch.zeros(2, 4)
    dist.all_gather([whole[0], whole[1]], leaf * 2)
    return [leaf, whole]


def hooked() -> list[Any]:
    """The order of what the user has asked to be told of."""
    order: list[str] = []
    leaf = numbers(4).requires_grad_()
    x = leaf * 2
    x.register_hook(lambda _: order.append("x"))
    y = functional.all_reduce(x, "sum", dist.group.WORLD) * 3
    y.register_hook(lambda _: order.append("y"))
    leaf.register_post_accumulate_grad_hook(lambda _: order.append("leaf"))
    y.sum().backward()
    return [order, leaf.grad]


IN_PLACE: dict[str, Case] = {
    "plain all_reduce": through(in_place(dist.all_reduce), 5),
    "plain all_reduce, waited for": through(in_place(lambda x: dist.all_reduce(x, async_op=True).wait()), 5),
    "plain broadcast": through(in_place(lambda x: dist.broadcast(x, 0)), 5),
    "plain all_reduce of a leaf": of_a_leaf,
    "plain all_reduce of a view": of_a_view,
    "plain all_gather into views": gathered_views,
    "hooks of the user's": hooked,
}


def without_gradients(mode: Callable[[], Any]) -> list[Any]:
    leaf = numbers(4).requires_grad_()
    with mode():
        x = leaf * 2
        work = dist.all_reduce(x, async_op=True)
        ended = work.wait()
        y = functional.all_gather_single(leaf * 3, 0, dist.group.WORLD)
        z = functional.reduce_scatter_single(numbers(4), "sum", 0, dist.group.WORLD) + 1
        parts = [torch.zeros(4), torch.zeros(4)]
        dist.all_gather(parts, x)
        return [ended, leaf, x, y + 0, z, parts]


WITHOUT: dict[str, Case] = {
    "no_grad": partial(without_gradients, torch.no_grad),
    "inference_mode": partial(without_gradients, torch.inference_mode),
    "multithreading off": partial(without_gradients, lambda: torch.autograd.set_multithreading_enabled(False)),
    "saved tensors packed": partial(
        without_gradients, lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)
    ),
}


def train(attach: Attach) -> dict[str, Any]:
    return each_in_a_step(attach, FUNCTIONAL | OF_NN | IN_PLACE | WITHOUT)


if __name__ == "__main__":
    run(train)
