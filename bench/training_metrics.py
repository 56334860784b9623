"""What norms of moments and weights cost as training metrics, beside the tensor monitor that records the same tensors.

    python bench/training_metrics.py

A GPT is trained three times side by side in one process of one thread, a step of each in turn, and who begins changes: with the
tensor monitor, with training metrics in TensorBoard, and with the norms computed in the loop after the optimizer's step, each
read as soon as it is there. Every other step is collected. The CPU time of a collected step, writer threads included, is
divided by that of the step before it, which is not; medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from models import WORKLOADS, Workload
from stepping import rotated
from tables import Progress, aligned, save
from worker import Training

from monitor.pytorch import TrainerMon
from monitor.pytorch.training import TrainingMetrics

WARM_UP_ROUNDS = 3
REST_S = 0.02
MOMENTS = ("exp_avg", "exp_avg_sq")
CONFIG = {
    "mv_distribution": True,
    "param_distribution": True,
    "start_step": 1,
    "step_interval": 2,
    "format": "hdf5",
    "ops": ["norm"],
}
YAML = """
monitor_config:
    monitor_on: true
    dump_path: {base}/dump
    step_interval: 2
    optimizer_state_format: tensorboard
    weight_state_format: tensorboard
tensorboard: {{tensorboard_dir: {base}/board}}
callbacks: []
"""

Collect = Callable[[], object]
"""A step that is not collected, then one that is, and so on."""


@dataclass(frozen=True)
class Cost:
    """Of one way: what collected steps took, and those that followed them, in CPU seconds, one a round."""

    way: str
    collected: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [some / none for some, none in zip(self.collected, self.plain, strict=True)]


def ways(workload: Workload, base: Path, open_until: ExitStack) -> Mapping[str, Collect]:
    """A step of each way, each with a model of its own."""
    (base / "config.json").write_text(json.dumps(CONFIG))
    (base / "train.yaml").write_text(YAML.format(base=base))
    os.environ["MONITOR_OUTPUT_DIR"] = str(base / "monitor")
    recorded, shown, looped = (Training(workload) for _ in range(3))
    monitor = open_until.enter_context(TrainerMon(base / "config.json", params_have_main_grad=False))
    monitor.set_monitor(recorded.model, grad_acc_steps=1, optimizer=recorded.optimizer)
    metrics = open_until.enter_context(TrainingMetrics(base / "train.yaml", shown.model, shown.optimizer))
    return {
        "tensor monitor": recorded.step,
        "training metrics": lambda: in_a_step(metrics, shown),
        "in the loop": in_the_loop(looped),
    }


def in_a_step(metrics: TrainingMetrics, training: Training) -> None:
    with metrics.step():
        training.step()


def in_the_loop(training: Training) -> Collect:
    """Every other step followed by the norm of each moment and each weight."""
    steps = iter(range(1 << 62))

    def step() -> None:
        training.step()
        if next(steps) % 2:
            norms_of(training)

    return step


def norms_of(training: Training) -> list[float]:
    optimizer = training.optimizer
    moments = [state[name] for state in optimizer.state.values() for name in MOMENTS]
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [float(torch.linalg.vector_norm(tensor.detach())) for tensor in (*moments, *weights)]


def seconds(step: Collect) -> float:
    """CPU time of the process for one step, and for what is written of it while it rests."""
    begun = time.process_time()
    step()
    time.sleep(REST_S)
    return time.process_time() - begun


def costs(workload: Workload, rounds: int, progress: Progress) -> Iterator[Cost]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="training-metrics-") as directory, ExitStack() as open_until:
        step_of = ways(workload, Path(directory), open_until)
        found = {way: Cost(way) for way in step_of}
        for number in range(WARM_UP_ROUNDS + rounds):
            progress.show(f"round {number + 1}")
            for way in rotated(list(step_of), number):
                one, other = seconds(step_of[way]), seconds(step_of[way])
                if number >= WARM_UP_ROUNDS:
                    found[way].collected.append(other)
                    found[way].plain.append(one)
        yield from found.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="a small model and two rounds")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    progress = Progress()
    workload, rounds = (WORKLOADS["quick"], 2) if options.quick else (WORKLOADS["gpt"], options.rounds)
    found = list(costs(workload, rounds, progress))
    progress.end()
    monitor = median(found[0].ratios) - 1
    rows = [
        [one.way, f"{median(one.plain) * 1e3:.1f} ms", f"{median(one.ratios):.3f}", f"{(median(one.ratios) - 1) / monitor:.2f}"]
        for one in found
    ]
    print(aligned(["norms of moments and weights", "step without", "step with, ratio", "cost, ratio to the monitor's"], rows))
    save(options.json, {"costs": [{**asdict(one), "ratios": one.ratios} for one in found]})


if __name__ == "__main__":
    main()
