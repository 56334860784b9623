"""Groups that come and go while one monitor listens, and forked processes; ``lifetimes.py``."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from casewise import each_in_a_step, numbers
from communicating import Attach, run
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

RESULTS = Path(os.environ["FRAMEWORK_RESULTS"])


class Ranked(Dataset[Tensor]):
    """Items that a worker process computes, which knows its rank from the process that it was forked from."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> Tensor:
        return torch.full((2,), float(place + 10 * dist.get_rank()))


def summed_by_worker(into: Any, met: str) -> None:
    """Communicates in a group of its own; what it was forked from, it leaves alone."""
    store = dist.FileStore(met, 1)
    group = dist.ProcessGroup(store, 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, 0, 1))
    group._set_group_name("of the worker")
    x = torch.ones(3)
    group.allreduce([x]).wait()
    work = group.allreduce([x])
    work.get_future().wait()
    into.put(x.tolist())


def loaded() -> list[Any]:
    """Before the workers, a call that is still under way; after them, one more."""
    x = numbers(4)
    work = dist.all_reduce(x, async_op=True)
    batches = list(DataLoader(Ranked(), batch_size=2, num_workers=1, multiprocessing_context="fork"))
    work.wait()
    dist.all_reduce(x)
    return [x, batches]


def forked() -> list[Any]:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    worker = context.Process(target=summed_by_worker, args=(results, str(RESULTS / f"store-of-{os.getpid()}-{len(MET)}")))
    MET.append("worker")
    worker.start()
    found = results.get()
    worker.join()
    return [found, worker.exitcode]


def grouped() -> list[Any]:
    """A call in the group that is for this rank."""
    return [dist.get_process_group_ranks(GROUPS[dist.get_rank()]), summed(GROUPS[dist.get_rank()])]


def summed(group: Any) -> Tensor:
    x = numbers(3)
    dist.all_reduce(x, group=group)
    return x


def destroyed() -> list[Any]:
    """A group that is destroyed while a call of another one is under way."""
    x = numbers(3)
    work = dist.all_reduce(x, async_op=True)
    group = dist.new_group([0, 1])
    y = summed(group)
    dist.destroy_process_group(group)
    work.wait()
    return [x, y]


def begin() -> None:
    """Destroy everything and begin anew, so that torch counts groups from the beginning."""
    met = RESULTS / f"met-{len(MET)}"
    MET.append(met)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{met}", rank=int(os.environ["RANK"]), world_size=2)


def begun_again() -> list[Any]:
    """The groups have the names of those before, and other ranks."""
    before = [group.group_name for group in GROUPS if group is not dist.GroupMember.NON_GROUP_MEMBER]
    begin()
    GROUPS[:] = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    return [set(before) <= {group.group_name for group in GROUPS}, [summed(group) for group in GROUPS]]


MET: list[Any] = []
GROUPS: list[Any] = []


def train(attach: Attach) -> dict[str, Any]:
    begin()
    GROUPS[:] = [dist.new_group([0]), dist.new_group([1])]
    cases = {
        "loaded": loaded,
        "forked": forked,
        "grouped": grouped,
        "destroyed": destroyed,
        "begun again": begun_again,
        "afterwards": lambda: [summed(None)],
    }
    return each_in_a_step(attach, cases)


if __name__ == "__main__":
    run(train)
