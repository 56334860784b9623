"""Compiled models that communicate, a step for each; ``compiled.py BACKEND ALONE MODEL...``.

``ALONE`` is ``plain`` or ``monitored``, where only that is run, or empty: the compiler remembers what it cannot trace for as
long as the process lives, so that of two runs in one process the second is another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from casewise import Case, each_in_a_step, numbers
from communicating import Attach, run
from framework_run import Attached
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

BACKEND, ALONE, NAMES = sys.argv[1], sys.argv[2], sys.argv[3:]
COUNTED = ("stats", "frames", "graph_break", "recompiles", "unimplemented", "compiled_autograd")
"""What the compiler counts. Why it breaks a graph is not compared, only how often."""


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def small_network() -> nn.Sequential:
    """Only products, which need no kernels of their own: each takes a C++ compiler more than a second."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))


class Functional(nn.Module):
    """Communicates between its layers: by functional collectives, and by a call that the compiler makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = small_network()

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.all_reduce(self.first(x), "sum", dist.group.WORLD)
        hidden = functional.all_gather_single(hidden, 0, dist.group.WORLD)
        outputs = functional.reduce_scatter_single(self.last(hidden), "sum", 0, dist.group.WORLD)
        shared = outputs.detach().clone()
        dist.all_reduce(shared)
        return outputs + shared


class Interrupted(nn.Module):
    """Communicates in a way that no compiler can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[:2](x)
        shared = hidden.detach() * 1
        work = dist.all_reduce(shared, async_op=True)
        hidden = self.layers[2](hidden)
        work.wait()
        return self.layers[3:](hidden + shared)


def tensor_parallel() -> nn.Module:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize_module(small_network(), init_device_mesh("cpu", (2,)), plan)


class Large(nn.Module):
    """Several buckets of the reducer, which the compiler makes several graphs of. Of a module of torch's it would make none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(512)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def data_parallel() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Large(), bucket_cap_mb=1)


BUILD: dict[str, Callable[[], nn.Module]] = {
    "functional": Functional,
    "interrupted": Interrupted,
    "tensor parallel": tensor_parallel,
    "data parallel": data_parallel,
    "data parallel, backward compiled": data_parallel,
}
WITH_BREAKS = ("interrupted", "data parallel")
SIZES = (2, 2, 4) if BACKEND == "aot_eager" else (2, 2, 2)  # of batches: another one makes it compile anew
FIXED = ("tensor parallel",)  # torch cannot trace it anew


def compiling(name: str) -> AbstractContextManager[Any]:
    if "backward compiled" in name:
        return torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True)
    return nullcontext()


def built(name: str) -> nn.Module:
    with compiling(name):
        return BUILD[name]()


def trained(name: str, model: nn.Module) -> dict[str, Any]:
    """Losses, weights, what the compiler counted, and how often torch's profiler saw a collective."""
    torch._dynamo.reset()
    counters.clear()
    with compiling(name), profile(activities=[ProfilerActivity.CPU]) as seen:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend=BACKEND, fullgraph=name not in WITH_BREAKS)
        losses: list[Tensor] = []
        for step, size in enumerate(SIZES[:2] if name in FIXED else SIZES):
            loss = compiled(numbers(size, 4, salt=step)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    weights = [getattr(one, "_local_tensor", one).detach().double().sum() for one in model.parameters()]
    return {"losses": losses, "weights": weights, **compiler_counts(), "calls": calls_in(seen)}


def called() -> dict[str, Any]:
    """A function of tensors that nothing is to be learned from."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(
        lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, backend=BACKEND, fullgraph=True
    )
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        outputs = [compiled(numbers(8, salt=salt)) for salt in range(3)]
    return {"outputs": outputs, **compiler_counts(), "calls": calls_in(seen)}


def compiler_counts() -> dict[str, Any]:
    graphs = {kind: dict(counters[kind]) for kind in ("stats", "frames")}
    return graphs | {kind: sum(counters[kind].values()) for kind in COUNTED if kind not in graphs}


def calls_in(seen: profile) -> int:
    return sum(event.count for event in seen.key_averages() if event.key.startswith("c10d::"))


def cases() -> dict[str, Case]:
    return {name: partial(trained, name, built(name)) if name in BUILD else called for name in NAMES}


def train(attach: Attach) -> dict[str, Any]:
    monitored = isinstance(attach, Attached)
    if ALONE and monitored is not (ALONE == "monitored"):
        return {"cases": {}}
    return each_in_a_step(attach, cases())


os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["FRAMEWORK_RESULTS"], "inductor"))
# One thread, so that no pool of compiling processes outlives this; nothing kept, so that all runs compile; no vectors, no
# optimization and no headers compiled beforehand, for speed.
quick = {
    "compile_threads": 1,
    "fx_graph_cache": False,
    "cpp.vec_isa_ok": False,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.debug_compile": True,
}
with torch._inductor.config.patch(quick):
    run(train)
