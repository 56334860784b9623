"""What a step costs whose device waits for the host: a Llama of 16 small layers, monitored and not, in turns.

    python bench/accelerator/turns.py

One process attaches a monitor, trains, closes it, and goes on with the next. So the turns share one host and one device, which
differ between processes by more than what is measured. A step's time is that of the host until the device has done all steps of
a turn, divided by these. Beside it is the CPU time of the thread that trains, and of autograd's own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import torch
from devices import add_arguments, device_of, named, until_stopped
from overhead import CONFIGS, write_config
from tables import Progress, aligned, save
from training_process import attach, workload

NOTHING: Final = "nothing"
WARM_UP: Final = 5
TICK: Final = os.sysconf("SC_CLK_TCK")

Turn = tuple[float, float, float]
"""Milliseconds of a step: in all, of the training thread, and of autograd's."""


def main() -> int:
    options = parse_arguments()
    device = device_of(options)
    torch.manual_seed(0)
    model, tokens = workload("launches", device, options.quick)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)

    def train() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, list[Turn]] = {recorded: [] for recorded in (NOTHING, *options.recorded)}
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="turns-") as directory, until_stopped():
        os.environ["MONITOR_OUTPUT_DIR"] = directory
        for number in range(options.rounds):
            for recorded, turns in found.items():
                progress.show(f"round {number + 1} of {options.rounds}: {recorded}")
                request = {"by": "unmonitored"}
                if recorded != NOTHING:
                    request = {"by": "monitor", "config": str(write_config(Path(directory), recorded))}
                close = attach(request, model, optimizer)
                turns.append(timed(train, options.steps, device))
                close()
    progress.end()
    print(", ".join(f"{name} {value}" for name, value in named(device).items()) + f"; {options.rounds} rounds\n")
    print(aligned(["recorded", "step, ms", "÷ nothing", "training", "backward"], lines(found), names=1))
    save(options.json, named(device) | {"turns": found})
    return 0


def timed(train: Callable[[], None], steps: int, device: torch.device) -> Turn:
    for _ in range(WARM_UP):
        train()
    synchronize(device)
    began, thread, backward = time.perf_counter(), time.thread_time(), backward_time()
    for _ in range(steps):
        train()
    spent = time.thread_time() - thread
    synchronize(device)
    each = time.perf_counter() - began, spent, backward_time() - backward
    return each[0] / steps * 1e3, each[1] / steps * 1e3, each[2] / steps * 1e3


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def backward_time() -> float:
    """Seconds of CPU time of the threads in which autograd computes for devices; on the host there are none."""
    seconds = 0.0
    for task in Path("/proc/self/task").iterdir():
        name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if name.startswith("pt_autograd"):
            seconds += sum(map(int, fields.split()[11:13])) / TICK
    return seconds


def lines(found: dict[str, list[Turn]]) -> list[list[str]]:
    if not found[NOTHING]:  # stopped before
        return []
    usual = median(step for step, *_ in found[NOTHING])
    return [line(recorded, turns, usual) for recorded, turns in found.items() if turns]


def line(recorded: str, turns: Sequence[Turn], usual: float) -> list[str]:
    step, training, backward = (median(values) for values in zip(*turns, strict=True))
    return [recorded, f"{step:.1f}", f"{step / usual:.2f}", f"{training:.1f}", f"{backward:.1f}"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", nargs="+", choices=CONFIGS, default=["health", "gradients", "activations", "everything"])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (3)")
    parser.add_argument("--steps", type=int, default=40, help="of a turn, after those to warm up (40)")
    add_arguments(parser, "see that it runs: a model of a few neurons, 1 round of 2 steps")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 2
    return options


if __name__ == "__main__":
    sys.exit(main())
