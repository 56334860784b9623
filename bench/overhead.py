"""What being monitored costs: a GPT trained with no monitor, with mindstudio-probe and with this project, side by side.

    python bench/overhead.py --peer-python .venv-peer/bin/python
    python bench/overhead.py --monitors ours --before ../earlier    # a checkout of an earlier version, with its C parts built

Each of the three is a process of its own with one thread, and they step in turn. The CPU time of a monitored process is
divided by that of the unmonitored one in the same round, and the median over the rounds is reported: what disturbs the machine
disturbs all three. CPU time is the whole process's, with its writer thread and the time between its turns; the last step also
waits until everything is written.

Added memory is the peak of a monitored process above that of the unmonitored one. Another process trains unmonitored too, but
imports first whatever the monitored one had imported by its end; what was added beyond that is the monitor's own. It contains
what the allocator keeps and wastes, which differs between equal runs; how much was really alive is measured once more with an
allocator that keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles

from costs import Cost, cost_of
from models import WORKLOADS
from stepping import WorkerError
from tables import Progress, aligned, save
from trials import Trial

OPS = ["min", "max", "mean", "norm", "zeros", "nans"]
GRADIENTS = {"wg_distribution": True}
WEIGHTS = {"param_distribution": True}
MOMENTS = {"mv_distribution": True}
ACTIVATIONS = {"xy_distribution": True, "all_xy": True}
CONFIGS = {
    "gradients": GRADIENTS,
    "weights": WEIGHTS,
    "moments": MOMENTS,
    "activations": ACTIVATIONS,
    "everything": GRADIENTS | WEIGHTS | MOMENTS | ACTIVATIONS,
    "everything, replicas checked": GRADIENTS | WEIGHTS | MOMENTS | ACTIVATIONS | {"replica_check": True},
}
HEALTH = Path(__file__).resolve().parents[1] / "configs" / "health.json"
CONFIGS["health"] = json.loads(HEALTH.read_text())
"""What ``monitor.watch`` records. The peer has no such configuration, so it is measured only if it is asked for."""
PEER_PYTHON = Path(__file__).resolve().parents[1] / ".venv-peer" / "bin" / "python"
TITLES = {"ours": "monitor", "peer": "mindstudio-probe", "before": "monitor before"}
COLUMNS: dict[str, Callable[[Cost], str]] = {
    "model": lambda cost: cost.model,
    "recorded": lambda cost: cost.recorded,
    "by": lambda cost: TITLES[cost.by],
    "rows a step": lambda cost: f"{cost.rows:.0f}",
    "CPU ×": lambda cost: f"{median(cost.cpu):.3f}",
    "quartiles": lambda cost: "{:.3f} to {:.3f}".format(*quantiles(cost.cpu, n=4, method="inclusive")[::2]),
    "in all ×": lambda cost: f"{cost.cpu_in_all:.3f}",
    "thread ×": lambda cost: f"{median(cost.thread):.3f}",
    "wall ×": lambda cost: f"{median(cost.wall):.3f}",
    "flush ms": lambda cost: f"{cost.flush:.1f}",
    "added MB": lambda cost: f"{cost.added:.0f}",
    "imports MB": lambda cost: f"{cost.imports:.0f}",
    "beyond MB": lambda cost: f"{cost.added - cost.imports:.0f}",
    "alive MB": lambda cost: f"{cost.alive:.0f}",
}


def main() -> int:
    options = parse_arguments()
    pythons, left_out = interpreters(options)
    progress = Progress()
    try:
        costs = list(measure(options, pythons, progress)) if pythons else []
    except WorkerError as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    progress.end()
    say(costs, left_out, options.rounds)
    save(options.json, {"machine": machine(), "left_out": left_out, "costs": [asdict(cost) for cost in costs]})
    return 0


def interpreters(options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """The interpreter of each monitor that can be measured, and why others cannot."""
    pythons = {name: sys.executable for name in options.monitors if name == "ours"}
    pythons |= {"before": sys.executable} if options.before is not None else {}
    if "peer" not in options.monitors:
        return pythons, []
    # Not resolved: the interpreter of a virtual environment is a link, and its own path is what makes it one.
    python = os.path.abspath(options.peer_python)
    reason = why_not(python)
    return (pythons, [f"{TITLES['peer']} is left out: {reason}"]) if reason else (pythons | {"peer": python}, [])


def why_not(python: str) -> str:
    """Why the peer cannot be measured with this interpreter; empty if it can."""
    find = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, ('torch', 'msprobe'))))"
    try:
        found = subprocess.run([python, "-c", find], capture_output=True, check=False).returncode == 0
    except OSError:
        return f"there is no interpreter {os.path.relpath(python)}; `make peer` makes it."
    return "" if found else f"{os.path.relpath(python)} has no torch or no msprobe."


def measure(options: argparse.Namespace, pythons: dict[str, str], progress: Progress) -> Iterator[Cost]:
    """Run every trial that was asked for, one after the other.

    Their files are removed at the end: for some seconds ext4 looks at each inode that has become free, and a trial that begins
    after thousands were removed would pay for it with every file.
    """
    with tempfile.TemporaryDirectory(prefix="overhead-") as directory:
        for model, recorded in product(options.models, options.configs):
            place = Path(directory, f"{model}-{recorded}")
            place.mkdir()
            config = write_config(place, recorded)
            show = partial(progress.show, f"{model}, {recorded}")
            trial = Trial(WORKLOADS[model], config, pythons, place, show, options.before)
            times, peaks = trial.times(options.rounds), trial.peaks()
            for name in pythons:
                yield cost_of(name, trial.workload, recorded, times, peaks)


def write_config(directory: Path, recorded: str) -> Path:
    """A file that both monitors understand."""
    path = directory / "config.json"
    path.write_text(json.dumps({"targets": {}, "format": "csv", "ops": OPS, **CONFIGS[recorded]}))
    return path


def say(costs: Sequence[Cost], left_out: Sequence[str], rounds: int) -> None:
    """Print what was found."""
    for model, plain in {cost.model: cost.plain for cost in costs}.items():
        print(f"{model}: {plain.parameters / 1e6:.3g} M parameters, torch {plain.torch}, one thread, {rounds} rounds;")
        print(f"unmonitored {plain.step:.4g} ms of CPU time a step, {plain.memory:.0f} MB.")
    if costs:
        rows = [[cell(cost) for cell in COLUMNS.values()] for cost in costs]
        print(f"\n{aligned(list(COLUMNS), rows, names=3)}\n")
    for line in left_out:
        print(line)
    for cost in costs:
        if not cost.same_losses:
            print(f"The losses of {cost.model} changed when {TITLES[cost.by]} recorded {cost.recorded}.")


def machine() -> dict[str, object]:
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "tiny", "both"), default="both")
    parser.add_argument(
        "--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS)[:-1], metavar="CONFIG", help=", ".join(CONFIGS)
    )
    parser.add_argument(
        "--monitors", nargs="+", choices=("ours", "peer"), default=["ours", "peer"], metavar="MONITOR", help="ours, peer"
    )
    parser.add_argument("--rounds", type=at_least_two, default=15, help="counted after the warm-up (15)")
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="an interpreter with torch and mindstudio-probe")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an earlier version of the project, measured beside")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument("--quick", action="store_true", help="see that it runs: a few neurons, everything, 2 rounds")
    options = parser.parse_args()
    options.models = ("gpt", "tiny") if options.model == "both" else (options.model,)
    if options.quick:
        options.models, options.configs, options.rounds = ("quick",), ["everything"], 2
    return options


def at_least_two(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
