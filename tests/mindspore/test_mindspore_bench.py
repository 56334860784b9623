"""The benchmark of MindSpore runs to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "mindspore_overhead.py"


def test_every_configuration_has_a_figure(tmp_path: Path) -> None:
    # The project need not be installed for its tests to run.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(BENCH.parents[1]), os.environ.get("PYTHONPATH")])),
    }
    ended = subprocess.run(
        [sys.executable, str(BENCH), "--quick"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    table = [line.split("|")[1:-1] for line in ended.stdout.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in table[2:]] == ["gradients", "gradients, weights, moments", "activations", "everything"]
    assert all(float(row[1]) > 0 for row in table[2:])
