"""What ``docs/reading.md`` and the README show about reading can be done as it stands there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from monitor.cli import app
from monitor.merge.merge import Wanted, merge
from monitor.pytorch import TrainerMon
from monitor.query.opened import OpenedRun

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

needs_duckdb = pytest.mark.skipif(find_spec("duckdb") is None, reason="needs the package duckdb")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``monitor_output``, and the merged set in it."""
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONITOR_OUTPUT_DIR", str(directory / "monitor_output"))
        config = '{"wg_distribution": true, "param_distribution": true, "ops": ["norm", "min", "max", "nans"]}'
        (directory / "config.json").write_text(config)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        with TrainerMon(str(directory / "config.json"), params_have_main_grad=False) as monitor:
            monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
            for _ in range(10):
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    merge(Wanted(directory / "monitor_output", directory / "monitor_output" / "merged", format="parquet"))
    return directory


@pytest.fixture(autouse=True)
def _here(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(recorded)
    return


def test_the_three_questions_of_the_readme_have_answers() -> None:
    found: dict[str, Any] = {}
    exec(next(one for one in blocks(README, "python") if "open_run" in one), found)
    assert found["curve"]["step"].to_pylist() == list(range(10))
    norms = found["largest"]["norm"].to_pylist()
    assert norms == sorted(norms, reverse=True)
    assert set(found["largest"]["name"].to_pylist()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    spread = found["spread"].to_pylist()
    assert len(spread) == 4
    assert all(row["norm_min"] == row["norm_max"] for row in spread)  # of one rank


def test_the_examples_of_the_page_run_in_their_order() -> None:
    found: dict[str, Any] = {}
    for one in blocks(TEXT, "python"):
        if "run.sql" not in one or find_spec("duckdb"):
            exec(one, found)
    assert found["curve"].num_rows == len(found["in_pandas"]) == len(found["in_polars"]) == 10
    assert found["highest"].fetchall() == [(max(found["curve"]["norm"].to_pylist()),)]
    assert found["largest"].num_rows == 4
    assert found["early"].num_rows == 15


@needs_duckdb
def test_the_commands_of_the_page_and_of_the_readme_answer() -> None:
    shown = re.findall(r"`(trainermon query .*?)`", README)
    lines = [line for one in blocks(TEXT, "sh") for line in one.splitlines()]
    for line in [*lines, *(one for one in shown if "select" in one)]:
        command, *arguments = shlex.split(line, comments=True)
        result = CliRunner().invoke(app, arguments)
        assert (command, result.exit_code) == ("trainermon", 0), result.output
        assert len(result.stdout.splitlines()) > 4


def test_every_public_name_of_an_opened_run_is_explained() -> None:
    names = {name for name in vars(OpenedRun) if not name.startswith("_")}
    assert {name for name in names if f"`run.{name}" not in TEXT} == set()
