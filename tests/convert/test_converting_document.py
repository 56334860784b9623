"""What ``docs/converting.md`` shows can be done as it stands there."""

from __future__ import annotations

import re
import shlex
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from converted_job import curves
from torch import nn
from typer.testing import CliRunner

from monitor.cli import app
from monitor.convert import CSV2DBConfig
from monitor.convert.cli import database_app
from monitor.pytorch import TrainerMon
from monitor.query.batches import SHOWN_KINDS

TEXT = (Path(__file__).parents[2] / "docs" / "converting.md").read_text(encoding="utf-8")
CALLS, READING = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def statements(language: str) -> list[str]:
    """Each command of the page in ``language``."""
    text = "".join(re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL))
    if language == "sh":
        return text.splitlines()
    return [one.strip() for one in re.sub(r"--.*", "", text).split(";") if one.strip()]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``monitor_output``, of a run that ends in a NaN."""
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONITOR_OUTPUT_DIR", str(directory / "monitor_output"))
        (directory / "config.json").write_text(
            '{"wg_distribution": true, "param_distribution": true, "ops": ["norm", "max", "nans"]}'
        )
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with TrainerMon(str(directory / "config.json"), params_have_main_grad=False) as monitor:
            monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
            for step in range(10):
                model(torch.full((1, 2), float("nan") if step == 9 else 1.0)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return directory


@pytest.fixture
def here(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(recorded / "monitor_output", tmp_path / "monitor_output")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_convert(here: Path) -> None:
    for line in statements("sh"):
        command, *arguments = shlex.split(line, comments=True)
        result = CliRunner().invoke(app, arguments)
        assert (command, result.exit_code) == ("trainermon", 0), result.output
    assert len(curves(here / "curves" / "rank0" / "grad_reduced")["0:0.weight/rank0/grad_reduced_norm"]) == 10
    assert (here / "monitor_metrics.db").exists()


def test_the_calls_convert(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(CALLS.replace("process_num=2", "process_num=1"), {"__name__": "__main__"})
    rows, path = re.fullmatch(r"(\d+) rows in (\S+)\n", capsys.readouterr().out).groups()  # type: ignore[union-attr]
    assert (rows, Path(path).name) == ("180", "monitor_metrics.db")
    (found,) = here.glob("monitor_output/*_csv2tensorboard_by_step/rank0")
    assert {run.name for run in found.iterdir()} == {"grad_reduced", "param_updated"}


@pytest.mark.usefixtures("here")
def test_the_queries_find_what_they_say() -> None:
    CliRunner().invoke(database_app, ["monitor_output", "-o", "."])
    over_steps, at_a_step, first_nan, by_step = (found(query) for query in statements("sql"))
    assert [step for step, _ in over_steps] == list(range(10))
    assert over_steps[9][1] == "nan"
    assert [name for _, name, _ in at_a_step] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert first_nan == [(9, 0, "0.weight")]
    assert [isinstance(mean, float) for _, mean, _ in by_step] == [True] * 10
    assert by_step[9][2] > 0


def found(query: str) -> list[Any]:
    connection = sqlite3.connect("monitor_metrics.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


@pytest.mark.usefixtures("here")
def test_the_reader_tells_nan_from_a_number() -> None:
    CliRunner().invoke(database_app, ["monitor_output", "-o", "."])
    read: dict[str, Any] = {}
    exec(READING, read)
    read["database"].close()
    assert [norm == norm for norm in read["norms"].values()] == [True] * 9 + [False]


def test_every_argument_and_every_kind_is_explained() -> None:
    rows = "".join(re.findall(r"^\|.*\|$", TEXT, flags=re.MULTILINE))
    explained = set(re.findall(r"`([\w.]+)`", rows))
    assert {field.name for field in fields(CSV2DBConfig)} <= explained
    assert set(SHOWN_KINDS) <= explained
