"""A process that was forked inside a dump dumps what is its own, and leaves its parent's dump alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from monitor.pytorch import PrecisionDebugger


def forked(child: Callable[[], object]) -> int:
    """The exit status of a child: 0 if all went well, SIGALRM's number if it hung."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def names(directory: Path) -> list[str]:
    return list(json.loads((directory / "dump.json").read_text())["data"])


def test_a_child_dumps_into_a_directory_of_its_own(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start(rank_id=0)
    F.relu(torch.ones(1))

    def child() -> None:
        F.silu(torch.ones(1))  # of the parent's dump: recorded by no one
        debugger.start(rank_id=1)
        F.gelu(torch.ones(1))
        debugger.stop()
        debugger.step()
        debugger.close()

    status = forked(child)
    F.relu(torch.ones(1))
    debugger.stop()
    debugger.step()
    debugger.close()
    assert status == 0
    assert names(tmp_path / "step0" / "rank0") == ["Functional.relu.0.forward", "Functional.relu.1.forward"]
    assert names(tmp_path / "step0" / "rank1") == ["Functional.gelu.0.forward"]


def test_a_child_that_stops_and_closes_what_its_parent_started_changes_nothing(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=tmp_path)
    debugger.start(rank_id=0)
    F.relu(torch.ones(1))

    def child() -> None:
        debugger.stop()
        debugger.step()
        debugger.close()

    status = forked(child)
    debugger.step()
    debugger.close()
    assert status == 0
    assert names(tmp_path / "step0" / "rank0") == ["Functional.relu.0.forward"]
