"""The benchmarks of MindSpore run to their ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def rows_of(tmp_path: Path, script: str, *arguments: str) -> list[list[str]]:
    """What it prints, below the header."""
    # The project need not be installed for its tests to run.
    paths = os.pathsep.join(filter(None, [str(BENCH.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(BENCH / script), *arguments]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    table = [line.split("|")[1:-1] for line in ended.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


def test_every_configuration_has_a_figure(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "mindspore_overhead.py", "--quick")
    assert [row[0] for row in rows] == ["gradients", "gradients, weights, moments", "activations", "everything"]
    assert all(float(row[1].split()[0]) > 0 and float(row[2]) > 0 for row in rows)


def test_a_step_that_is_dumped_has_a_figure(tmp_path: Path) -> None:
    [row] = rows_of(tmp_path, "mindspore_precision_dump.py", "--workload", "quick", "--rounds", "1", "--level", "mix")
    assert row[:3] == ["quick", "mix", "statistics"]
    assert float(row[6]) > 0


def test_a_step_that_is_compiled_with_the_monitor_has_a_figure(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "mindspore_compiling.py", "--network", "LSTM", "--rounds", "1")
    assert [row[:2] for row in rows] == [["LSTM of 8 calls", "GRAPH_MODE"], ["LSTM of 8 calls", "@jit"]]
    assert all(float(row[4].split()[0]) > float(row[2].split()[0]) > 0 for row in rows)
