"""A demo of what alert rules are for: in one of two ranks a number goes bad, and the ranking finds out where.

    make demo-fault

or, where the project is installed beside a torch, with the fault somewhere else:

    torchrun --standalone --nproc-per-node 2 tools/demo/find_fault.py --seed 3
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fault import Place, drawn, plant
from gpt import GPT, GPTConfig
from job import output_directory, process_group, write_report
from monitor.anomalies.events import EVENTS_FOLDER
from monitor.anomalies.ranking.ranking import Ranked, ranking_of
from monitor.pytorch import TrainerMon
from monitor.terminal import FLAWED
from text import random_batch, standard_library

CONFIG = Path(__file__).with_name("fault_config.json")
MODEL = GPTConfig(context=64, width=64)
BATCH, MICRO_STEPS = 4, 2
STEPS, LOG_INTERVAL = 20, 4
LATE = range(13, 16)
"""The fault is in one of these steps, none of which is logged."""

FAULT = Place(rank=1, step=14, micro_step=1, kind="actv", tensor="module.h.2.mlp.1.output")
"""Without a seed: what the GELU of a block gives."""


def main() -> None:
    seed = parse_arguments().seed
    with process_group("make demo-fault"):
        planted = train(seed)
        dist.barrier()  # every rank has closed its files
        first = dist.get_rank() == 0
    if first:
        conclude(planted, output_directory() / EVENTS_FOLDER)


def train(seed: int | None) -> Place:
    """Train until after something went wrong. Returns where that was."""
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text, generator = standard_library(), torch.Generator().manual_seed(dist.get_rank())

    place = FAULT if seed is None else drawn(seed, model, dist.get_world_size(), LATE, MICRO_STEPS)
    if place.rank == dist.get_rank():
        plant(place, model, MICRO_STEPS)

    with TrainerMon(str(CONFIG), params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, grad_acc_steps=MICRO_STEPS, optimizer=optimizer, dp_group=dist.group.WORLD)
        for step in range(STEPS):
            loss = sum(micro_steps(model, text, generator))
            monitor.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and step % LOG_INTERVAL == 0:
                print(f"step {step:2d}  loss {loss:.2f}", flush=True)
    return place


def micro_steps(model: DistributedDataParallel, text: Tensor, generator: torch.Generator) -> list[float]:
    """Forward and backward of each micro-batch. Returns what each adds to the loss of the step."""
    losses = []
    for number in range(MICRO_STEPS):
        tokens, following = random_batch(text, BATCH, MODEL.context, generator)
        model.require_backward_grad_sync = number == MICRO_STEPS - 1
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()) / MICRO_STEPS
        loss.backward()
        losses.append(loss.item())
    return losses


def conclude(planted: Place, events: Path) -> None:
    """Rank what fired, in a process of its own that learns no more than where the events are; only then say what was planted.

    Raises:
        SystemExit: It cannot be ranked, or the ranking does not begin with what was planted.
    """
    print(f"\n$ trainermon rank-anomalies {events}", flush=True)
    ranking = subprocess.run([sys.executable, "-m", "monitor", "rank-anomalies", str(events)], check=False)
    if ranking.returncode != FLAWED:  # of a job in which a rule has fired
        raise SystemExit(f"The ranking ended with status {ranking.returncode}.")
    job = ranking_of(events, most=1).job.members[0].events.judged.job_id
    report = write_report(events.parent, job, events.parent / "report.html")
    found = found_in(events)
    print(f"\nReport:  {report}\nPlanted: {planted}\nFound:   {found or 'no origin'}", flush=True)
    if found != planted:
        raise SystemExit("The ranking has not found what was planted.")


def found_in(events: Path) -> Place | None:
    """Of the first line of the ranking; ``None`` if that is no origin."""
    ranked = ranking_of(events, most=1).ranked
    return place_of(ranked[0]) if ranked and ranked[0].is_origin else None


def place_of(one: Ranked) -> Place:
    series = one.subject.recorded_as
    return Place(one.member.rank, one.step, one.micro_step, series.kind, series.name)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="puts the fault somewhere else: any whole number")
    return parser.parse_args()


if __name__ == "__main__":
    main()
