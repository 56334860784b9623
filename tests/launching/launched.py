"""Runs programs as users do, and reads what was recorded of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
from launching import Launcher
from two_ranks import TORCHRUN

ROOT: Final = Path(__file__).resolve().parents[2]
RUN: Final = [sys.executable, "-m", "monitor.launching.cli"]
WITH_TORCHRUN: Final = [sys.executable, *TORCHRUN]

Ended = subprocess.CompletedProcess[str]


def ended(command: list[str], cwd: Path, *path: Path, **variables: str) -> Ended:
    """Run a command to its end.

    Args:
        path: Folders that it imports from, besides the project.
        variables: Of its environment, besides those of the test.
    """
    found = os.pathsep.join([*map(str, (ROOT, *path)), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1", "MONITOR_OUTPUT_DIR": "recorded", **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


class Directly:
    """Runs programs without the command ``trainermon run``, in forks of a process that has imported their framework."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def __call__(
        self, program: Path, *arguments: object, to: Path, ranks: int = 1, preload: str = "compiler", **variables: str
    ) -> Ended:
        """Run a program as one or more ranks to its end.

        Args:
            to: Where it records.
            preload: What it finds imported; see ``Launcher.start``.
            variables: Of its environment, besides those of the test.
        """
        how = {"base": to, "preload": preload, "brief": True, **variables}
        if ranks > 1:
            started = self._launcher.start_ranks(ranks, str(program), *arguments, **how)
        else:
            started = [self._launcher.start(str(program), *arguments, **how)]
        done = [one.end() for one in started]
        status = next((one.status for one in done if one.status != 0), 0)
        return Ended([], status, "".join(one.out for one in done), "".join(one.err for one in done))


def each_ended(command: list[str], hows: tuple[str, ...], cwd: Path) -> dict[str, Ended]:
    """Start a program once for several runs. Each ran in the folder of its name; see ``scripts/several.py``."""
    done = ended([*command, *hows], cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return {how: _left_in(cwd / how) for how in hows}


def _left_in(folder: Path) -> Ended:
    status, out, errors = ((folder / name).read_text() for name in ("status", "out", "errors"))
    return Ended([], int(status), out, errors)


def weights(done: Ended) -> list[str]:
    """What the ranks print of their weights, in no order."""
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(re.findall(r"-?0x[01]\.[0-9a-f]+p[+-]\d+", done.stdout))


def rows(base: Path, first: int) -> dict[str, list[dict[str, Any]]]:
    """The rows from step ``first`` on, by rank and names of tensors within wrappers. Numbers, and no order of calls."""
    found: dict[str, list[dict[str, Any]]] = {}
    for directory in base.glob("*-rank*"):
        table = [row for path in directory.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
        kept = [{key: value for key, value in row.items() if key != "call_id"} for row in table if row["step"] >= first]
        for row in kept:
            row["name"] = row["name"].replace("module.", "")
        names = sorted({row["name"] for row in kept})
        found[f"{directory.name.split('-')[-2]} {names}"] = sorted(kept, key=str)
    return found
