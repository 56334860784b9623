"""The demo: two ranks train a small GPT on the standard library's sources while the monitor looks on.

    make demo

or, where the project is installed beside a torch:

    torchrun --standalone --nproc-per-node 2 tools/demo/train.py --steps 60
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cost import WARM_UP_INTERVALS, Cost, measure
from gpt import GPT, GPTConfig
from job import output_directory, process_group, write_report
from merged import merge_and_show, runs_of_this_job
from monitor import load_config
from monitor.pytorch import TrainerMon
from report import show
from text import random_batch, standard_library

CONFIG = Path(__file__).with_name("monitor_config.json")
BATCH = 8


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("monitor").setLevel(logging.INFO)  # it says at the start what it will write
    before = run_directories()
    with process_group("make demo"):
        seconds = train(arguments.steps)
        dist.barrier()  # every rank has closed its files
        first = dist.get_rank() == 0
    if first:
        conclude(measure(seconds, load_config(CONFIG).step_interval), before)


def conclude(cost: Cost | None, earlier: set[Path]) -> None:
    """Say what was recorded and what it cost, merge it, and write the report.

    Args:
        earlier: Directories of ranks that were there before.
    """
    console, runs = Console(), runs_of_this_job(output_directory(), earlier)
    show(console, [run.directory for run in runs], cost)
    merged = merge_and_show(console, runs)
    report = write_report(merged, runs[0].manifest.job_id, merged / "report.html")
    console.print(f"Report in {report}: open it in a browser.", soft_wrap=True, highlight=False, markup=False)


def train(steps: int) -> list[float]:
    """Train for ``steps`` steps. Returns the seconds that each took."""
    torch.manual_seed(0)
    config = GPTConfig()
    model = DistributedDataParallel(GPT(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, generator = standard_library(), torch.Generator().manual_seed(dist.get_rank())

    monitor = TrainerMon(str(CONFIG), params_have_main_grad=False)
    monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)

    seconds = []
    with monitor, progress_of(steps) as progress:
        for _ in range(steps):
            started = time.perf_counter()
            tokens, following = random_batch(text, BATCH, config.context, generator)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            monitor.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
            progress.update(0, advance=1, loss=loss.item(), rate=1 / seconds[-1])
    return seconds


def progress_of(steps: int) -> Progress:
    """A progress bar with one task, drawn by the first rank alone."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:.1f} steps/s"),
    )
    progress = Progress(*columns, disable=dist.get_rank() != 0)
    progress.add_task("training", total=steps, loss=float("nan"), rate=0.0)
    return progress


def run_directories() -> set[Path]:
    """The directories of ranks in the place that recordings go to."""
    return set(output_directory().glob("*-rank*-*"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    interval = load_config(CONFIG).step_interval
    enough = (WARM_UP_INTERVALS + 1) * interval
    parser.add_argument("--steps", type=_positive, default=60, help=f"from {enough} on, the demo can say what monitoring cost")
    return parser.parse_args()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    main()
