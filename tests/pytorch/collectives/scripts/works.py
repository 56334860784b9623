"""Ways to issue a call and to wait for it, or not to; ``works.py``. Each case tells what its calls moved, and what is left."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from casewise import Case, each_in_a_step, numbers
from communicating import Attach, run
from torch import Tensor

Told = list[Any]
"""First the outputs as they came, then whatever else."""


def begun(x: Tensor) -> Any:
    return dist.all_reduce(x, async_op=True)


def sum_of_all() -> Tensor:
    """What ``numbers(4)`` comes to, computed without communication."""
    made = [torch.randn(4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    return made[0] + made[1]


def waited_for_twice() -> Told:
    x = numbers(4)
    work = begun(x)
    first = work.wait()
    copy = x.clone()
    x.fill_(9.0)
    return [copy, first, work.wait(), x]


def overwritten_at_once() -> Told:
    x = numbers(4)
    begun(x).wait()
    x.fill_(77.0)
    return [sum_of_all(), x]


def waited_for_with_a_limit() -> Told:
    x = numbers(4)
    return [x, begun(x).wait(timedelta(seconds=60))]


def future_waited_for_twice() -> Told:
    x = numbers(4)
    future = begun(x).get_future()
    found = future.wait()
    x.fill_(9.0)
    return [sum_of_all(), len(found), future.wait()[0] is not None, x]


def work_and_future() -> Told:
    x = numbers(4)
    work = begun(x)
    future = work.get_future()
    work.wait()
    x.mul_(5)
    future.wait()
    return [sum_of_all(), x, future.done()]


def changed_by_what_follows() -> Told:
    x = numbers(4)
    changed = begun(x).get_future().then(lambda one: one.value()[0].mul_(3))
    result = changed.wait()
    return [sum_of_all(), result, x]


def changed_twice() -> Told:
    x = numbers(4)
    changed = begun(x).get_future().then(lambda one: one.value()[0].mul_(3)).then(lambda one: one.value().add_(1))
    return [sum_of_all(), changed.wait()]


def changed_by_a_callback() -> Told:
    x, told = numbers(4), threading.Event()
    work = begun(x)

    def change(future: Any) -> None:
        future.value()[0].add_(1)
        told.set()

    work.get_future().add_done_callback(change)
    work.wait()
    told.wait()
    return [sum_of_all(), x]


def futures_together() -> Told:
    xs = [numbers(4, salt=salt) for salt in range(2)]
    torch.futures.collect_all([begun(x).get_future() for x in xs]).wait()
    return [xs]


def failing_callback() -> Told:
    x = numbers(4)

    def fail(_: Any) -> None:
        raise ValueError("of the user's")

    failed = begun(x).get_future().then(fail)
    try:
        failed.wait()
    except (RuntimeError, ValueError) as error:  # as torch has it, by which thread has called it
        return [sum_of_all(), "of the user's" in str(error)]
    return [sum_of_all(), "nothing was raised"]


def polled() -> Told:
    x = numbers(4)
    work = begun(x)
    while not work.is_completed():
        time.sleep(0)
    return [x, work.is_success()]


def in_reverse() -> Told:
    xs = [numbers(4, salt=salt) for salt in range(5)]
    works = [begun(x) for x in xs]
    for work in reversed(works):
        work.wait()
    return [xs]


def waited_for_elsewhere() -> Told:
    x = numbers(4)
    thread = threading.Thread(target=begun(x).wait)
    thread.start()
    thread.join()
    return [x]


def on_threads_of_their_own() -> Told:
    """A group each: collectives of one group must be issued in the same order everywhere."""
    xs = [[numbers(4, salt=10 * group + call) for call in range(20)] for group in range(2)]

    def issue(group: Any, mine: list[Tensor]) -> None:
        for x in mine:
            dist.all_reduce(x, group=group)

    threads = [threading.Thread(target=issue, args=one) for one in zip(GROUPS, xs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [[x for mine in xs for x in mine]]


def by_method(call: Callable[[Any, Tensor], Any]) -> Case:
    def case() -> Told:
        x = numbers(4)
        work = call(dist.group.WORLD, x)
        return [x, type(work).__name__, work.wait(), work.is_completed()]

    return case


def gathered_by_method(nested: bool) -> Told:
    x, outs, group = numbers(4), [torch.zeros(4), torch.zeros(4)], dist.group.WORLD
    work = group.allgather([outs], [x]) if nested else group.allgather(outs, x)  # type: ignore[union-attr]
    work.wait()
    return [outs]


class Scaling(dist.ProcessGroup):
    """A process group in Python, as libraries for fault tolerance have them: it has no one to talk to."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allreduce(self, tensors: Any, _opts: Any = None) -> Any:
        tensors[0].mul_(2)
        return Done(tensors)


class Done(dist.Work):
    """A Work in Python."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.tensors = tensors
        self.waits = 0

    def wait(self, _timeout: Any = None) -> bool:
        self.waits += 1
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self.tensors)
        return future


def in_python() -> Told:
    x = numbers(4)
    work = Scaling().allreduce([x])
    return [x, work.wait(), work.waits, len(work.get_future().wait()), type(work).__name__]


def released() -> Told:
    """Whether what was moved is released with the last name that the program has for it."""
    x = numbers(4)
    gone = weakref.ref(x)
    dist.all_reduce(x)
    del x
    deadline = time.monotonic() + 2.0
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    return [sum_of_all(), gone() is None]


CASES: dict[str, Case] = {
    "waited for twice": waited_for_twice,
    "overwritten at once": overwritten_at_once,
    "waited for with a limit": waited_for_with_a_limit,
    "future waited for twice": future_waited_for_twice,
    "work and future": work_and_future,
    "changed by what follows": changed_by_what_follows,
    "changed twice": changed_twice,
    "changed by a callback": changed_by_a_callback,
    "futures together": futures_together,
    "failing callback": failing_callback,
    "in reverse": in_reverse,
    "waited for elsewhere": waited_for_elsewhere,
    "on threads of their own": on_threads_of_their_own,
    "method of a list": by_method(lambda group, x: group.allreduce([x])),
    "method of a tensor": by_method(lambda group, x: group.allreduce(x)),
    "method with an operator": by_method(lambda group, x: group.allreduce([x], op=dist.ReduceOp.MAX)),
    "method with options": by_method(lambda group, x: group.allreduce(tensors=[x], opts=dist.AllreduceOptions())),
    "method of the class": by_method(lambda group, x: dist.ProcessGroup.allreduce(group, [x])),
    "method from a root": by_method(lambda group, x: group.broadcast(x, root=0)),
    "method of nested lists": lambda: gathered_by_method(True),
    "method of plain lists": lambda: gathered_by_method(False),
    "released": released,
    "polled": polled,
    "below the dispatcher": by_method(lambda group, x: group._get_backend(torch.device("cpu")).allreduce([x])),
    "in Python": in_python,
}
GROUPS: list[Any] = []


def train(attach: Attach) -> dict[str, Any]:
    GROUPS[:] = [dist.new_group([0, 1]) for _ in range(2)]
    return each_in_a_step(attach, CASES)


if __name__ == "__main__":
    run(train)
