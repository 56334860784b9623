"""What a precision dump costs: a training step with it against one without, in turn, in one process.

python bench/precision_dump.py
python bench/precision_dump.py --workload tiny --level L0 --task tensor
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from models import WORKLOADS
from tables import Progress, aligned, save
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "demo"))

from gpt import GPT, GPTConfig
from monitor.pytorch import PrecisionDebugger

WARM_UP = 2


def stepping(workload: str) -> tuple[torch.nn.Module, Callable[[], None], Callable[[], None]]:
    """A model, and the two halves of a step: forward and backward, and the update."""
    chosen = WORKLOADS[workload]
    config = GPTConfig(**chosen.shape)
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(config.vocabulary, (chosen.batch, config.context))

    def gradients() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return model, gradients, update


def measured(workload: str, level: str, task: str, rounds: int, directory: Path) -> dict[str, float]:
    """Median seconds of a step without a dump, and with one of its forward and backward, the making of the files apart."""
    model, gradients, update = stepping(workload)
    debugger = PrecisionDebugger(dump_path=directory, level=level, task=task)
    plain, dumped, caught = [], [], []
    for _ in range(WARM_UP + rounds):
        begun = time.perf_counter()
        gradients()
        update()
        plain.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        debugger.start(model)
        gradients()
        paused = time.perf_counter()
        debugger.stop()
        files = time.perf_counter() - paused
        update()
        paused = time.perf_counter()
        debugger.step()
        files += time.perf_counter() - paused
        dumped.append(time.perf_counter() - begun)
        caught.append(dumped[-1] - files)
    debugger.close()
    medians = {name: statistics.median(one[WARM_UP:]) for name, one in (("plain", plain), ("step", caught), ("whole", dumped))}
    return {**medians, "ratio": medians["step"] / medians["plain"], "ratio_with_files": medians["whole"] / medians["plain"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=list(WORKLOADS), default="gpt")
    parser.add_argument("--level", choices=["L0", "L1", "mix"], default="L1")
    parser.add_argument("--task", choices=["statistics", "tensor"], default="statistics")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    progress = Progress()
    progress.show(f"{asked.workload}, {asked.level}, {asked.task}")
    with tempfile.TemporaryDirectory() as directory:
        found = measured(asked.workload, asked.level, asked.task, asked.rounds, Path(directory))
    progress.end()
    times = [f"{1000 * found[name]:.1f}" for name in ("plain", "step", "whole")]
    ratios = [f"{found[name]:.2f}" for name in ("ratio", "ratio_with_files")]
    header = ["workload", "level", "task", "step ms", "dumped ms", "with files ms", "ratio", "ratio with files"]
    print(aligned(header, [[asked.workload, asked.level, asked.task, *times, *ratios]], names=3))
    save(asked.json, found)


if __name__ == "__main__":
    main()
