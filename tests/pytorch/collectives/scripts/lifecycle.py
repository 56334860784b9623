"""What listening leaves behind, and what it holds; ``lifecycle.py``."""

from __future__ import annotations

import gc
import logging.handlers
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from communicating import Attach, run

from monitor.config.model import CcDistribution
from monitor.failures import LOGGER, Failures
from monitor.pytorch.collectives.interception import INTERCEPTION, KEY
from monitor.pytorch.collectives.operators import operators
from monitor.pytorch.collectives.recording import communication as communication_of
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.recording.collectives import Communication
from monitor.recording.recorder import Recorder
from monitor.series import SeriesTable

DDP = torch.nn.parallel.DistributedDataParallel
OWNERS = (dist, dist.distributed_c10d, functional, dist.Work, dist.ProcessGroup, torch._C.Future, DDP)


def listening(**wanted: Any) -> tuple[Communication, Recorder]:
    communication = communication_of(CcDistribution(enable=True, **wanted), Failures())
    assert communication is not None
    recorder = Recorder(TorchTensorReader(SeriesTable(), 1e-8))
    recorder.activate(True)
    communication.record_into(recorder, {}, lambda *_: None)
    return communication, recorder


def attributes() -> dict[tuple[str, str], Any]:
    return {(str(owner), name): value for owner in OWNERS for name, value in vars(owner).items()}


def kernels() -> list[str]:
    keys = (KEY, "AutogradCPU", "AutogradCUDA", "AutogradPrivateUse1")
    names = [f"{one.namespace}::{one.schema_name}" for one in operators()] + ["_c10d_functional::wait_tensor"]
    return [name for name in names for key in keys if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]


def left_behind() -> dict[str, Any]:
    dist.all_reduce(torch.ones(1))
    functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).wait()
    attributes_before, kernels_before = attributes(), kernels()
    kept = []
    for _ in range(100):
        communication, _ = listening()
        dist.all_reduce(torch.ones(1))
        communication.close()
        kept.append(weakref.ref(communication))
        del communication
    gc.collect()
    after = attributes()
    changed = [key for key, value in attributes_before.items() if after.get(key) is not value]
    added = sorted(kernels())
    return {
        "changed": [*map(str, changed), *map(str, after.keys() - attributes_before.keys())],
        "kernels": [one for one in added if one not in kernels_before],
        "living": sum(one() is not None for one in kept),
        "installed": INTERCEPTION.installed,
    }


def never_waited() -> dict[str, Any]:
    communication, recorder = listening()
    x = torch.ones(3)
    gone = weakref.ref(x)
    work = dist.all_reduce(x, async_op=True)
    dist.barrier()
    del x, work
    for _ in range(16):  # gloo's threads release the Work before when they are given another
        dist.all_reduce(torch.ones(1))
    gc.collect()
    deadline = time.monotonic() + 5.0
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    told = {"held": gone() is not None, "unread": communication.unread, "rows": recorder.table.writes}
    communication.close()
    return told


def same_work() -> bool:
    communication, _ = listening()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    same = type(work) is dist.Work and work.wait() is True and work.is_completed()
    communication.close()
    return same


def compiled() -> dict[str, Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    communication, recorder = listening(cc_pre_hook=True)
    whole = torch.compile(step, backend="aot_eager", fullgraph=True)
    results = [whole(torch.arange(4.0) + calls).tolist() for calls in range(3)]
    told = {"results": results, "rows": recorder.table.writes, "unread": communication.unread}
    communication.close()
    return told


def here() -> None:
    dist.all_reduce(torch.ones(2))  # the wanted line
    dist.all_reduce(torch.ones(3))


def one_line() -> list[int]:
    wanted = here.__code__.co_firstlineno + 1
    communication, recorder = listening(cc_codeline=(rf"lifecycle\.py\[{wanted}\]$",))
    for _ in range(2):
        here()
    communication.close()
    (rows,) = recorder.kinds_now().values()
    return rows.partials["count"].tolist()


def lines_without_calls() -> list[list[str]]:
    """What is warned of at the end of the first step, with a pattern that finds a call, and with one that finds none."""
    said = logging.handlers.BufferingHandler(1000)
    said.setLevel(logging.WARNING)
    LOGGER.addHandler(said)
    told = []
    for pattern in (rf"lifecycle\.py\[{here.__code__.co_firstlineno + 1}\]$", r"elsewhere\.py\[1\]"):
        communication, _ = listening(cc_codeline=(pattern,))
        here()
        with tempfile.TemporaryDirectory() as directory:
            communication.end_log(Path(directory))
        communication.close()
        told.append([record.getMessage().partition(". Take")[0] for record in said.buffer])
        said.buffer.clear()
    LOGGER.removeHandler(said)
    return told


def train(_attach: Attach) -> dict[str, Any]:
    parts = (left_behind, never_waited, same_work, compiled, one_line, lines_without_calls)
    return {part.__name__: part() for part in parts}


run(train)
