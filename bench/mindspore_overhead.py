"""What being monitored costs a network of MindSpore's dynamic graph.

    python bench/mindspore_overhead.py

Equal networks in one process step in turn, one of them unmonitored; who begins changes with the round. The time of a monitored
step, from its begin until its weights are there, is divided by that of the unmonitored one in the same round, and the median
over the rounds is reported.

On a CPU an operator in C measures what hooks see. The last column is the time of a monitor without it, whose hooks wait for
what they read.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

os.environ.setdefault("GLOG_v", "3")  # before MindSpore is imported: it says much on standard error

import mindspore
import numpy as np
from mindspore import Tensor, nn
from stepping import UNMONITORED, rotated
from tables import Progress, aligned, save

from monitor.mindspore import TrainerMon, tensor_reader

OPS = ["min", "max", "mean", "norm", "nans"]
CONFIGS: dict[str, dict[str, Any]] = {
    "gradients": {"wg_distribution": True},
    "gradients, weights, moments": {"wg_distribution": True, "param_distribution": True, "mv_distribution": True},
    "activations": {"xy_distribution": True, "all_xy": True},
}
CONFIGS["everything"] = {**CONFIGS["gradients, weights, moments"], **CONFIGS["activations"]}
WAITING = "waiting"


class Training:
    """Layers of one width, Adam, and a batch that never changes."""

    def __init__(self, layers: int, width: int, batch: int) -> None:
        mindspore.set_seed(0)
        self.net = nn.SequentialCell(*(part for _ in range(layers) for part in (nn.Dense(width, width), nn.ReLU())))
        self.net.set_train(True)
        self.optimizer = nn.Adam(self.net.trainable_params(), learning_rate=1e-4)
        x = Tensor(np.random.default_rng(0).normal(size=(batch, width)).astype(np.float32))
        self._step = mindspore.value_and_grad(lambda: self.net(x).square().mean(), None, self.optimizer.parameters)

    def seconds(self) -> float:
        """Of one step."""
        began = time.perf_counter()
        loss, gradients = self._step()
        self.optimizer(gradients)
        loss.asnumpy()
        self.optimizer.parameters[-1].asnumpy()
        return time.perf_counter() - began


def main() -> None:
    arguments = parse_arguments()
    layers, width, batch = (2, 8, 2) if arguments.quick else (arguments.layers, arguments.width, arguments.batch)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["MONITOR_OUTPUT_DIR"] = directory
        trainings = {(UNMONITORED, ""): Training(layers, width, batch)}
        monitors = []
        for name, how in product(CONFIGS, ("", WAITING)):
            trainings[name, how] = Training(layers, width, batch)
            with patch.object(tensor_reader, "new_tape", lambda: None) if how == WAITING else nullcontext():
                monitors.append(monitored(Path(directory), CONFIGS[name], trainings[name, how]))
        ratios = measured({name: one.seconds for name, one in trainings.items()}, 2 if arguments.quick else arguments.rounds)
        for monitor in monitors:
            monitor.close()
    rows = [[name, spread(ratios[name, ""]), f"{median(ratios[name, WAITING]):.2f}"] for name in CONFIGS]
    device = mindspore.get_context("device_target")
    print(f"{layers} layers of {width}, batch {batch}; mindspore {mindspore.__version__} on {device}")
    print(aligned(["what is recorded", "step time", "without the operator"], rows))
    save(arguments.json, {f"{name} {how}".strip(): each for (name, how), each in ratios.items()})


def spread(ratios: list[float]) -> str:
    """The median, and the quartiles."""
    low, middle, high = quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def monitored(directory: Path, config: dict[str, Any], training: Training) -> TrainerMon:
    path = directory / "config.json"
    path.write_text(json.dumps({**config, "ops": OPS, "step_count_per_record": 20}))
    monitor = TrainerMon(path)
    monitor.set_monitor(training.net, 1, training.optimizer)
    return monitor


Network = tuple[str, str]
"""What is recorded of it, and how."""


def measured(steps: dict[Network, Callable[[], float]], rounds: int, warm_up: int = 2) -> dict[Network, list[float]]:
    """What each step takes of the unmonitored one's time, in each round."""
    progress, plain = Progress(), (UNMONITORED, "")
    ratios: dict[Network, list[float]] = {name: [] for name in steps if name != plain}
    for number in range(warm_up + rounds):
        progress.show("stepping", f"{number}/{warm_up + rounds}")
        seconds = {name: steps[name]() for name in rotated(list(steps), number)}
        for name, each in ratios.items() if number >= warm_up else ():
            each.append(seconds[name] / seconds[plain])
    progress.end()
    return ratios


def parse_arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="(8)")
    parser.add_argument("--width", type=int, default=1024, help="(1024)")
    parser.add_argument("--batch", type=int, default=128, help="(128)")
    parser.add_argument("--rounds", type=int, default=30, help="counted after the warm-up (30)")
    parser.add_argument("--json", type=Path, help="where to write all figures", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="see that it runs: a few neurons, 2 rounds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
