"""One training in several layouts: in one process, and over ranks by gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from trained import RANKS, STEPS, Plant, Setting, Training
from variants import VARIANTS

import monitor
from monitor.attaching import configured
from monitor.pytorch import TrainerMon

OPS = ["min", "max", "mean", "norm", "zeros", "std", "nans"]

# --- Layouts. Each makes of the whole model what this rank trains.


def in_one(_training: Training) -> None: ...


def compiled(training: Training) -> None:
    training.model.compile(backend="aot_eager_decomp_partition")


def data_parallel(training: Training) -> None:
    training.model = DistributedDataParallel(training.model)


def sharded(training: Training) -> None:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    for layer in training.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(training.model, mesh=mesh)


def tensor_parallel(training: Training) -> None:
    parallelize_module(training.model, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)), training.plan)


def staged(training: Training) -> None:
    model, stage = training.model, training.rank
    own = {str(number): model.layers[number] for number in training.layers_of(stage)}
    model.layers = nn.ModuleDict(own) if training.setting.layout == "pp-names" else nn.ModuleList(own.values())
    if stage > 0:
        model.embed = None
    if stage < RANKS - 1:
        model.norm = model.head = None


LAYOUTS: Mapping[str, Plant] = {
    "single": in_one,
    "compiled": compiled,
    "ddp": data_parallel,
    "fsdp2": sharded,
    "tp": tensor_parallel,
    "tp-group": tensor_parallel,
    "pp": staged,
    "pp-names": staged,
}
"""``tp-group`` and ``pp`` pass their group to ``TrainerMon``, the others use ``monitor.watch``.

Layers of ``pp`` count from 0 on each stage, those of ``pp-names`` have the names of the whole model."""


def attached(training: Training) -> Any:
    fields: dict[str, Any] = {"ops": OPS, "format": "parquet"}
    layout, parts = training.setting.layout, training.setting.parts
    if layout not in ("tp-group", "pp"):
        return monitor.watch(training.model, training.optimizer, "everything", micro_batches=parts, **fields)
    stages = dist.group.WORLD if layout == "pp" else None
    made = TrainerMon(configured("everything", fields), stages, params_have_main_grad=False)
    tensor_group = dist.group.WORLD if layout == "tp-group" else None
    made.set_monitor(training.model, parts, training.optimizer, tp_group=tensor_group)
    return made


def reducing(training: Training, step: int, part: int) -> AbstractContextManager[Any]:
    """The context of a micro-batch, in which backward reduces gradients or does not."""
    reduces = training.reduces(step, part)
    if training.setting.layout == "fsdp2":
        training.model.set_requires_gradient_sync(reduces)
    wrapped = isinstance(training.model, DistributedDataParallel) and not reduces
    return training.model.no_sync() if wrapped else nullcontext()


def accumulated(training: Training) -> Callable[[int], Tensor | None]:
    """A function that accumulates the gradients of a step, and returns its last loss."""

    def step(number: int) -> Tensor:
        for part in range(training.setting.parts):
            tokens = training.tokens(number, part)
            with reducing(training, number, part):
                with training.autocast():
                    logits = training.model(tokens)
                loss = training.loss(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens)
                training.weigh(loss, number, part).backward()
        return loss.detach()

    return step


def pipelined(training: Training) -> Callable[[int], Tensor | None]:
    """As ``accumulated``, by a schedule. The loss is divided already, so the schedule does not scale gradients."""
    place, parts = {"step": 0, "part": 0}, training.setting.parts

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        loss = training.loss(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens)
        weighed = training.weigh(loss, place["step"], place["part"] % parts)
        place["part"] += 1
        return weighed

    stage = PipelineStage(training.model, training.rank, RANKS, torch.device("cpu"), group=dist.group.WORLD)
    kind = ScheduleGPipe if training.setting.layout == "pp-names" else Schedule1F1B
    schedule = kind(stage, parts, loss_fn=loss_of, scale_grads=False)
    first, last = training.rank == 0, training.rank == RANKS - 1

    def step(number: int) -> Tensor | None:
        tokens = torch.cat([training.tokens(number, part) for part in range(parts)])
        losses: list[Tensor] | None = [] if last else None
        place["step"], place["part"] = number, 0
        with training.autocast():
            schedule.step(*([tokens] if first else []), target=tokens if last else None, losses=losses)
        return losses[-1].detach() if losses else None

    return step


def train(setting: Setting, plant: Plant | None, rank: int, directory: Path) -> None:
    """Train as one rank, recorded, and save the final weights."""
    training = Training(setting, rank)
    if setting.variant:
        VARIANTS[setting.variant](training)
    if plant is not None:
        plant(training)
    LAYOUTS[setting.layout](training)
    for each in training.built:
        each(training.model)
    training.optimize()
    with attached(training) as watch:
        backward = pipelined(training) if setting.layout.startswith("pp") else accumulated(training)
        for step in range(STEPS):
            training.happen("begins", step)
            loss = backward(step)
            training.happen("reduced", step)
            if loss is not None:
                watch.log(loss=loss)
            training.optimizer.step()
            training.happen("updated", step)
            training.optimizer.zero_grad()
    torch.save(training.gathered(), directory / f"weights{rank}.pt")
