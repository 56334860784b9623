"""Groups of every kind: of some ranks, in another order, of backends in Python, and under what the loop has set up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as saved
from casewise import Case, each_in_a_step, numbers
from communicating import Attach, run
from torch import nn

Told = list[Any]
"""First the outputs as they came, then whatever else."""
GROUPS: dict[str, Any] = {}


class Finished(dist.Work):
    """A Work in Python."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.tensors = tensors
        self.asked: list[str] = []

    def wait(self, _timeout: Any = None) -> bool:
        self.asked.append("wait")
        return True

    def get_future(self) -> Any:
        self.asked.append("future")
        future: Any = torch.futures.Future()
        future.set_result(self.tensors)
        return future


class Lonely(dist.ProcessGroup):
    """A process group in Python, as libraries for fault tolerance have them; it has no one to talk to, and doubles."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.works: list[Finished] = []

    def finished(self, tensors: Any) -> Finished:
        self.works.append(Finished(tensors))
        return self.works[-1]

    def allgather(self, outputs: Any, inputs: Any, _options: Any = None) -> Finished:
        for places, x in zip(outputs, inputs, strict=True):
            for place in places:
                place.copy_(x)
        return self.finished(outputs)

    def allreduce(self, tensors: Any, _options: Any = None) -> Finished:
        for x in tensors:
            x.mul_(2)
        return self.finished(tensors)

    def broadcast(self, tensors: Any, _options: Any = None) -> Finished:
        return self.finished(tensors)


def in_python() -> Told:
    group, x = GROUPS["lonely"], numbers(4)
    dist.all_reduce(x, group=group)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    return [x, type(work).__name__, work.asked]


def reduced_in_python() -> Told:
    """A reducer above a group in Python."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), process_group=GROUPS["lonely"])
    model(numbers(2, 3)).square().sum().backward()
    return [[p.grad for p in model.parameters()], len(GROUPS["lonely"].works) > 0]


class Named(dist.ProcessGroup):
    """Has a name of its own, and leaves everything else to the backend below."""

    def getBackendName(self) -> str:  # noqa: N802
        return "named"


class Nothing(dist.Work):
    """Has nothing of its own."""


def named() -> Told:
    """Calls that torch looks up in the class of the group, where it finds nothing but what it has put there itself."""
    with TemporaryDirectory() as own:
        store = dist.FileStore(f"{own}/met", 1)
        group = Named(0, 1)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, 0, 1))
        group._set_group_name("named")
        x = numbers(4)
        group.allreduce([x]).wait()
        group.broadcast([x]).wait()
        group.allgather([[torch.zeros(4)]], [x]).wait()
        group.barrier().wait()
        return [x]


def without_a_future() -> Told:
    return [Nothing().get_future()]


def without_an_end() -> Told:
    return [Nothing().wait(timedelta(milliseconds=20))]


def broadcast(group: str, root: int) -> Told:
    """``root`` is its rank in the job."""
    x = numbers(4)
    dist.broadcast(x, src=root, group=GROUPS[group])
    return [x]


def scattered() -> Told:
    x, mine = torch.zeros(3), dist.get_rank() == 1
    dist.scatter(x, [numbers(3, salt=1), numbers(3, salt=2)] if mine else None, src=1, group=GROUPS["other order"])
    return [x]


def gathered() -> Told:
    mine = dist.get_rank() == 1
    out = [torch.zeros(3), torch.zeros(3)] if mine else []
    dist.gather(numbers(3), out or None, dst=1, group=GROUPS["other order"])
    return [out]


def reduced() -> Told:
    x = numbers(4)
    dist.reduce(x, dst=1, group=GROUPS["other order"])
    return [x]


def functionally_broadcast() -> Told:
    """The root is counted in the group."""
    return [functional.broadcast(numbers(4), 0, GROUPS["other order"]) + 0]


def by_name() -> Told:
    x = functional.all_reduce(numbers(4), "sum", GROUPS["other order"].group_name)
    y = functional.all_reduce(numbers(4), "sum", [0, 1])
    return [[x + 0, y + 0]]


def of_no_one() -> Told:
    """A group that this rank is not in: a call says so, and does nothing."""
    x = numbers(4)
    outsider = GROUPS["alone 1" if dist.get_rank() == 0 else "alone 0"]
    return [x, dist.all_reduce(x, group=outsider)]


def saved_and_loaded() -> Told:
    state = {"x": numbers(4), "step": 3}
    with TemporaryDirectory() as own:
        meeting = [own]
        dist.broadcast_object_list(meeting, src=0)
        saved.save(state, checkpoint_id=Path(meeting[0]) / "whole")
        loaded = {"x": torch.zeros(4), "step": 0}
        saved.load(loaded, checkpoint_id=Path(meeting[0]) / "whole")
        dist.barrier()
    return [loaded["x"], loaded["step"]]


@contextmanager
def of_double_precision() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def under(surroundings: Callable[[], Any]) -> Told:
    with surroundings():
        leaf = numbers(4).requires_grad_()
        y = functional.all_reduce(leaf * 2, "sum", dist.group.WORLD)
        y.sum().backward()
        x = numbers(4)
        dist.all_reduce(x)
        return [[y.detach() + 0, leaf.grad / 2, x]]


CASES: dict[str, Case] = {
    "in Python": in_python,
    "reduced in Python": reduced_in_python,
    "named": named,
    "without a future": without_a_future,
    "without an end": without_an_end,
    "broadcast alone": lambda: broadcast(f"alone {dist.get_rank()}", dist.get_rank()),
    "broadcast in another order": partial(broadcast, "other order", 1),
    "scattered": scattered,
    "gathered": gathered,
    "reduced": reduced,
    "functionally broadcast": functionally_broadcast,
    "by name": by_name,
    "of no one": of_no_one,
    "saved and loaded": saved_and_loaded,
    "double precision": partial(under, of_double_precision),
    "deterministic": partial(under, deterministic),
    "anomalies detected": partial(under, torch.autograd.detect_anomaly),
    "autocast": partial(under, lambda: torch.autocast("cpu", torch.bfloat16)),
}


def train(attach: Attach) -> dict[str, Any]:
    if not GROUPS:
        dist.Backend.register_backend("lonely", lambda _store, rank, size, _limit: Lonely(rank, size), devices=["cpu"])
        GROUPS["lonely"] = dist.new_group([0, 1], backend="lonely")
        GROUPS["other order"] = dist.new_group([1, 0], sort_ranks=False)
        GROUPS.update({f"alone {rank}": dist.new_group([rank]) for rank in range(2)})
    GROUPS["lonely"].works.clear()
    return each_in_a_step(attach, CASES)


if __name__ == "__main__":
    run(train)
