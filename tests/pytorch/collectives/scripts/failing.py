"""Collectives that fail; ``failing.py``. Rank 0 calls alone. The first call runs into the limit of the group, and breaks it."""

from __future__ import annotations

import gc
import re
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from casewise import Case, each_in_a_step, numbers
from communicating import Attach, run
from torch import nn

PATIENCE = timedelta(milliseconds=400)
Call = Callable[[Any], Any]


def alone(call: Call, group: Any) -> Any:
    """What is raised on rank 0."""
    told = raised_by(partial(call, group)) if dist.get_rank() == 0 else None
    dist.barrier()
    return told


def raised_by(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        said, *_ = re.sub(r"send|recv|\w+\.cc:\d+", "…", str(error)).split("\n\nAt:")  # where is not the same in both runs
        return [type(error).__name__, said, type(error.__cause__).__name__, type(error.__context__).__name__]
    return []


def waited(group: Any) -> None:
    work = dist.all_reduce(numbers(4), group=group, async_op=True)
    work.wait()


def asked_afterwards(group: Any) -> None:
    work = dist.all_reduce(numbers(4), group=group, async_op=True)
    try:
        work.wait()
    except RuntimeError:
        assert work.is_completed()
        work.wait()


def future(group: Any) -> None:
    dist.all_reduce(numbers(4), group=group, async_op=True).get_future().wait()


def followed(group: Any) -> None:
    dist.all_reduce(numbers(4), group=group, async_op=True).get_future().then(lambda one: one.value()).wait()


def functionally(group: Any) -> None:
    functional.all_reduce(numbers(4), "sum", group) + 1


def backward_of(model: Any, _group: Any) -> None:
    model(torch.ones(1, 4)).sum().backward()


def held(group: Any) -> None:
    """Raises, if what a failed call was to fill lives on when nothing of the user's holds it."""
    x = numbers(4)
    gone = weakref.ref(x)
    with suppress(RuntimeError):
        dist.all_reduce(x, group=group)
    del x
    gc.collect()
    deadline = time.monotonic() + 2.0
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert gone() is None


def hook_that_raises() -> list[str]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch takes no other types than its own
        raise ValueError(f"of the user's, at bucket {bucket.index()}")

    model.register_comm_hook(None, hook)
    return raised_by(lambda: model(torch.ones(1, 2)).sum().backward())


def cases() -> dict[str, Case]:
    group = dist.new_group([0, 1], timeout=PATIENCE)
    calls: dict[str, Call] = {
        "call": lambda group: dist.all_reduce(numbers(4), group=group),
        "gather": lambda group: dist.all_gather([numbers(4), numbers(4)], numbers(4), group=group),
        "receive": lambda group: dist.recv(numbers(4), 1, group=group),
        "barrier": lambda group: dist.barrier(group=group),
        "object": lambda group: dist.all_gather_object([None, None], "object", group=group),
        "wait": waited,
        "wait twice": asked_afterwards,
        "future": future,
        "followed": followed,
        "functional": functionally,
        "held": held,
        "backward": partial(backward_of, nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=group)),
    }
    found: dict[str, Case] = {name: partial(alone, call, group) for name, call in calls.items()}
    found["hook"] = hook_that_raises
    found["afterwards"] = lambda: [dist.all_reduce(x := numbers(4)), x]
    return found


def train(attach: Attach) -> dict[str, Any]:
    return each_in_a_step(attach, cases())


if __name__ == "__main__":
    run(train)
