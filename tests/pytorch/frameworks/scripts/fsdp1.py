"""FullyShardedDataParallel; ``fsdp1.py STRATEGY HOW``."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import sys
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from framework_run import Attach, norm_of, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, _runtime_utils
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monitor.pytorch import TrainerMon

STRATEGY, HOW = sys.argv[1:]
MICRO_STEPS = 2 if HOW in ("no-sync", "accumulate") else 1
CPU = torch.device("cpu")

warnings.simplefilter("ignore")


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 5)), nn.Linear(5, 3))


def wrapped(model: nn.Sequential, **options: Any) -> FullyShardedDataParallel:
    """One unit within another; of ``parts``, the inner one is on its own, and the last layer in none."""
    options = {"sharding_strategy": ShardingStrategy[STRATEGY], "use_orig_params": True, "device_id": CPU} | options
    if STRATEGY == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    if HOW == "accumulate":
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if HOW == "parts":
        model[0].bias.requires_grad_(False)
        ignored, alone = [model[3]], dist.new_group([dist.get_rank()], use_local_synchronization=True)
        model[2] = FullyShardedDataParallel(model[2], process_group=alone, **options)
        return FullyShardedDataParallel(model, ignored_modules=ignored, **options)
    model[2] = FullyShardedDataParallel(model[2], **options)
    return FullyShardedDataParallel(model, **options)


class Reference:
    """The model in one piece, in the process of each rank, and what it makes of the rank's inputs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model)

    def load(self, weights: dict[str, Tensor]) -> None:
        self._model.load_state_dict(weights)
        self._model.zero_grad()

    def backward(self, x: Tensor) -> None:
        if HOW == "accumulate":
            self._model.zero_grad()
        self._model(x).square().sum().backward()

    def gradients(self) -> dict[str, list[float]]:
        return {name: told_of(p.grad) for name, p in self._model.named_parameters() if p.grad is not None}

    def output(self, x: Tensor) -> list[float]:
        """Of the module that the inner unit wraps."""
        with torch.no_grad():
            return told_of(self._model[:3](x))


def told_of(x: Tensor) -> list[float]:
    return [float(x.min()), float(x.max()), float(x.double().mean()), norm_of([x])]


def whole(model: nn.Module) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {original(name): p.detach().clone() for name, p in model.named_parameters()}


def original(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def norm_over_ranks(model: Any, tensors: list[Tensor]) -> float:
    squares = torch.tensor(norm_of(tensors) ** 2 if tensors else 0.0, dtype=torch.float64)
    if STRATEGY != "NO_SHARD":
        dist.all_reduce(squares, group=model.process_group)
    return float(squares.sqrt())


def moments(model: Any, optimizer: torch.optim.Optimizer) -> list[float] | None:
    kept = optimizer.state.values()
    return [norm_over_ranks(model, [s[name] for s in kept]) for name in ("exp_avg", "exp_avg_sq")] if kept else None


def train(attach: Attach) -> Any:
    model = plain_model()
    reference, model = Reference(model), wrapped(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Where gradients are sharded, this is none of the groups that make replicas.
    attach(model, optimizer, MICRO_STEPS, dp_group=dist.group.WORLD)
    torch.manual_seed(1 + dist.get_rank())
    kinds = ("losses", "gradients", "before", "after", "moments", "local", "output", "bits")
    told: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for _ in range(3):
        weights = whole(model)
        reference.load(weights)
        told["before"].append(norm_of(weights.values()))
        told["moments"].append(moments(model, optimizer))
        told["local"].append([])
        for micro_step in range(MICRO_STEPS):
            x = torch.randn(4, 8)
            reference.backward(x)
            with model.no_sync() if HOW == "no-sync" and micro_step < MICRO_STEPS - 1 else nullcontext():
                loss = model(x).float().square().sum()
                loss.backward()
            told["local"][-1].append(reference.gradients())
        told["losses"].append(loss.item().hex())
        told["output"].append(reference.output(x))
        told["gradients"].append(float(model.clip_grad_norm_(1e9)))
        optimizer.step()
        optimizer.zero_grad()
        told["after"].append(norm_of(whole(model).values()))
    told["bits"] = [hashlib.sha256(p.numpy().tobytes()).hexdigest() for p in whole(model).values()]
    return told


def tensor_parallel(attach: Attach) -> Any:
    """Units of DTensors, whose parts are flattened."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    options = {"sharding_strategy": ShardingStrategy[STRATEGY], "use_orig_params": True, "device_id": CPU}
    model = FullyShardedDataParallel(model, device_mesh=mesh["data"], **options)
    optimizer = torch.optim.AdamW(model.parameters())
    attach(model, optimizer, dp_group=mesh["data"].get_group(), tp_group=mesh["tensor"].get_group())
    inputs = [torch.randn(4, 8) for _ in range(2)]
    loss = model(inputs[mesh["data"].get_local_rank()]).square().sum()
    loss.backward()
    optimizer.step()
    (sum(reference(x).square().sum() for x in inputs) / 2).backward()
    return {"loss": loss.item().hex(), "gradients": norm_of(p.grad for p in reference.parameters())}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()


def endings(_attach: Attach) -> Any:
    """Whether torch is as it was after a monitor was closed, and after a model was released, and whether that is gone."""
    unpatched = _runtime_utils._post_backward_hook
    model = wrapped(plain_model())
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False)
    monitor.set_monitor(model, 2, optimizer)
    told: dict[str, Any] = {"patched": _runtime_utils._post_backward_hook is not unpatched}
    step(model, optimizer)
    monitor.close()
    told["closed"] = _runtime_utils._post_backward_hook is unpatched
    step(model, optimizer)
    del monitor
    TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False).set_monitor(model, 2, optimizer)
    step(model, optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    let_go = _runtime_utils._post_backward_hook is unpatched
    return told | {"let go": let_go, "gone": gone() is None, "refused": refusals()}


def refusals() -> list[str]:
    """What is said to models that cannot be observed."""
    flattened = wrapped(plain_model(), use_orig_params=False)
    gathered = wrapped(plain_model(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = torch.optim.AdamW(gathered.parameters())
    gathered(torch.randn(4, 8))
    told = [refusal(flattened, torch.optim.AdamW(flattened.parameters())), refusal(gathered, optimizer)]
    known = _runtime_utils._post_backward_hook
    _runtime_utils._post_backward_hook = _runtime_utils._pre_backward_hook
    model = wrapped(plain_model())
    told.append(refusal(model, torch.optim.AdamW(model.parameters())))
    _runtime_utils._post_backward_hook = known
    return told


def refusal(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    monitor = TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False)
    try:
        monitor.set_monitor(model, 1, optimizer)
    except ValueError as error:
        return str(error)
    return ""


run({"endings": endings, "tensor-parallel": tensor_parallel}.get(HOW, train))
