"""Monitors that come and go while a program communicates, each with a directory of its own; ``several_monitors.py``.

Of what it does with monitors there is no unmonitored run to compare with: it tells what must be.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from casewise import numbers
from communicating import Attach, run
from framework_run import Attached
from torch import Tensor, nn

from monitor.pytorch import TrainerMon

BASE = os.environ["MONITOR_OUTPUT_DIR"]
OWNERS = (dist, dist.distributed_c10d, functional, dist.Work, dist.ProcessGroup, dist.ProcessGroupGloo, torch._C.Future)


class Loop:
    """A model that is trained by its own optimizer, and monitored to a directory of its own."""

    def __init__(self, name: str) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters())
        os.environ["MONITOR_OUTPUT_DIR"] = f"{BASE}/{name}"
        self.monitor = TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False)
        self.monitor.set_monitor(self.model, 1, self.optimizer)

    def begin(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def attributes() -> dict[tuple[str, str], Any]:
    return {(str(owner), name): value for owner in OWNERS for name, value in vars(owner).items()}


def summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def changed_since(before: dict[tuple[str, str], Any]) -> list[str]:
    after = attributes()
    return [str(key) for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]


def two_at_once() -> list[str]:
    """The second is made first to end, and the first continues."""
    before = attributes()
    first, second = Loop("first"), Loop("second")
    for step in range(2):
        first.begin()
        second.begin()
        summed(torch.full((3,), 1.0 + step))
        if step == 0:
            second.end()
            second.monitor.close()
        first.end()
    first.monitor.close()
    return changed_since(before)


def closed_under_way() -> dict[str, Any]:
    """Closed while calls of every kind are under way, which are then waited for."""
    loop, x, y = Loop("closed"), numbers(4), numbers(4, salt=1)
    expected = [summed(one.clone()).tolist() for one in (x, y)] + [summed(numbers(4, salt=2)).tolist()] * 2
    loop.begin()
    work, future = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True).get_future()
    z = functional.all_reduce(numbers(4, salt=2), "sum", dist.group.WORLD)
    raw = torch.ops._c10d_functional.all_reduce(numbers(4, salt=2), "sum", dist.group.WORLD.group_name)
    loop.monitor.close()
    work.wait()
    future.wait()
    torch.ops._c10d_functional.wait_tensor(raw)
    gone = weakref.ref(x)
    right = [one.tolist() for one in (x, y, z + 0, raw)] == expected
    del x, work
    summed(torch.ones(1))
    gc.collect()
    return {"right": right, "held": gone() is not None}


def raised_in_the_middle() -> list[Any]:
    before = attributes()
    loop = Loop("raised")
    told = ""
    try:
        with loop.monitor:
            loop.begin()
            work = dist.all_reduce(numbers(4), async_op=True)
            raise KeyError("of the user's")
    except KeyError as error:
        told = str(error)
    work.wait()
    return [told, changed_since(before)]


def patched_by_the_user() -> list[Any]:
    """Somebody patches what we patch, before and after us; theirs stays, and is called."""
    original, seen = dist.Work.wait, []
    plain = dist.all_reduce

    def wait(self: Any, *arguments: Any) -> Any:
        seen.append("wait")
        return original(self, *arguments)

    def all_reduce(*arguments: Any, **how: Any) -> Any:
        seen.append("all_reduce")
        return plain(*arguments, **how)

    dist.Work.wait = wait  # type: ignore[method-assign]
    loop = Loop("patched")
    dist.all_reduce = all_reduce
    loop.begin()
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    loop.end()
    loop.monitor.close()
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    theirs = dist.Work.wait is wait and dist.all_reduce is all_reduce
    dist.Work.wait, dist.all_reduce = original, plain  # type: ignore[method-assign]
    return [theirs, seen]


def patched_meanwhile() -> list[Any]:
    """Somebody patches above us, and takes that away again when we are gone."""
    loop, seen = Loop("meanwhile"), []
    ours = dist.Work.wait

    def wait(self: Any, *arguments: Any) -> Any:
        seen.append("wait")
        return ours(self, *arguments)

    dist.Work.wait = wait  # type: ignore[method-assign]
    loop.begin()
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    loop.end()
    loop.monitor.close()
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    dist.Work.wait = ours  # type: ignore[method-assign]
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True).wait()
    return [seen, x.tolist()]


def opened_and_closed_while_others_communicate() -> list[Any]:
    """One thread communicates all the time, another opens and closes monitors."""
    group, over, results = dist.new_group([0, 1]), threading.Event(), []

    def communicate() -> None:
        for call in range(150):
            x = torch.full((3,), float(call))
            if call % 2:
                dist.all_reduce(x, group=group)
            else:
                x = functional.all_reduce(x, "sum", group) + 0
            results.append(x.tolist() == [2.0 * call] * 3)
        over.set()

    thread = threading.Thread(target=communicate)
    thread.start()
    opened = 0
    while not over.is_set():
        Loop(f"opened/{opened % 3}").monitor.close()
        opened += 1
    thread.join()
    return [len(results), all(results), opened > 0]


def train(attach: Attach) -> dict[str, Any]:
    if not isinstance(attach, Attached):
        return {}
    parts = (
        two_at_once, closed_under_way, raised_in_the_middle, patched_by_the_user, patched_meanwhile,
        opened_and_closed_while_others_communicate,
    )  # fmt: skip
    return {part.__name__: part() for part in parts}


if __name__ == "__main__":
    run(train)
