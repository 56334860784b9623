"""What features of a higher order cost: a GPT trained with each of them, and without.

    python bench/features.py

Every other step is collected, in one process of one thread. The CPU time of a collected step is divided by that of the next:
the median over the rounds is reported, and beside it the first step.

The memory that attention takes is measured in a process of its own for each sample: the rise of its peak while entropy and
greatest weight of a sequence are computed, of 8 heads of 64 in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from models import WORKLOADS, Workload
from overhead import CONFIGS, OPS
from tables import Progress, aligned, save
from torch import nn
from worker import Training

from monitor.pytorch import TrainerMon
from monitor.pytorch.features.attention import Scores, spread
from monitor.stats.histograms import PERCENTILES

WARM_UP_ROUNDS = 3
SAMPLES = ((1024, 1), (8192, 1), (8192, 8), (32768, 1))
"""Lengths of sequences, and how many heads of one row of the batch are looked at."""

HOOKS = {
    "attention_hook": "attn",
    "attention_head_hook": "attn",
    "linear_hook": None,
    "moe_router_weight_hook": "mlp.0",
    "moe_router_logit_hook": "mlp.0",
}
"""What of each block a hook is given; of a GPT without experts, a layer of it takes the place of a router."""

ACTIVATIONS = {"activation_hook, units": "h.{}.mlp.1", "activation_hook, blocks": "h.{}"}
"""The outputs that are looked at in each block: those of the activation in its MLP, and its own."""
EXPERTS = (8, 64, 256)
"""Numbers of experts of the routers whose choices are counted."""
ROUTED = {"layers": 8, "width": 512, "tokens": 512}
QUICKLY_ROUTED = {"layers": 1, "width": 16, "tokens": 8}


@dataclass(frozen=True)
class Cost:
    """Of a feature: ratios of the CPU time of a collected step to that of the next one, and that of the first step."""

    feature: str
    rows: int
    first: float
    cpu: list[float]


@dataclass(frozen=True)
class Sampled:
    """Of one attention: megabytes that the peak rises by, and CPU milliseconds."""

    length: int
    heads: int
    added: float
    milliseconds: float


def targets_of(hook: str, layers: int) -> dict[str, list[str]]:
    within = HOOKS[hook]
    return {hook: [] if within is None else [f"h.{layer}.{within}" for layer in range(layers)]}


COMMON: Mapping[str, Any] = {"step_interval": 2, "format": "csv", "ops": ["norm"], "run_numbers": False}
EVERYTHING = CONFIGS["everything"] | {"ops": OPS}
ON_REQUEST = ("skewness", "kurtosis", "absmean", "smallest_nonzero")

OF_THE_STEP: Mapping[str, dict[str, Any]] = {
    "mg_direction": {"mg_direction": True},
    "update_ratio": {"update_ratio": True},
    "optimizer_health": {"optimizer_health": True},
    "both of these": {"update_ratio": True, "optimizer_health": True},
    "ur_distribution": {"ur_distribution": True, "format": ["csv", "hdf5"]},
    "gradients, norms alone": {"wg_distribution": True},
    "gradients, underflow_e4m3": {"wg_distribution": True, "ops": ["norm", "underflow_e4m3"]},
    "everything": EVERYTHING,
    "everything, higher moments": EVERYTHING | {"ops": [*OPS, *ON_REQUEST]},
    "everything, percentiles": EVERYTHING | {"ops": [*OPS, *PERCENTILES]},
    "everything, both": EVERYTHING | {"ops": [*OPS, *ON_REQUEST, *PERCENTILES]},
}


def configured(workload: Workload, directory: Path) -> Mapping[str, Path]:
    """A configuration for each feature, two for all rows of attention, and one for all features."""
    layers = workload.shape["layers"]
    every = {hook: targets_of(hook, layers) for hook in HOOKS}
    wanted: dict[str, dict[str, Any]] = {hook: {"l2_targets": targets} for hook, targets in every.items()}
    wanted["attention_hook, all of it"] = {"l2_targets": every["attention_hook"], "sa_heads": 0, "sa_batch_rows": 0}
    wanted["attention_head_hook, all rows"] = {"l2_targets": every["attention_head_hook"], "sa_batch_rows": 0}
    for name, output in ACTIVATIONS.items():
        wanted[name] = {"l2_targets": {"activation_hook": [output.format(layer) for layer in range(layers)]}}
    wanted["all hooks"] = {"l2_targets": {hook: names for targets in every.values() for hook, names in targets.items()}}
    wanted |= OF_THE_STEP
    paths = {name: directory / f"config-{number}.json" for number, name in enumerate(wanted)}
    for name, fields in wanted.items():
        paths[name].write_text(json.dumps({**COMMON, "recording_l2_features": "l2_targets" in fields, **fields}))
    return paths


class Router(nn.Module):
    """Returns the weights and the numbers of two experts for each token."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) / width**0.5)
        self.num_experts, self.top_k = experts, 2

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.linear(x, self.weight).softmax(-1).topk(self.top_k)


class RoutedLayer(nn.Module):
    """A router, and a dense MLP in place of experts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = Router(width, experts)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x) * self.gate(x)[0].sum(-1, keepdim=True)


class RoutedTraining:
    """Layers with routers, which learn a batch that never changes."""

    def __init__(self, experts: int, layers: int, width: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(RoutedLayer(width, experts) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._tokens = torch.randn(tokens, width)

    def step(self) -> None:
        self.model(self._tokens).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def costs(workload: Workload, only: re.Pattern[str], rounds: int, progress: Progress) -> Iterator[Cost]:
    torch.set_num_threads(1)
    training = Training(workload)
    with tempfile.TemporaryDirectory(prefix="features-") as directory:
        for name, config in configured(workload, Path(directory)).items():
            if not only.search(name):
                continue
            progress.show(name)
            yield cost_of(name, config, training, Path(directory, name), rounds)
        shape = QUICKLY_ROUTED if workload.name == "quick" else ROUTED
        for experts in EXPERTS:
            name = f"moe_router_load_hook, {experts} experts"
            if not only.search(name):
                continue
            progress.show(name)
            targets = {"moe_router_load_hook": [f"{layer}.gate" for layer in range(shape["layers"])]}
            config = Path(directory, f"{experts}.json")
            config.write_text(json.dumps({**COMMON, "recording_l2_features": True, "l2_targets": targets}))
            yield cost_of(name, config, RoutedTraining(experts, **shape), Path(directory, name), rounds)


def cost_of(name: str, config: Path, training: Training | RoutedTraining, output: Path, rounds: int) -> Cost:
    os.environ["MONITOR_OUTPUT_DIR"] = str(output)
    with TrainerMon(config, params_have_main_grad=False) as monitor:
        monitor.set_monitor(training.model, grad_acc_steps=1, optimizer=training.optimizer)
        ratios = [stepping(training) / stepping(training) for _ in range(WARM_UP_ROUNDS + rounds)]
    return Cost(name, count_rows(output) // len(ratios), ratios[0], ratios[WARM_UP_ROUNDS:])


def stepping(training: Training | RoutedTraining) -> float:
    """CPU seconds of the process for one step. Every other one is collected."""
    begun = time.process_time()
    training.step()
    return time.process_time() - begun


def count_rows(directory: Path) -> int:
    return sum(len(path.read_text().splitlines()) - 1 for path in directory.rglob("*_*-*.csv"))


def sampled(length: int, heads: int) -> Sampled:
    command = [sys.executable, __file__, "--sample", str(length), str(heads)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    return Sampled(length, heads, **json.loads(told.stdout))


def sample(length: int, heads: int) -> None:
    """In a process of its own: what one attention takes, to standard output."""
    torch.set_num_threads(1)
    query, key = (torch.randn(1, 8, length, 64, dtype=torch.bfloat16) for _ in range(2))
    spread(Scores(query[:, :, :64], key[:, :, :64], True, 0.125))
    torch.bmm(torch.randn(1, 256, 64), torch.randn(1, 64, 256))
    before, begun = peak(), time.process_time()
    spread(Scores(query, key, True, 0.125), heads=heads)
    print(json.dumps({"added": peak() - before, "milliseconds": 1e3 * (time.process_time() - begun)}))


def peak() -> float:
    """Megabytes. What ``getrusage`` tells begins with what the parent of a process held."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024 / 1e6


def main() -> None:
    options = parse_arguments()
    if options.sample:
        sample(*options.sample)
        return
    progress = Progress()
    workload = WORKLOADS["quick" if options.quick else "gpt"]
    found = list(costs(workload, options.only, 2 if options.quick else options.rounds, progress))
    progress.show("attention")
    samples = [sampled(*one) for one in (SAMPLES[:1] if options.quick else SAMPLES) if options.only.search("attention")]
    progress.end()
    rows = [[one.feature, f"{one.rows}", f"{median(one.cpu):.3f}", f"{one.first:.2f}"] for one in found]
    print(aligned(("feature", "rows a step", "CPU ×", "first step ×"), rows))
    rows = [[f"{one.length}", f"{one.heads}", f"{one.added:.0f}", f"{one.milliseconds:.0f}"] for one in samples]
    print("\n" + aligned(("sequence", "heads", "added MB", "CPU ms"), rows) if samples else "")
    save(options.json, {"costs": [asdict(one) for one in found], "samples": [asdict(one) for one in samples]})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few rounds, to see that it runs")
    parser.add_argument("--only", type=re.compile, default="", help="a regular expression: features whose names it finds")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--sample", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
