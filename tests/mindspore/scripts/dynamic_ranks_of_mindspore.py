"""A data-parallel rank under dynamic monitoring, and then without a monitor; ``dynamic_ranks_of_mindspore.py BASE``.

Rank 0 edits its configuration file while all ranks train, each after random delays, and turns to the next edit when both
manifests say that the last one holds. Each rank has a file of its own, and only that of rank 0 is ever looked at.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn, ops
from mindspore.mint import distributed
from ranks import tell

import monitor.recording.recording as recording
from monitor.config import MonitorConfig
from monitor.coordinator.manifest_format import read_manifest
from monitor.dynamic import JobConnection
from monitor.dynamic.controller import digest_of
from monitor.dynamic.step_boundary import PollingIntervals
from monitor.mindspore import TrainerMon

PACE = PollingIntervals(idle=0.04, open=0.01, waiting=0.005, patience=5.0, bound=8.0, file=0.02)
COMMON: dict[str, Any] = {"ops": ["norm"], "step_count_per_record": 1000}
ON: dict[str, Any] = {**COMMON, "dynamic_on": True, "wg_distribution": True}
OFF: dict[str, Any] = {**COMMON, "dynamic_on": False}
EDITS: tuple[dict[str, Any], ...] = (
    ON,
    {**ON, "xy_distribution": True, "all_xy": True, "cc_distribution": {"enable": True}},
    OFF,
    {**ON, "step_interval": 2},
)
STEPS_BETWEEN = 6
SOON_S = 40.0


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        weight = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
        self.dense = nn.Dense(4, 2, weight_init=Tensor(weight), bias_init="zeros")
        self.set_train()

    def construct(self, x: Tensor) -> Tensor:
        return ops.square(self.dense(x)).mean()


class Editor:
    """Edits the file of rank 0, and sees to it that there is something to be seen of each edit."""

    def __init__(self, path: Path, output: Path) -> None:
        self._path, self._output = path, output
        self._script = self._edits()

    def has_more(self) -> bool:
        """Between two steps, on rank 0: whether training does."""
        return next(self._script, None) is not None

    def _edits(self) -> Iterator[int]:
        for config in EDITS:
            yield from range(STEPS_BETWEEN)
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(config))
            draft.replace(self._path)
            yield from self._until_it_holds(digest_of(MonitorConfig.model_validate(config)))
        yield from range(STEPS_BETWEEN)

    def _until_it_holds(self, digest: str) -> Iterator[int]:
        deadline = time.monotonic() + SOON_S
        while self._latest() != [digest] * 2 and time.monotonic() < deadline:
            yield 0

    def _latest(self) -> list[str]:
        found = [read_manifest(path) for path in self._output.glob("*-rank*/manifest.json")]
        return [one.configurations[-1].digest for one in found if one.configurations]


class Rank:
    def __init__(self, base: Path) -> None:
        self.number, self._base = communication.get_rank(), base

    def monitored(self) -> list[str]:
        """The losses."""
        path = self._base / f"config{self.number}.json"
        path.write_text(json.dumps(OFF))
        os.environ |= {"DYNAMIC_MONITOR": "True", "MONITOR_OUTPUT_DIR": str(self._base / "output")}
        net = Net()
        optimizer = nn.Adam(net.trainable_params(), 0.01)
        delays = random.Random(self.number)
        losses: list[str] = []
        editor = Editor(path, self._base / "output")
        with TrainerMon(path) as monitor:
            monitor.set_monitor(net, 1, optimizer, dp_group="mccl_world_group")
            while self._agreed(self.number == 0 and editor.has_more()):
                losses.append(self._step(net, optimizer, len(losses)))
                time.sleep(delays.choice([0.0, 0.0, 0.002, 0.006]))
        return losses

    def plain(self, steps: int) -> list[str]:
        """The losses."""
        net = Net()
        optimizer = nn.Adam(net.trainable_params(), 0.01)
        return [self._step(net, optimizer, step) for step in range(steps)]

    def _step(self, net: nn.Cell, optimizer: nn.Cell, step: int) -> str:
        x = Tensor(np.random.default_rng([step, self.number]).normal(size=(3, 4)).astype(np.float32))
        loss, gradients = ms.value_and_grad(net, None, optimizer.parameters)(x)
        for gradient in gradients:
            distributed.all_reduce(gradient)
        optimizer(gradients)
        bits: str = loss.asnumpy().tobytes().hex()
        return bits

    def _agreed(self, mine: bool) -> bool:
        """Whether any rank says so."""
        told = Tensor(np.array([float(mine)], np.float32))
        distributed.all_reduce(told)
        return bool(told.asnumpy()[0])


recording.JobConnection = partial(JobConnection, intervals=PACE)  # type: ignore[misc]
ms.set_device("CPU")
communication.init("mccl")
rank = Rank(Path(sys.argv[1]))
monitored = rank.monitored()
tell({"monitored": monitored, "plain": rank.plain(len(monitored))})
