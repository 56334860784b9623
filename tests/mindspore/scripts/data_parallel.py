"""A data-parallel rank that trains unmonitored and monitored, and tells what came of it; ``data_parallel.py BASE``.

Each part of it records below ``BASE/{part}``. Where no monitor records, the loop looks at its gradients, and so waits for them;
where one does, nothing else waits before the end of a step. The last part ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from memory_of_parameters import words_of
from mindspore import Tensor, communication, nn, ops
from mindspore.mint import distributed
from ranks import tell

from monitor.anomalies import copy_exchange, odd_copies
from monitor.mindspore import RunEnded, TrainerMon

EVERYTHING: dict[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "alert": {"rules": [{"rule_name": "AnomalyNan"}]},  # with which replicas are measured
    "cc_distribution": {"enable": True, "cc_pre_hook": True},
    "ops": ["min", "max", "mean", "norm", "nans", "shape", "dtype"],
    "ndigits": 17,
    "format": ["csv", "hdf5"],
    "step_count_per_record": 10,
}
FAULT: dict[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "ops": ["norm", "nans"],
    "alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True},
}
FLIPPED: dict[str, Any] = {"param_distribution": True, "alert": FAULT["alert"]}
LOG_ONLY: dict[str, Any] = {"wg_distribution": True, "cc_distribution": {"enable": True, "cc_log_only": True}}
STEPS, FAULTY_STEP, FAULTY_RANK = 4, 2, 1

Reduce = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Net(nn.Cell):
    """The same weights on all ranks and in all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Dense(4, 5), nn.Tanh(), nn.Dense(5, 2)
        for seed, parameter in enumerate(self.trainable_params()):
            drawn = np.random.default_rng(seed).normal(size=parameter.shape)
            parameter.set_data(Tensor(drawn.astype(np.float32)))
        self.set_train()

    def construct(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


def in_place(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """The mean over the ranks; the sum takes the place of what each of them had."""
    for gradient in gradients:
        distributed.all_reduce(gradient)
    return [gradient / 2 for gradient in gradients]


class Rank:
    def __init__(self, base: Path) -> None:
        self.number, self._base = communication.get_rank(), base

    def train(
        self, part: str, config: dict[str, Any] | None, reduce: Reduce | None, *, faulty: bool = False, flips: bool = False
    ) -> dict[str, Any]:
        """What came of it.

        Args:
            reduce: None: the reducer that MindSpore has, which is compiled.
            faulty: Whether an element of a batch is NaN.
            flips: Whether a bit of a weight is flipped.
        """
        net = Net()
        optimizer = nn.Adam(net.trainable_params(), 0.01)
        if reduce is None:
            reduce = nn.DistributedGradReducer(optimizer.parameters, mean=True, degree=2)
        monitor = None if config is None else self._attached(part, config, net, optimizer)
        losses_of = ms.value_and_grad(lambda x: ops.square(net(x)).mean(), None, optimizer.parameters)
        names = [one.name for one in optimizer.parameters]
        told: dict[str, Any] = {"losses": [], "seen": []}
        for step in range(STEPS):
            x = self._batch(step, faulty=faulty)
            if flips and (step, self.number) == (FAULTY_STEP, FAULTY_RANK):
                words_of(net.first.weight)[0, 0] ^= 1
            loss, gradients = losses_of(x)
            unreduced = {} if monitor else listed(names, gradients)
            reduced = reduce(gradients)
            optimizer(tuple(reduced))
            told["losses"].append(loss.asnumpy().tobytes().hex())
            if not monitor:
                told["seen"].append({"input": x.tolist(), "unreduced": unreduced, "reduced": listed(names, reduced)})
        told["weights"] = [one.asnumpy().tobytes().hex() for one in net.get_parameters()]
        if flips and monitor:
            wait_for_note(monitor)
        if monitor:
            monitor.close()
        return told

    def _batch(self, step: int, *, faulty: bool) -> Tensor:
        """Each rank has its own."""
        drawn = np.random.default_rng([step, self.number]).normal(size=(3, 4)).astype(np.float32)
        if faulty and (step, self.number) == (FAULTY_STEP, FAULTY_RANK):
            drawn[1, 2] = np.nan
        return Tensor(drawn)

    def _attached(self, part: str, config: dict[str, Any], net: nn.Cell, optimizer: nn.Cell) -> TrainerMon:
        directory = self._base / part
        directory.mkdir(exist_ok=True)
        path = directory / f"config{self.number}.json"
        path.write_text(json.dumps(config))
        os.environ["MONITOR_OUTPUT_DIR"] = str(directory / "output")
        monitor = TrainerMon(path)
        monitor.set_monitor(net, 1, optimizer, dp_group="mccl_world_group")
        return monitor


def wait_for_note(monitor: TrainerMon) -> None:
    """Until one of the ranks has noted that copies differ."""
    for _ in range(1_000):
        run = monitor._recordings[0].run
        noted = Tensor([int(run is not None and any(one.check == "copies" for one in run.manifest._wrong_bits))], ms.int32)
        distributed.all_reduce(noted)
        if noted.asnumpy()[0]:
            return
        time.sleep(0.03)


def listed(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, Any]:
    return {name: tensor.asnumpy().tolist() for name, tensor in zip(names, tensors, strict=True)}


copy_exchange.SHORTEST_PAUSE_S = 0.02
copy_exchange.MOST_WAITING = odd_copies.PATIENCE = 500  # as long as with turns of a second
ms.set_device("CPU")
communication.init("mccl")
rank = Rank(Path(sys.argv[1]))
tell(
    {
        "plain": rank.train("", None, in_place),
        "everything": rank.train("everything", EVERYTHING, in_place),
        "plain fault": rank.train("", None, None, faulty=True),
        "fault": rank.train("fault", FAULT, None, faulty=True),
        "flipped": rank.train("flipped", FLIPPED, in_place, flips=True),
    }
)
try:
    rank.train("log", LOG_ONLY, in_place)
except RunEnded as end:
    tell({"ended": str(end), "status": end.code})
    raise
