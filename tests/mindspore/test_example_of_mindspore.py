"""``docs/examples/with_mindspore.py`` on two ranks: with its line, and unchanged under ``trainermon run``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, free_port, running

import monitor

EXAMPLE = ROOT / "docs" / "examples" / "with_mindspore.py"
STEPS = 4
PLACE = ("call_id", "global_name", "dp", "tp", "pp", "stage")


class Job:
    """What two ranks printed, and what was recorded of them."""

    def __init__(self, directory: Path, text: str, *before: str) -> None:
        directory.mkdir()
        (directory / "program.py").write_text(text)
        programs = Path(sys.executable).parent
        msrun = [str(programs / "msrun"), "--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}"]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "MONITOR_OUTPUT_DIR": "recorded",
        }
        try:
            command = [*before, *msrun, "--log_dir=log", "--join=True", "program.py"]
            done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, timeout=240, check=False)
        finally:
            for pid in running(directory):
                os.kill(pid, signal.SIGKILL)
        said = [path.read_text() for path in sorted(directory.glob("log/worker_*.log"))]
        assert done.returncode == 0, said
        self.warnings = [line for text in said for line in text.splitlines() if "[monitor] WARNING" in line]
        self.weights = [re.findall(r"^weights (\S+)$", text, flags=re.MULTILINE) for text in said]
        norms = [re.findall(r"^step (\d+) norm (\S+)$", text, flags=re.MULTILINE) for text in said]
        assert norms[0] == norms[1]
        self.norms = {int(step): float(norm) for step, norm in norms[0]}
        self.directory = directory

    def rows(self, kind: str, first: int) -> list[dict[str, Any]]:
        """Of the first rank from step ``first`` on, with the names in the network that ``Model`` was given. Without a group
        its place among the ranks is not known.
        """
        run = monitor.open_run(self.directory / "recorded")
        table = run.rows(kind, steps=range(first, STEPS), ranks=[0]).to_pylist()
        kept = [{key: value for key, value in row.items() if key not in PLACE} for row in table]
        return sorted(({**row, "name": row["name"].replace("_backbone.", "")} for row in kept), key=str)


def test_the_example_records_what_the_weights_show(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    unchanged = re.sub(r"^.*  # \+$\n", "", text, flags=re.MULTILINE)
    assert "monitor" not in unchanged
    plain, by_hand = Job(tmp_path / "plain", unchanged), Job(tmp_path / "by_hand", text)
    launched = Job(tmp_path / "launched", unchanged, sys.executable, "-m", "monitor.launching.cli")
    assert plain.weights == by_hand.weights == launched.weights
    assert by_hand.warnings == launched.warnings == []
    for job, first in ((by_hand, 0), (launched, 1)):
        recorded = monitor.open_run(job.directory / "recorded").total_norm("grad_reduced").to_pylist()
        assert [row["step"] for row in recorded] == [*range(first, STEPS)]
        for row in recorded:
            assert row["total_norm"] == pytest.approx(plain.norms[row["step"]], rel=1e-4), row["missing"]
    for kind in ("grad_reduced", "param_updated"):
        assert launched.rows(kind, 1) == by_hand.rows(kind, 1) != []
