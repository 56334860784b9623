"""A dump is no part of what is compiled, scripted or traced inside it, nor of what is compiled later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dumping import dumping
from torch import Tensor, nn

ROOT = Path(__file__).parents[3]

IN_FORKS = """
import json, os, sys, traceback
import torch
from torch import nn
from monitor.pytorch import PrecisionDebugger

ended = {}
for name, script in json.load(sys.stdin).items():
    if (child := os.fork()) == 0:
        try:
            debugger = PrecisionDebugger(dump_path=os.path.join(sys.argv[1], name))
            exec(script)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ended[name] = os.waitpid(child, 0)[1]
print(json.dumps(ended))
"""
"""Runs scripts, each in a process that has compiled nothing: compilers look torch's functions up once."""

COMPILES = """
debugger.start()
torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
debugger.stop()
torch._dynamo.reset()
layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
with torch.no_grad():
    torch.compile(layer, backend="eager", fullgraph=True)(torch.ones(2, 3, 8))
"""

SCRIPTS = """
debugger.start()
torch.jit.script(nn.MultiheadAttention(8, 2).eval())
debugger.stop()
torch.jit.script(nn.MultiheadAttention(8, 2).eval())
"""

OPTIMIZES = """
from torch._dynamo.utils import counters

def trained(dumps):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(layer.parameters(), foreach=True)
    compiled = torch.compile(optimizer.step, backend="eager")
    frames = []
    for dump in dumps:
        if dump:
            debugger.start()
        layer(torch.ones(3, 4)).sum().backward()
        compiled()
        debugger.stop()
        debugger.step()
        optimizer.zero_grad()
        frames.append(counters["frames"]["total"])
    return frames, [parameter.detach().numpy().tobytes() for parameter in layer.parameters()]

plain, expected = trained([False] * 4)
dumped, found = trained([True, False, True, False])
assert found == expected
assert dumped[0] == plain[0], (plain, dumped)  # nothing of a dump is compiled
assert dumped[1:] == [dumped[1]] * 3, dumped  # compiled once for steps with it and once for those without
"""


SCRIPTS_OF = {"compiled": COMPILES, "scripted": SCRIPTS, "optimizer": OPTIMIZES}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], str]:
    """How each script has ended, and what they said of it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", IN_FORKS, str(tmp_path_factory.mktemp("dumps"))]
    done = subprocess.run(
        command, check=False, env=environment, input=json.dumps(SCRIPTS_OF), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("name", SCRIPTS_OF)
def test_what_torch_first_compiles_inside_a_dump_compiles_then_and_later(name: str, ended: tuple[dict[str, int], str]) -> None:
    statuses, said = ended
    assert statuses[name] == 0, said[-4000:]


class Around(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_trace_has_nothing_of_a_dump_in_it(tmp_path: Path, level: str) -> None:
    network, x = Around(nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval(), torch.ones(2, 4)
    expected = [node.kind() for node in torch.jit.trace(network, x, check_trace=False).inlined_graph.nodes()]
    with dumping(tmp_path, network, level=level):
        traced = torch.jit.trace(network, x, check_trace=False)
    assert [node.kind() for node in traced.inlined_graph.nodes()] == expected
