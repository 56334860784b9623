"""The demo, run as its reader runs it, and the arithmetic of its claim about cost."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from monitor.sinks.csv import read_csv

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "tools" / "demo"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a demo of five steps printed, and where it recorded."""
    base = tmp_path_factory.mktemp("demo")
    run = run_python(base, *TORCHRUN, str(DEMO / "train.py"), "--steps", "5")
    assert run.returncode == 0, run.stderr
    return run.stdout, base


def run_python(base: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "COLUMNS": "200",
        "MONITOR_OUTPUT_DIR": str(base),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=base, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_both_ranks_record_every_kind_at_the_configured_steps(demo: tuple[str, Path]) -> None:
    kinds = {"actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq"}
    for rank in (0, 1):
        (directory,) = demo[1].glob(f"*-rank{rank}-*")
        # A fresh optimizer has no moments before its first step.
        first = {f"{kind}_0-0.csv" for kind in kinds - {"exp_avg", "exp_avg_sq"}}
        assert {path.name for path in directory.glob("*.csv")} == first | {f"{kind}_4-4.csv" for kind in kinds}


def test_reduced_gradients_agree_between_the_ranks_and_unreduced_ones_do_not(demo: tuple[str, Path]) -> None:
    def norms(kind: str, rank: int) -> list[float]:
        (path,) = demo[1].glob(f"*-rank{rank}-*/{kind}_0-0.csv")
        return read_csv(path)["norm"].to_pylist()

    assert norms("grad_reduced", 0) == norms("grad_reduced", 1)
    assert norms("grad_unreduced", 0) != norms("grad_unreduced", 1)


def test_it_ends_with_the_places_and_the_first_rows_and_what_it_cannot_say(demo: tuple[str, Path]) -> None:
    printed, base = demo
    for directory in base.glob("*-rank*-*"):
        assert f"Recorded in {directory}" in printed
    assert "of grad_reduced_0-0.csv" in printed
    assert "module.h.0.attn_norm.weight" in printed
    assert "Too few steps to say what monitoring cost." in printed


def test_started_without_torchrun_it_says_how_to_start_it(tmp_path: Path) -> None:
    run = run_python(tmp_path, str(DEMO / "train.py"))
    assert run.returncode == 1
    assert run.stderr == "The demo is a job of two ranks. Start it with:  make demo\n"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("cost")


def test_cost_counts_what_a_collected_step_leaves_to_the_step_after_it(cost: ModuleType) -> None:
    first_intervals = [9.0] * 8
    measured = cost.measure(first_intervals + [1.5, 1.25, 1.0, 1.0] * 3, interval=4)
    assert measured == cost.Cost(plain=1.0, added=0.75, samples=3)
    assert measured.ratio == 1.75


def test_cost_is_not_said_before_a_whole_interval_lies_behind_the_warm_up(cost: ModuleType) -> None:
    assert cost.measure([1.0] * 11, interval=4) is None
    assert cost.measure([1.0] * 12, interval=4) == cost.Cost(plain=1.0, added=0.0, samples=1)
