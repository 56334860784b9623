"""What was dumped before a process was killed is there; and two ranks write beside each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dumping import Dump
from typer.testing import CliRunner

from monitor.dump.command import app
from monitor.dump.records import FILE

ROOT = Path(__file__).parents[3]

KILLED = """
import os, signal, sys, time
import torch, torch.nn.functional as F
from pathlib import Path
from monitor.dump.records import FILE
from monitor.pytorch import PrecisionDebugger

debugger = PrecisionDebugger(dump_path=sys.argv[1], task=sys.argv[2])
debugger.start(rank_id=0)
for n in range(20):
    F.relu(torch.full((3,), float(n)))
records = Path(sys.argv[1]) / "step0" / "rank0" / FILE
while b"relu.19" not in records.read_bytes():
    time.sleep(0.01)
if sys.argv[3] == "torn":
    with open(records, "ab") as file:
        file.write(b'00000000 {"entry": "half of')
os.kill(os.getpid(), signal.SIGKILL)
"""

EXITS = """
import sys
import torch, torch.nn.functional as F
from monitor.pytorch import PrecisionDebugger

debugger = PrecisionDebugger(dump_path=sys.argv[1])
debugger.start(rank_id=0)
F.relu(torch.ones(3))
"""

RANKS = """
import os, sys
import torch, torch.distributed as dist
from monitor.pytorch import PrecisionDebugger

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
debugger = PrecisionDebugger(dump_path=sys.argv[1] + "/out")
debugger.start()
x = torch.full((2,), float(rank + 1))
dist.all_reduce(x)
gathered = [torch.zeros(2), torch.zeros(2)]
dist.all_gather(gathered, x)
debugger.stop()
debugger.step()
dist.destroy_process_group()
"""


def started(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], env=environment)


@pytest.mark.parametrize(("task", "end"), [("statistics", "whole"), ("tensor", "torn")])
def test_what_a_killed_process_had_dumped_is_recovered(tmp_path: Path, task: str, end: str) -> None:
    assert started(KILLED, tmp_path, task, end).wait(60) == -signal.SIGKILL
    outcome = CliRunner().invoke(app, [str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    dump = Dump(tmp_path)
    assert list(dump.data) == [f"Functional.relu.{n}.forward" for n in range(20)]
    assert [entry["output"][0]["Max"] for entry in dump.data.values()] == list(range(20))
    assert not (dump.directory / FILE).exists()
    assert len(dump.stack) == 1


def test_a_process_that_ends_without_stop_has_complete_files(tmp_path: Path) -> None:
    assert started(EXITS, tmp_path).wait(60) == 0
    dump = Dump(tmp_path)
    assert list(dump.data) == ["Functional.relu.0.forward"]
    assert not (dump.directory / FILE).exists()


def test_two_ranks_have_a_directory_each_and_what_they_have_sent_and_received(tmp_path: Path) -> None:
    ranks = [started(RANKS, tmp_path, rank) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    for rank in range(2):
        directory = tmp_path / "out" / "step0" / f"rank{rank}"
        data = json.loads((directory / "dump.json").read_text())["data"]
        reduced, gathered = data["Distributed.all_reduce.0.forward"], data["Distributed.all_gather.0.forward"]
        assert reduced["input_args"][0]["Max"] == rank + 1
        assert reduced["output"][0]["Max"] == 3.0
        assert [leaf["Max"] for leaf in gathered["output"][0]] == [3.0, 3.0]
