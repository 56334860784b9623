"""What recording communication costs a call: many small all-reduces, unmonitored, with this monitor and with mindstudio-probe.

    python bench/collectives.py --peer-python .venv-peer/bin/python

Two gloo ranks with one thread each. The three jobs run side by side in turns of one step, so that what disturbs the machine
disturbs all. Of every step the CPU time of the calling thread and the wall time are taken, from the first call to the end of
the optimizer's step, and the median over the steps is divided by the number of calls. No stacks are taken after the first
step, which is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

OPS = ["min", "max", "mean", "norm", "zeros", "nans"]


def work(by: str, rank: int, place: Path, steps: int, calls: int, size: int) -> None:
    """One rank of one job; waits for its turn before each step."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(by, place, model, optimizer)
    x = torch.ones(size)
    print("ready", flush=True)
    for _ in range(steps):
        sys.stdin.readline()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        cpu, wall = time.thread_time(), time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(x)
            x.fill_(1.0)
        optimizer.step()
        print(json.dumps([time.thread_time() - cpu, time.perf_counter() - wall]), flush=True)
    dist.destroy_process_group()


def attach(by: str, place: Path, model: Any, optimizer: Any) -> None:
    """Attach the monitor that is meant, recording outputs of communication and nothing else."""
    if by == "none":
        return
    config = {"targets": {}, "format": "csv", "ops": OPS, "cc_distribution": {"enable": True, "cc_codeline": []}}
    path = place / f"{by}-{os.getpid()}.json"
    path.write_text(json.dumps(config))
    os.environ["MONITOR_OUTPUT_DIR"] = str(place / f"out-{by}")
    with contextlib.redirect_stdout(sys.stderr):
        if by == "ours":
            from monitor.pytorch import TrainerMon
        else:
            from msprobe.pytorch import TrainerMon
        TrainerMon(str(path), params_have_main_grad=False).set_monitor(model, grad_acc_steps=1, optimizer=optimizer)


class Job:
    """Two ranks."""

    def __init__(self, by: str, python: str, base: Path, arguments: list[str]) -> None:
        place = base / by
        place.mkdir()
        environment = os.environ | {"PYTHONPATH": "" if by == "peer" else str(Path(__file__).resolve().parents[1])}
        self.errors = (place / "errors").open("wb")
        self._ranks = [
            subprocess.Popen(
                [python, __file__, "--work", by, "--rank", str(rank), "--place", str(place), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        for rank in self._ranks:
            self._said(rank, "ready")

    def step(self) -> list[float]:
        """One step: CPU and wall seconds of rank 0."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        told = [json.loads(self._said(rank, "[")) for rank in self._ranks]
        first: list[float] = told[0]
        return first

    def end(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                try:
                    rank.communicate(timeout=60)
                except subprocess.TimeoutExpired:
                    rank.kill()
        self.errors.close()

    def _said(self, rank: subprocess.Popen[str], beginning: str) -> str:
        """The next line that begins so; what a monitor prints besides is passed over."""
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith(beginning):
                return line
        raise SystemExit(f"a rank ended early:\n{Path(self.errors.name).read_text()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--peer-python", help="an interpreter that has mindstudio-probe; left out, only this project is measured"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--calls", type=int, default=1000, help="all-reduces a step")
    parser.add_argument("--size", type=int, default=64, help="elements of each")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.rank, given.place, given.steps, given.calls, given.size)
    else:
        report(given)


def report(given: argparse.Namespace) -> None:
    """Run the jobs in turns and print what each adds a call."""
    arguments = ["--steps", str(given.steps), "--calls", str(given.calls), "--size", str(given.size)]
    pythons = {"none": sys.executable, "ours": sys.executable, "peer": given.peer_python}
    with tempfile.TemporaryDirectory() as base:
        jobs = {by: Job(by, python, Path(base), arguments) for by, python in pythons.items() if python}
        try:
            taken = {by: [] for by in jobs}  # type: dict[str, list[list[float]]]
            for _ in range(given.steps):
                for by, job in jobs.items():
                    taken[by].append(job.step())
        finally:
            for job in jobs.values():
                job.end()
    each = {by: [median(one) / given.calls * 1e6 for one in zip(*of[1:], strict=True)] for by, of in taken.items()}
    print(f"{given.calls} all-reduces of {given.size} elements a step; microseconds a call")
    print(f"{'':18}{'CPU':>10}{'added':>10}{'wall':>10}{'added':>10}")
    titles = {"none": "no monitor", "ours": "monitor", "peer": "mindstudio-probe"}
    for by, (cpu, wall) in each.items():
        base_cpu, base_wall = each["none"]
        print(f"{titles[by]:18}{cpu:10.1f}{cpu - base_cpu:10.1f}{wall:10.1f}{wall - base_wall:10.1f}")


if __name__ == "__main__":
    main()
