"""A data-parallel rank under dynamic monitoring, then without it; ``dynamic_ranks.py CONFIG RESULT [STEP [copy|flip]]``.

It trains until ``RESULT/stop`` is there, each step after a random delay. Its losses, with and without the monitor, and what is
left patched in torch.distributed go to ``RESULT/rank{rank}.json``. In the step ``STEP`` a parameter of rank 1 that takes no
part in training has a gradient that is NaN; with ``flip``, a bit of a weight of rank 1 is flipped instead. With ``copy`` rank 0
watches one more model, which it trains alone, and it first.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monitor.recording.recording as recording
from monitor.anomalies import copy_exchange, odd_copies
from monitor.dynamic import JobConnection
from monitor.dynamic.step_boundary import PollingIntervals
from monitor.pytorch import TrainerMon

torch.set_num_threads(1)
PACE = PollingIntervals(idle=0.04, open=0.01, waiting=0.005, patience=5.0, bound=8.0, file=0.02)
ORIGINAL = dict(vars(dist.ProcessGroup))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.apart = nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Rank:
    def __init__(self, result: Path, faulty_step: int, more: str) -> None:
        self.number = dist.get_rank()
        self._watches_more, self._flips = more == "copy" and self.number == 0, more == "flip"
        self._stop, self._faulty_step = result / "stop", faulty_step

    def train(self, config: str | None, steps: int | None) -> list[str]:
        """The losses: of as many steps as are asked for, or until it is asked to stop."""
        torch.manual_seed(0)
        network = Network()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["apart.weight"])
        model = DistributedDataParallel(network)
        optimizer = torch.optim.AdamW(network.layers.parameters(), lr=0.001)
        monitor = None if config is None else TrainerMon(config, params_have_main_grad=False)
        others = [self._one_more(network, monitor)] if monitor is not None and self._watches_more else []
        if monitor is not None:
            monitor.set_monitor(model, 1, optimizer)
        torch.manual_seed(self.number + 1)
        delays = random.Random(self.number)
        losses: list[str] = []
        while not self._ends(len(losses), steps):
            loss = model(torch.randn(4, 4)).square().mean()
            loss.backward()
            if self.number == 1 and len(losses) == self._faulty_step:
                self._break(network)
            if monitor is not None:
                time.sleep(delays.choice([0.0, 0.0, 0.002, 0.006]))
            optimizer.step()
            network.zero_grad()
            for other, own in others:
                other(torch.ones(4, 4)).sum().backward()
                own.step()
                own.zero_grad()
            losses.append(loss.item().hex())
            if monitor is not None:
                print(f"step {len(losses)}", flush=True)
        if monitor is not None:
            monitor.close()
        return losses

    def _break(self, network: Network) -> None:
        if self._flips:
            network.layers[0].weight.detach().view(-1).view(torch.int32)[3] ^= 1
        else:
            (network.apart.weight * float("nan")).sum().backward()

    def _one_more(self, network: Network, monitor: TrainerMon) -> tuple[nn.Module, torch.optim.Optimizer]:
        other = copy.deepcopy(network)
        own = torch.optim.SGD(other.parameters(), lr=0.001)
        monitor.set_monitor(other, 1, own)
        return other, own

    def _ends(self, done: int, steps: int | None) -> bool:
        """All ranks go by what rank 0 sees."""
        told = torch.tensor([float(self._stop.exists() if steps is None else done == steps)])
        dist.broadcast(told, 0)
        return bool(told.item())


def main(config: str, result: str, step: str = "-1", more: str = "") -> None:
    copy_exchange.SHORTEST_PAUSE_S = 0.02
    copy_exchange.MOST_WAITING = odd_copies.PATIENCE = 500  # as long as with turns of a second
    recording.JobConnection = partial(JobConnection, intervals=PACE)  # type: ignore[misc]
    dist.init_process_group("gloo")
    rank = Rank(Path(result), int(step), more)
    monitored = rank.train(config, None)
    patched = [name for name, what in vars(dist.ProcessGroup).items() if ORIGINAL.get(name) is not what]
    plain = rank.train(None, len(monitored))
    told = {"monitored": monitored, "plain": plain, "patched": patched}
    Path(result, f"rank{rank.number}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["DYNAMIC_MONITOR"] = "True"
    main(*sys.argv[1:])
