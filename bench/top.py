"""What a training run pays while `trainermon top` watches it, and what watching takes.

    python bench/top.py

One process trains, with everything recorded to Parquet. Beside it a second one looks every two seconds, as the command does. In
every other turn it is stopped, so the ratios compare turns of one run: CPU time and wall time of the training process. The two
share a machine: on two cores or more the watcher has one of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from stepping import Worker
from tables import aligned, save

ROOT = Path(__file__).resolve().parents[1]
RECORDED = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
}
WATCH = """
import sys, time
from pathlib import Path
from monitor.top.watching import Watch
watch = Watch(Path(sys.argv[1]))
print("ready", flush=True)
looks, used = 0, time.process_time()
while True:
    watch.look()
    looks += 1
    Path(sys.argv[2]).write_text(f"{looks} {time.process_time() - used}")
    time.sleep(2.0)
"""


def turns(options: argparse.Namespace, directory: Path) -> tuple[list[dict[str, dict[str, Any]]], float]:
    """Of each round the turn that was watched and the one that was not; and the CPU seconds of a look."""
    config = directory / "config.json"
    config.write_text(json.dumps(RECORDED | {"format": ["parquet"], "ops": ["norm", "min", "max", "mean"]}))
    looked = directory / "looked"
    with Worker(sys.executable, options.model, config, directory / "worker", "ours", {"PYTHONPATH": str(ROOT)}) as worker:
        worker.receive()
        worker.ask(step=options.steps)
        command = [sys.executable, "-c", WATCH, str(worker.output), str(looked)]
        watcher = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
        try:
            assert watcher.stdout is not None
            watcher.stdout.readline()
            rounds = []
            for number in range(options.rounds):
                found = {}
                for way in ("watched", "alone") if number % 2 else ("alone", "watched"):
                    watcher.send_signal(signal.SIGCONT if way == "watched" else signal.SIGSTOP)
                    found[way] = worker.ask(step=options.steps)
                rounds.append(found)
        finally:
            watcher.kill()
            watcher.wait()
        worker.ask(finish=True)
    looks, used = map(float, looked.read_text().split())
    return rounds, used / looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=200, help="of a turn")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rounds, look = turns(options, Path(directory))
    ratios = {of: median(one["watched"][of] / one["alone"][of] for one in rounds) for of in ("cpu", "thread", "wall")}
    print(aligned(("watched / alone", "ratio"), [[of, f"{ratio:.3f}"] for of, ratio in ratios.items()]))
    print(f"a look takes {look * 1e3:.0f} ms of CPU time")
    save(options.json, {"ratios": ratios, "look": look, "rounds": rounds})


if __name__ == "__main__":
    main()
