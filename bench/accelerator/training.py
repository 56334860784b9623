"""What a step on an accelerator pays for being monitored: GPT-2, a Llama of 1 B parameters, and a Llama of 16 small layers.

    python bench/accelerator/training.py

Each training is a process of its own, because what it compiles and allocates is part of what is measured; they run one after
another, in several rounds and an order that changes. Weights are random, bfloat16, and so is the batch, which never changes.
Times are the device's, by events, medians over steps and rounds. Added memory is the peak of the device's allocator above that
of the unmonitored training. One more step runs where every wait for the device is an error: `waits` says whether one came.
Another is traced: `launches` counts what the device was asked to do in it, and `busy` is the time that this took there.
Beside what activations add stands the least that they can: the time in which each distinct tensor, and each gradient of one, is
read once as fast as the device copies.

NVIDIA's nvdlfw-inspect is not among those that are measured: its statistics of tensors are asked for by the modules of
Transformer Engine, and these models have none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from devices import add_arguments, device_of, named, until_stopped
from overhead import CONFIGS, OPS
from stepping import rotated
from tables import Progress, aligned, save

UNMONITORED, OURS, PEER, WANDB = "unmonitored", "monitor", "mindstudio-probe", "wandb.watch"
NEEDED: Final = {PEER: "msprobe", WANDB: "wandb"}
STATE = CONFIGS["gradients"] | CONFIGS["weights"] | CONFIGS["moments"]
RECORDED = {name: CONFIGS[name] for name in ("health", "gradients", "activations", "everything")} | {"training state": STATE}
MODELS = ("gpt2", "llama", "launches")
MEGABYTE: Final = 1 << 20
CHILD = Path(__file__).with_name("training_process.py")


class TrainingError(Exception):
    """A training ended early. Says how its error output ended."""


@dataclass(frozen=True, slots=True)
class Way:
    """One training: what it trains, how, and who watches what."""

    model: str
    mode: str
    by: str = UNMONITORED
    recorded: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a way took, in each round.

    Attributes:
        steps: Median seconds of a step.
        peak: Bytes of device memory.
        waits: What waited for the device in the training thread; empty if nothing did, None if that was not to be found out.
        launches: What the device was asked to do in a step; None without a trace.
        busy: Seconds that it took there.
        least: Seconds that reading each distinct activation and gradient of one once takes, at a copy's speed.
    """

    way: Way
    steps: list[float]
    peak: list[int]
    waits: str | None
    launches: int | None
    busy: float | None
    least: float | None


def main() -> int:
    options = parse_arguments()
    device = device_of(options)
    ways, left_out = ways_of(options)
    progress, failed = Progress(), []
    found: dict[Way, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="training-") as directory, until_stopped():
        for number in range(options.rounds):
            for way in rotated(ways, number):
                progress.show(f"round {number + 1} of {options.rounds}: {' '.join(asdict(way).values())}")
                place = Path(directory, f"{number}-{ways.index(way)}")
                try:
                    found[way].append(trained(way, str(device), place, options))
                except TrainingError as failure:
                    failed.append(f"{' '.join(asdict(way).values())} failed in round {number + 1}:\n{failure}")
    progress.end()
    costs = [cost_of(way, replies) for way, replies in found.items() if replies]
    print(", ".join(f"{name} {value}" for name, value in named(device).items()) + f"; {options.rounds} rounds\n")
    print(table(costs))
    print("\n".join([*left_out, *failed]))
    save(options.json, named(device) | {"left_out": left_out, "failed": failed, "costs": [asdict(cost) for cost in costs]})
    return 1 if failed else 0


def ways_of(options: argparse.Namespace) -> tuple[list[Way], list[str]]:
    """The trainings that can be measured, and why others cannot."""
    missing = [by for by, module in NEEDED.items() if importlib.util.find_spec(module) is None]
    left_out = [f"{by} is left out: there is no module {NEEDED[by]} for this interpreter." for by in missing]
    ways = []
    for model in options.models:
        for mode in options.modes:
            ways += [Way(model, mode), *(Way(model, mode, OURS, recorded) for recorded in options.recorded)]
            ways += [Way(model, mode, by, "everything") for by in NEEDED if by not in missing]
    return ways, left_out


def trained(way: Way, device: str, place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a process says that has trained."""
    place.mkdir()
    config = place / "config.json"
    config.write_text(json.dumps({"targets": {}, "format": "csv", "ops": OPS, **RECORDED.get(way.recorded, {})}))
    request = asdict(way) | {"device": device, "steps": options.steps, "quick": options.quick, "config": str(config)}
    environment = os.environ | {"MONITOR_OUTPUT_DIR": str(place / "output"), "WANDB_MODE": "offline", "WANDB_DIR": str(place)}
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(request)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise TrainingError(done.stderr[-2000:])
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reply


def cost_of(way: Way, replies: Sequence[dict[str, Any]]) -> Cost:
    waits = replies[0]["waits"]
    least = [reply["least"] for reply in replies if "least" in reply]
    steps, peaks = [median(reply["steps"]) for reply in replies], [reply["peak"] for reply in replies]
    seen = replies[0]["launches"], replies[0]["busy"]
    return Cost(way, steps, peaks, waits, *seen, median(least) if least else None)


def table(costs: Sequence[Cost]) -> str:
    plain = {(cost.way.model, cost.way.mode): cost for cost in costs if cost.way.by == UNMONITORED}
    header = ["model", "mode", "by", "recorded", "step, ms", "added", "least", "added MB", "share of memory", "waits"]
    header += ["launches", "busy, ms"]
    return aligned(header, list(lines(costs, plain)), names=4)


def lines(costs: Sequence[Cost], plain: dict[tuple[str, str], Cost]) -> Iterator[list[str]]:
    for cost in costs:
        if (beside := plain.get((cost.way.model, cost.way.mode))) is None:  # stopped before it was measured
            continue
        step, usual = median(cost.steps), median(beside.steps)
        added, peak = median(cost.peak) - median(beside.peak), median(beside.peak)
        waits = "not found out" if cost.waits is None else "yes" if cost.waits else "no"
        share = f"{added / peak:.2%}" if peak else ""
        bound = plain.get((cost.way.model, "eager"))
        least = bound.least if bound is not None and cost.way.recorded == "activations" else None
        times = [f"{1e3 * step:.3f}", f"{step / usual - 1:.2%}", "" if least is None else f"{least / usual:.2%}"]
        trace = ["", ""] if cost.busy is None else [str(cost.launches), f"{1e3 * cost.busy:.3f}"]
        yield [*asdict(cost.way).values(), *times, f"{added / MEGABYTE:.1f}", share, waits, *trace]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--recorded", nargs="+", choices=RECORDED, default=list(RECORDED))
    parser.add_argument("--rounds", type=int, default=2, help="processes for each training (2)")
    parser.add_argument("--steps", type=int, default=30, help="of each, after those to warm up (30)")
    add_arguments(parser, "see that it runs: models of a few neurons, 1 round of 2 steps")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 2
    return options


if __name__ == "__main__":
    sys.exit(main())
