"""Two ranks attach in ways that are not the usual one; ``ways_of_attaching.py BASE``.

Each part records below ``BASE/{part}``, and tells what came of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from memory_of_parameters import words_of
from mindspore import Parameter, Tensor, communication, dataset, nn, ops
from mindspore.mint import distributed
from ranks import tell

from monitor.mindspore import MonitorCallback, TrainerMon

BASE = Path(sys.argv[1])
GRADIENTS: dict[str, Any] = {"wg_distribution": True, "ops": ["norm"], "step_count_per_record": 10}
STAGES = [0, 1]
FAULTY_STEP = 2


class Layer(nn.Cell):
    """Of a size; the same weights wherever it is made."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        weight = np.random.default_rng(ins).normal(size=(outs, ins)).astype(np.float32)
        self.dense = nn.Dense(ins, outs, weight_init=Tensor(weight), bias_init="zeros")
        self.set_train()

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.dense(x))


class First(nn.Cell):
    """What the first stage of a pipeline has: a scale that becomes NaN makes its output NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(4, 3)
        self.scale = Parameter(Tensor(np.ones(3, np.float32)), name="scale")
        self.set_train()

    def construct(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def batch(step: int, rank: int, width: int = 4) -> Tensor:
    return Tensor(np.random.default_rng([step, rank]).normal(size=(2, width)).astype(np.float32))


def bits(net: nn.Cell) -> list[str]:
    return [one.asnumpy().tobytes().hex() for one in net.get_parameters()]


def recording_to(part: str, **config: Any) -> Path:
    """The configuration of a part."""
    directory = BASE / part
    directory.mkdir(exist_ok=True)
    path = directory / f"config{os.environ.get('RANK_ID', '')}.json"
    path.write_text(json.dumps(GRADIENTS | config))
    os.environ["MONITOR_OUTPUT_DIR"] = str(directory / "output")
    return path


def refused(attach: Callable[[], object]) -> str:
    try:
        attach()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def averaged(net: nn.Cell, optimizer: nn.Cell, steps: int) -> None:
    """Trains on data of its own, and averages gradients."""
    gradients_of = ms.grad(lambda x: ops.square(net(x)).mean(), None, optimizer.parameters)
    for step in range(steps):
        gradients = gradients_of(batch(step, communication.get_rank()))
        for gradient in gradients:
            distributed.all_reduce(gradient)
        optimizer(tuple(gradient / 2 for gradient in gradients))


def attached_before_communication() -> dict[str, Any]:
    """The scheduler comes as far as to its initialisation, too."""
    net = Layer(4, 3)
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    monitor = TrainerMon(recording_to("before", cc_distribution={"enable": True}))
    told = refused(lambda: monitor.set_monitor(net, 1, optimizer, dp_group="mccl_world_group"))
    monitor.set_monitor(net, 1, optimizer)
    communication.init("mccl")
    averaged(net, optimizer, 3)
    monitor.close()
    return {"refused": told}


def attached_to_what_is_none() -> dict[str, Any]:
    """Nothing is attached, and what is attached afterwards is."""
    net = Layer(4, 3)
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    monitor = TrainerMon(recording_to("none"), process_group="stage")
    told = {
        "optimizer": refused(lambda: monitor.set_monitor(net, 1, None)),
        "group": refused(lambda: monitor.set_monitor(net, 1, optimizer, dp_group="stage")),
        "ranks": refused(lambda: monitor.set_monitor(net, 1, optimizer, dp_group=[0, 1])),
    }
    monitor.close()
    return told


def second_rank_alone() -> dict[str, Any]:
    net = Layer(4, 3)
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    path = recording_to("second", module_ranks=[1], cc_distribution={"enable": True}, replica_check=True)
    with TrainerMon(path) as monitor:
        monitor.set_monitor(net, 1, optimizer, dp_group=distributed.new_group([0, 1]))
        averaged(net, optimizer, 2)
    return {}


def pipeline(config: Path | None) -> list[str]:
    """The first rank hands its output to the second, which hands its gradient back."""
    rank = communication.get_rank()
    net = First() if rank == 0 else Layer(3, 2)
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    monitor = None if config is None else TrainerMon(config, process_group="stages")
    if monitor is not None:
        monitor.set_monitor(net, 1, optimizer, tp_group=distributed.new_group([rank]))
    for step in range(4):
        if rank == 0 and step == FAULTY_STEP:
            words_of(net.scale).view(np.float32)[:] = (1.0, np.nan, 1.0)
        optimizer(first_stage(net, optimizer, step) if rank == 0 else last_stage(net, optimizer))
    if monitor is not None:
        monitor.close()
    return bits(net)


def first_stage(net: nn.Cell, optimizer: nn.Cell, step: int) -> tuple[Tensor, ...]:
    x = batch(step, 0)
    distributed.broadcast(net(x), 0)
    coming = Tensor(np.zeros((2, 3), np.float32))
    distributed.broadcast(coming, 1)
    gradients: tuple[Tensor, ...] = ms.grad(lambda x: (net(x) * coming).sum(), None, optimizer.parameters)(x)
    return gradients


def last_stage(net: nn.Cell, optimizer: nn.Cell) -> tuple[Tensor, ...]:
    coming = Tensor(np.zeros((2, 3), np.float32))
    distributed.broadcast(coming, 0)
    back, gradients = ms.grad(lambda x: ops.square(net(x)).mean(), 0, optimizer.parameters)(coming)
    distributed.broadcast(back, 1)
    own: tuple[Tensor, ...] = gradients
    return own


def stages() -> dict[str, Any]:
    communication.create_group("stages", STAGES)
    alert = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}
    config = recording_to("stages", xy_distribution=True, all_xy=True, alert=alert, ops=["norm", "nans"])
    return {"plain": pipeline(None), "monitored": pipeline(config)}


def model_train() -> dict[str, Any]:
    """``Model.train`` under MindSpore's own data parallelism."""
    path = recording_to("model", param_distribution=True)
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    told = {"plain": trained([]), "monitored": trained([MonitorCallback(path, dp_group="mccl_world_group")])}
    trained([MonitorCallback(recording_to("shown", param_distribution=True))])
    ms.reset_auto_parallel_context()
    return told


def trained(callbacks: list[Any]) -> list[str]:
    rank = communication.get_rank()
    rows = np.random.default_rng(rank).normal(size=(6, 4)).astype(np.float32)
    labels = np.random.default_rng(rank + 2).normal(size=(6, 3)).astype(np.float32)
    batches = dataset.NumpySlicesDataset((rows, labels), shuffle=False).batch(2)
    net = Layer(4, 3)
    model = ms.train.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    model.train(1, batches, callbacks=callbacks, dataset_sink_mode=False)
    return bits(net)


ms.set_device("CPU")
for part in (attached_before_communication, attached_to_what_is_none, second_rank_alone, stages, model_train):
    tell(part())
