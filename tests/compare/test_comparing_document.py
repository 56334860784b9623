"""What ``docs/comparing.md`` shows can be done as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import monitor
from monitor.cli import app

TEXT = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text(encoding="utf-8")


def blocks(language: str, holds: str) -> str:
    found = [one for one in re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL) if holds in one]
    assert len(found) == 1
    return found[0]


def train(base: Path, rate: float = 0.1, seed: int = 1) -> Path:
    """A run whose samples come in an order of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    order = torch.Generator().manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONITOR_OUTPUT_DIR", str(base))
        watch = monitor.watch(model, optimizer, "everything", micro_batches=1, format="parquet")
        with watch:
            for step in range(6):
                x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))[torch.randperm(32, generator=order)]
                loss = model(x).square().mean()
                loss.backward()
                watch.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
    return base


def commands(text: str, **names: str) -> list[list[str]]:
    for old, new in names.items():
        text = text.replace(old, new)
    return [shlex.split(line.removeprefix("trainermon ")) for line in text.splitlines()]


def run(arguments: list[str]) -> int:
    return CliRunner().invoke(app, arguments).exit_code


def test_a_baseline_is_made_and_compared_and_the_fixture_fails_for_another_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(Path("monitor_output"))
    assert [run(one) for one in commands(blocks("bash", "--junit"))] == [0, 0]
    assert (tmp_path / "report.xml").read_text().count("<testcase") == 4
    Path("tests", "conftest.py").write_text(blocks("python", "def same_numbers"))
    for name, rate, status in (("healthy", 0.1, 0), ("changed", 0.101, 1)):
        run_of = str(train(tmp_path / name, rate, seed=2))
        test = Path("tests", f"test_{name}.py")
        # The run is there already: training again in a process of its own would take seconds.
        test.write_text(blocks("python", "train(steps=5)").replace("    train(steps=5)\n", f"    tmp_path = {run_of!r}\n"))
        arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout
        assert ("first: step 0, rank0: run/0:learning_rate.0" in done.stdout) == bool(status)


def test_noise_is_learned_and_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {f"HEALTHY_{seed}": f"run{seed}" for seed in (1, 2, 3)} | {"BEFORE": "run1", "AFTER": "after"}
    for seed in (1, 2, 3):
        train(Path(f"run{seed}"), seed=seed)
    train(Path("after"), seed=4)
    assert [run(one) for one in commands(blocks("bash", "--calibrate"), **names)] == [0, 0]
    assert run(["compare", "run1", str(train(Path("changed"), 0.101, seed=5)), "--tolerances", "noise.json"]) == 1
