"""How much longer MindSpore compiles a training step that the monitor measures.

    python bench/mindspore_compiling.py --before ../before

A process compiles a network's step once: the CPU time of its first step, less that of the shortest later one. Processes without
the monitor, of an earlier checkout and of this one take turns, and the median of each is reported. Everything is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GLOG_v", "3")  # before MindSpore is imported: it says much on standard error

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from tables import Progress, aligned

SIZE = 16
KINDS = ("xy_distribution", "all_xy", "wg_distribution", "param_distribution", "mv_distribution")


class Mlp(nn.Cell):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.body = nn.SequentialCell(*(part for _ in range(layers) for part in (nn.Dense(SIZE, SIZE), nn.ReLU())))

    def construct(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class Block(nn.Cell):
    """Of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.LayerNorm((SIZE,)), nn.LayerNorm((SIZE,))
        self.q, self.k, self.v, self.out = (nn.Dense(SIZE, SIZE) for _ in range(4))
        self.up, self.act, self.down = nn.Dense(SIZE, 4 * SIZE), nn.GELU(), nn.Dense(4 * SIZE, SIZE)

    def construct(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.out(ops.matmul(ops.softmax(ops.matmul(self.q(y), self.k(y).T), -1), self.v(y)))
        return x + self.down(self.act(self.up(self.norm_after(x))))


class Transformer(nn.Cell):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.CellList([Block() for _ in range(layers)])

    def construct(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class LstmCell(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Dense(2 * SIZE, 4 * SIZE)

    def construct(self, x: Tensor, state: Any) -> Any:
        hidden, memory = state
        i, f, g, o = self.gates(ops.concat((x, hidden), -1)).split(SIZE, 1)
        memory = ops.sigmoid(f) * memory + ops.sigmoid(i) * ops.tanh(g)
        return ops.sigmoid(o) * ops.tanh(memory), memory


class Lstm(nn.Cell):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.cell, self.calls = LstmCell(), calls

    def construct(self, x: Tensor) -> Tensor:
        hidden, memory = x * 0.0, x * 0.0
        for i in range(self.calls):
            hidden, memory = self.cell(x * (i + 1.0), (hidden, memory))
        return hidden.square().mean()


class Step(nn.Cell):
    def __init__(self, net: nn.Cell) -> None:
        super().__init__()
        self.net, self.optimizer = net, nn.Adam(net.trainable_params(), 0.01)
        self.gradients_of = mindspore.value_and_grad(net, None, self.optimizer.parameters)

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        self.optimizer(gradients)
        return loss


NETWORKS: dict[str, Callable[[], nn.Cell]] = {
    "MLP of 12 layers": lambda: Mlp(12),
    "transformer of 3 blocks": lambda: Transformer(3),
    "LSTM of 8 calls": lambda: Lstm(8),
}
HOW = ("GRAPH_MODE", "@jit")


def main() -> None:
    arguments = parse_arguments()
    if arguments.one:
        print(json.dumps(compiled(*arguments.one)))
        return
    here = Path(__file__).parents[1]
    checkouts = {"without": None, "before": arguments.before, "now": here}
    cases = [case for case in product(NETWORKS, HOW) if arguments.network in case[0]]
    print(f"mindspore {mindspore.__version__} on {mindspore.get_context('device_target')}")
    seconds: dict[tuple[str, ...], list[float]] = {}
    progress = Progress()
    for number, case, (name, checkout) in product(range(arguments.rounds), cases, checkouts.items()):
        if name != "before" or checkout:
            progress.show("compiling", f"{number}/{arguments.rounds}")
            seconds.setdefault((*case, name), []).append(in_a_process(case, checkout, here))
    progress.end()
    print(aligned(["network", "compiled", *checkouts], [row_of(case, seconds, checkouts) for case in cases], 2))


def row_of(case: tuple[str, str], seconds: dict[tuple[str, ...], list[float]], names: Any) -> list[str]:
    plain = median(seconds[*case, "without"])
    each = [median(found) if (found := seconds.get((*case, name))) else None for name in names]
    return [*case, *("" if one is None else f"{one:.2f} s ({one / plain:.1f})" for one in each)]


def in_a_process(case: tuple[str, str], checkout: Path | None, here: Path) -> float:
    command = [sys.executable, __file__, "--one", *case, "" if checkout is None else "monitored"]
    paths = os.pathsep.join(filter(None, [str((checkout or here).resolve()), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as directory:
        environment = {"PYTHONPATH": paths, "MONITOR_OUTPUT_DIR": directory, "MONITOR_COMPILED_CODE": "1"}
        ended = subprocess.run(
            command, env={**os.environ, **environment}, cwd=directory, capture_output=True, text=True, check=True
        )
    return float(ended.stdout.splitlines()[-1])


def compiled(network: str, how: str, monitored: str) -> float:
    """The seconds of the CPU that compiling takes."""
    from monitor.mindspore import TrainerMon

    if how == "GRAPH_MODE":
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
    step = Step(NETWORKS[network]().set_train(True))
    if monitored:
        Path("config.json").write_text(json.dumps({"ops": ["norm"], **dict.fromkeys(KINDS, True)}))
        TrainerMon("config.json").set_monitor(step.net, 1, step.optimizer)
    call = step if how == "GRAPH_MODE" else mindspore.jit(step.construct)
    x = Tensor(np.random.default_rng(0).normal(size=(6, SIZE)).astype(np.float32))
    seconds = []
    for _ in range(4):
        began = time.process_time()
        call(x).asnumpy()
        seconds.append(time.process_time() - began)
    return seconds[0] - min(seconds[1:])


def parse_arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="an earlier checkout to compare with", metavar="CHECKOUT")
    parser.add_argument("--network", default="", help="only networks whose name contains this")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (3)")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
