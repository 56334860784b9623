"""A rank that trains in step with the others, and asks at every step what holds; ``agreeing.py STORE CONFIG RESULT``.

``STORE`` is ``tcp``, ``own`` or a file. What ``collect_times`` was in each step goes to ``RESULT/rank{rank}.json``, with the
longest time that a step was held up. It ends before the step from which ``collect_times`` is 999, or when a rank is gone.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from monitor.config import load_config
from monitor.coordinator.manifest_format import ConfigurationRecord
from monitor.coordinator.store import STORES, Rendezvous
from monitor.dynamic import Controller, JobConnection
from monitor.dynamic.step_boundary import PollingIntervals
from monitor.failures import Failures

LAST = 999
PACE = PollingIntervals(idle=0.05, open=0.01, waiting=0.005, patience=0.3, bound=0.9, file=0.02)


class ConfigJournal:
    def __init__(self) -> None:
        self.records: list[dict[str, object]] = []
        self.undecided_since: int | None = None

    def configured(self, record: ConfigurationRecord) -> None:
        self.records.append(record.model_dump(mode="json"))

    def undecided(self, since: int | None) -> None:
        self.undecided_since = since


def main(store: str, path: str, result: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store in ("tcp", "own"):
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    found = own_store(rank, world) if store == "own" else dist.distributed_c10d._get_default_store()
    job = JobConnection(rank, world, found, "job/", dist.is_initialized, intervals=PACE)
    del found
    journal = ConfigJournal()
    control = Controller(path, load_config(path), job, Failures(rank))
    control.start(journal)
    ran, longest = train(control, random.Random(rank))
    told = {"ran": ran, "longest": longest, "records": journal.records, "undecided_since": journal.undecided_since}
    Path(result, f"rank{rank}.json").write_text(json.dumps(told))


def own_store(rank: int, world: int) -> Any:
    """Of this package, which processes use whose launcher gives them an address and no store."""
    rendezvous = Rendezvous.beside(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world)
    return STORES.at(rendezvous, rank, serves=rank == 0, key=lambda: b"the key of the job")


def train(control: Controller, delays: random.Random) -> tuple[list[int], float]:
    ran: list[int] = []
    longest = 0.0
    while True:
        before = time.monotonic()
        control.begin(len(ran))
        longest = max(longest, time.monotonic() - before)
        if control.config.collect_times == LAST:
            return ran, longest
        ran.append(control.config.collect_times)
        if len(ran) == 5:
            print("training", flush=True)
        time.sleep(delays.choice([0.0, 0.001, 0.003]))
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:  # the other rank is gone
            return ran, longest


main(*sys.argv[1:])
