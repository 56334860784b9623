"""MindSpore: what was dumped before a process was killed is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from cells_to_dump import Dump
from typer.testing import CliRunner

from monitor.dump.cli import app
from monitor.dump.files import FILE

ROOT = Path(__file__).parents[3]

BEGINNING = """
import os, signal, sys, time
from pathlib import Path
import mindspore as ms
from mindspore import nn, ops
from monitor.mindspore import PrecisionDebugger

network = nn.SequentialCell(nn.Dense(3, 3), nn.ReLU()).set_train(True)
debugger = PrecisionDebugger(dump_path=sys.argv[1], level="mix", task=sys.argv[2])
debugger.start(network, rank_id=0)

def loss(x):
    y = network(x).sum()
    ops.square(y)
    return y
"""

KILLED = """
records = Path(sys.argv[1]) / "step0" / "rank0" / ".dump.records"

def killed_in_mid_step(x):
    y = loss(x)
    while b"square" not in records.read_bytes():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

ms.value_and_grad(killed_in_mid_step, None, network.trainable_params())(ops.ones((1, 3)))
"""

EXITS = """
ms.value_and_grad(loss, None, network.trainable_params())(ops.ones((1, 3)))
"""


def ended(script: str, *arguments: object) -> int:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    command = [sys.executable, "-c", BEGINNING + script, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=False, timeout=600).returncode


def test_what_a_process_that_is_killed_in_mid_step_had_dumped_is_recovered(tmp_path: Path) -> None:
    assert ended(KILLED, tmp_path, "tensor") == -signal.SIGKILL
    assert not list(tmp_path.glob("step0/*/dump.json"))
    outcome = CliRunner().invoke(app, [str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    dump = Dump(tmp_path)
    forwards = ["Cell.0.Dense.forward.0", "Cell.1.ReLU.forward.0", "Tensor.sum.0.forward", "Functional.square.0.forward"]
    assert [name for name in dump.data if not name.startswith("Primitive")][-4:] == forwards
    (given,) = dump.data["Cell.0.Dense.forward.0"]["input_args"]
    assert (given["shape"], given["Max"], given["Norm"]) == ([1, 3], 1.0, np.sqrt(3.0))
    assert dump.tensor(given).tolist() == [[1.0, 1.0, 1.0]]
    assert not (dump.directory / FILE).exists()


def test_a_process_that_ends_without_stop_has_complete_files(tmp_path: Path) -> None:
    assert ended(EXITS, tmp_path, "statistics") == 0
    dump = Dump(tmp_path)
    assert {"Functional.square.0.forward", "Cell.0.Dense.parameters_grad.0"} <= set(dump.data)
    assert not (dump.directory / FILE).exists()
