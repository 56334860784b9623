"""Every operator of gloo, a step each, with what goes in and what comes out as plain numbers; ``every_operator.py HOW``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from communicating import Attach, run
from torch import Tensor, nn

ASYNC = sys.argv[1] == "async"
Case = tuple[list[Tensor], list[Tensor]]
"""What went in, copied before, and what came out."""


def numbers(size: int = 4, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * salt + dist.get_rank())
    return torch.randn(size, generator=generator)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [one.clone() for one in tensors]


def done(work: Any) -> None:
    if ASYNC:
        work.wait()


def in_place(call: Callable[..., Any], **how: Any) -> Case:
    x = numbers()
    before = copies([x])
    done(call(x, async_op=ASYNC, **how))
    return before, [x]


def broadcast() -> Case:
    before, after = in_place(dist.broadcast, src=0)
    return (before if dist.get_rank() == 0 else []), after


def reduce() -> Case:
    before, after = in_place(dist.reduce, dst=1)
    return before, (after if dist.get_rank() == 1 else [])


def all_reduce_coalesced() -> Case:
    xs = [numbers(3, 1), numbers(5, 2)]
    before = copies(xs)
    done(dist.all_reduce_coalesced(xs, async_op=ASYNC))
    return before, xs


def all_gather() -> Case:
    x, out = numbers(), [torch.empty(4), torch.empty(4)]
    done(dist.all_gather(out, x, async_op=ASYNC))
    return [x], out


def all_gather_into_tensor() -> Case:
    x, out = numbers(), torch.empty(8)
    done(dist.all_gather_into_tensor(out, x, async_op=ASYNC))
    return [x], [out]


def all_gather_coalesced() -> Case:
    xs = [numbers(3, 1), numbers(5, 2)]
    out = [[torch.empty(3), torch.empty(5)] for _ in range(2)]
    done(dist.all_gather_coalesced(out, xs, async_op=ASYNC))
    return xs, [one for row in out for one in row]


def reduce_scatter() -> Case:
    xs, out = [numbers(3, 1), numbers(3, 2)], torch.empty(3)
    done(dist.reduce_scatter(out, xs, async_op=ASYNC))
    return xs, [out]


def reduce_scatter_tensor() -> Case:
    x, out = numbers(6), torch.empty(3)
    done(dist.reduce_scatter_tensor(out, x, async_op=ASYNC))
    return [x], [out]


def all_to_all() -> Case:
    xs, out = [numbers(2, 1), numbers(2, 2)], [torch.empty(2), torch.empty(2)]
    done(dist.all_to_all(out, xs, async_op=ASYNC))
    return xs, out


def all_to_all_single() -> Case:
    x, out = numbers(), torch.empty(4)
    done(dist.all_to_all_single(out, x, async_op=ASYNC))
    return [x], [out]


def gather() -> Case:
    x, mine = numbers(), dist.get_rank() == 1
    out = [torch.empty(4), torch.empty(4)] if mine else []
    done(dist.gather(x, out or None, dst=1, async_op=ASYNC))
    return [x], out


def scatter() -> Case:
    out, mine = torch.empty(4), dist.get_rank() == 1
    xs = [numbers(4, 1), numbers(4, 2)] if mine else []
    done(dist.scatter(out, xs or None, src=1, async_op=ASYNC))
    return xs, [out]


def send() -> Case:
    x = numbers()
    if dist.get_rank() == 1:
        done(dist.isend(x, 0) if ASYNC else dist.send(x, 0))
        return [x], []
    done(dist.irecv(x, 1) if ASYNC else dist.recv(x, 1))
    return [], [x]


def batch_isend_irecv() -> Case:
    x, out, other = numbers(), torch.empty(4), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, out, other)]):
        work.wait()
    return [x], [out]


def barrier() -> Case:
    done(dist.barrier(async_op=ASYNC))
    return [], []


def future() -> Case:
    x = numbers()
    before = copies([x])
    dist.all_reduce(x, async_op=True).get_future().wait()
    return before, [x]


def functional_case(call: Callable[..., Tensor], *arguments: Any, size: int = 4) -> Case:
    x = numbers(size)
    out = call(x, *arguments, dist.group.WORLD)
    return [x], [out + 0]


def functional_broadcast() -> Case:
    before, after = functional_case(functional.broadcast, 0)
    return (before if dist.get_rank() == 0 else []), after


CASES: dict[str, Callable[[], Case]] = {
    "all_reduce": lambda: in_place(dist.all_reduce),
    "broadcast": broadcast,
    "reduce": reduce,
    "all_reduce_coalesced": all_reduce_coalesced,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_coalesced": all_gather_coalesced,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "gather": gather,
    "scatter": scatter,
    "send": send,
    "batch_isend_irecv": batch_isend_irecv,
    "barrier": barrier,
    "future": future,
    "functional all_reduce": lambda: functional_case(functional.all_reduce, "sum"),
    "functional broadcast": functional_broadcast,
    "functional all_gather_into_tensor": lambda: functional_case(functional.all_gather_tensor, 0),
    "functional reduce_scatter_tensor": lambda: functional_case(functional.reduce_scatter_tensor, "sum", 0),
    "functional all_to_all_single": lambda: functional_case(functional.all_to_all_single, [2, 2], [2, 2]),
}


def train(attach: Attach) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    attach(model, optimizer)
    told: dict[str, Any] = {}
    for name, case in CASES.items():
        model(torch.ones(1, 2)).sum().backward()
        try:
            inputs, outputs = case()
            told[name] = [[one.tolist() for one in inputs], [one.tolist() for one in outputs]]
            for one in outputs:
                one.fill_(77.0)  # a later read sees something else
        except RuntimeError as error:
            told[name] = str(error)[:200]
        optimizer.step()
        optimizer.zero_grad()
    return told


run(train)
