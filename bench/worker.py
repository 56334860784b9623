"""A process that trains a model, with one monitor or none, a turn at a time, when it is asked to.

Requests come on standard input and replies go to standard output, a JSON object a line:

    at the start          ->  {"parameters": 29479936, "torch": "2.13.0"}
    {"step": 10}          ->  {"cpu": 0.06, "thread": 0.05, "wall": 0.05, "loss": 5.5}     seconds for these 10 steps
    {"modules": [names]}  ->  {}                                                           once they are imported
    {"finish": true}      ->  {"cpu": 0.01, "thread": 0.0, "wall": 0.01, "peak": 310000000, "modules": [names]}

``cpu`` is the CPU time of the whole process since the reply before, so that it holds what a writer thread does between two
turns; ``thread`` that of the training thread, ``wall`` the clock's, both since the request.
What monitors print goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import torch
from models import Workload, workload
from stepping import UNMONITORED
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools" / "demo"))
from gpt import GPT, GPTConfig

MONITORS = {"ours": "monitor.pytorch", "before": "monitor.pytorch", "peer": "msprobe.pytorch"}


class Training:
    """A model, its optimizer and the batch that it learns by heart."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(0)
        self.model = GPT(GPTConfig(**workload.shape))
        self.micro_steps = workload.micro_steps
        self._compiled = workload.compiled
        self._called: nn.Module = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        batch = torch.randint(workload.shape["vocabulary"], (workload.batch, workload.shape["context"] + 1))
        self._tokens, self._following = batch[:, :-1], batch[:, 1:].flatten()

    def compile(self) -> None:
        """Compile the model, if the workload says so. Hooks are in place by then."""
        if self._compiled:
            self._called = torch.compile(self.model)

    def step(self) -> torch.Tensor:
        for _ in range(self.micro_steps):
            loss = F.cross_entropy(self._called(self._tokens).flatten(0, 1), self._following)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Stopwatch:
    """CPU time of the process since it was last read; of this thread, and wall time, since it was last started."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self.start()

    def start(self) -> None:
        self._thread, self._wall = time.thread_time(), time.perf_counter()

    def read(self) -> dict[str, float]:
        wall, thread = time.perf_counter() - self._wall, time.thread_time() - self._thread
        before, self._cpu = self._cpu, time.process_time()
        return {"cpu": self._cpu - before, "thread": thread, "wall": wall}


def main() -> None:
    arguments = parse_arguments()
    replies = take_standard_output()
    torch.set_num_threads(1)
    training = Training(workload(arguments.workload))
    close = attach(arguments.monitor, arguments.config, training)
    training.compile()
    reply(replies, parameters=sum(p.numel() for p in training.model.parameters()), torch=torch.__version__)
    serve(sys.stdin, replies, training, close)


def take_standard_output() -> TextIO:
    """Standard output for replies alone; what anybody else prints goes to standard error from now on."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def attach(monitor: str, config: str, training: Training) -> Callable[[], None]:
    """Attach a monitor to ``training``. Returns what waits until all it has seen is written."""
    if monitor == UNMONITORED:
        return lambda: None
    watching = importlib.import_module(MONITORS[monitor]).TrainerMon(config, params_have_main_grad=False)
    watching.set_monitor(training.model, grad_acc_steps=training.micro_steps, optimizer=training.optimizer)
    # The peer writes within the step and has nothing to close.
    return getattr(watching, "close", lambda: None)


def serve(requests: Iterable[str], replies: TextIO, training: Training, close: Callable[[], None]) -> None:
    """Answer requests until the last one, or until there is no one left to ask."""
    stopwatch = Stopwatch()
    for line in requests:
        request = json.loads(line)
        stopwatch.start()
        if "step" in request:
            for _ in range(request["step"]):
                loss = training.step()
            reply(replies, **stopwatch.read(), loss=loss.item())
        elif "modules" in request:
            import_all(request["modules"])
            reply(replies)
        else:
            close()
            reply(replies, **stopwatch.read(), peak=peak_memory(), modules=list(sys.modules))
            return


def import_all(names: Iterable[str]) -> None:
    for name in names:
        # A few names in sys.modules are no modules that could be imported by them, and every library fails in its own way.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def peak_memory() -> int:
    """The most bytes that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reply(replies: TextIO, **fields: Any) -> None:
    print(json.dumps(fields), file=replies, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help="see models.py")
    parser.add_argument("monitor", choices=[UNMONITORED, *MONITORS])
    parser.add_argument("config", help="the monitor's JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
