"""Results of functional collectives, waited for in all ways, and calls that outlive their step; ``functional_results.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from casewise import Case, each_in_a_step, numbers
from communicating import Attach, run
from torch import Tensor

Told = list[Any]
"""First the outputs as they came, then whatever else."""
WHOLE = torch.ops._c10d_functional


def expected(size: int) -> list[Tensor]:
    """What ``numbers(size)`` is on each rank, without communication."""
    return [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]


def gathered(size: int = 4) -> Tensor:
    return functional.all_gather_single(numbers(size), 0, dist.group.WORLD)


def part() -> Told:
    """The first to be waited for is a view."""
    whole = gathered()
    first = whole[:3]
    return [torch.cat(expected(4)), first + 0, whole + 0]


def parts() -> Told:
    left, right = gathered().chunk(2)
    return [torch.cat(expected(4)), right + 0, left + 0]


def viewed() -> Told:
    whole = gathered()
    return [torch.cat(expected(4)), whole.view(2, 4) + 0]


def raw_part() -> Told:
    whole = WHOLE.all_gather_into_tensor(numbers(4), 2, dist.group.WORLD.group_name)
    tail = WHOLE.wait_tensor(whole[5:])
    return [torch.cat(expected(4)), tail, whole]


def waited_for_twice() -> Told:
    whole = WHOLE.all_gather_into_tensor(numbers(4), 2, dist.group.WORLD.group_name)
    WHOLE.wait_tensor(whole)
    whole.fill_(9.0)
    return [torch.cat(expected(4)), WHOLE.wait_tensor(whole)]


def overwritten_at_once() -> Told:
    whole = gathered().wait()
    whole.fill_(9.0)
    return [torch.cat(expected(4)), whole]


def one_of_several() -> Told:
    """Two results of one call, of which one is waited for."""
    first, second = functional.all_reduce_coalesced([numbers(4), numbers(3)], "sum", dist.group.WORLD)
    found = first + 0
    return [[found, sum(expected(3))], second + 0]


def chained() -> Told:
    """The result of one is what the next one takes."""
    first = functional.all_reduce(numbers(4), "sum", dist.group.WORLD)
    second = functional.all_reduce(first, "sum", dist.group.WORLD)
    return [[sum(expected(4)), sum(expected(4)) * 2], second + 0]


def given_to_others() -> Told:
    """What no one has waited for is given to a call that is not functional."""
    x = functional.all_reduce(numbers(4), "sum", dist.group.WORLD)
    dist.all_reduce(x.wait())
    return [[sum(expected(4)), sum(expected(4)) * 2], x + 0]


def in_place() -> Told:
    x = numbers(4)
    WHOLE.wait_tensor(WHOLE.all_reduce_(x, "sum", dist.group.WORLD.group_name))
    return [sum(expected(4)), x]


def into() -> Told:
    out = torch.empty(8)
    name = dist.group.WORLD.group_name
    WHOLE.wait_tensor(WHOLE.all_gather_into_tensor_out(numbers(4), 2, name, out=out))
    return [torch.cat(expected(4)), out]


def begun() -> Told:
    UNDER_WAY[:] = [numbers(4)]
    UNDER_WAY.append(dist.all_reduce(UNDER_WAY[0], async_op=True))
    UNDER_WAY.append(functional.all_gather_single(numbers(4), 0, dist.group.WORLD))
    return []


def ended() -> Told:
    x, work, y = UNDER_WAY
    work.wait()
    return [x, y + 0]


UNDER_WAY: list[Any] = []
CASES: dict[str, Case] = {
    "part": part,
    "parts": parts,
    "viewed": viewed,
    "raw part": raw_part,
    "waited for twice": waited_for_twice,
    "overwritten at once": overwritten_at_once,
    "one of several": one_of_several,
    "chained": chained,
    "given to others": given_to_others,
    "in place": in_place,
    "into": into,
    "begun": begun,
    "ended": ended,
}


def train(attach: Attach) -> dict[str, Any]:
    return each_in_a_step(attach, CASES)


if __name__ == "__main__":
    run(train)
