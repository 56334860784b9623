"""What ``docs/precision-dump.md`` shows can be done as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from monitor.cli import app
from monitor.dump.config import DumpConfig

TEXT = (Path(__file__).parents[2] / "docs" / "precision-dump.md").read_text(encoding="utf-8")
TRAINING, _OF_MINDSPORE, READING = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture
def dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the example has run."""
    monkeypatch.chdir(tmp_path)
    exec(compile(TRAINING, "precision-dump.md", "exec"), {})
    return tmp_path


def test_the_example_dumps_the_steps_that_it_says(dumped: Path) -> None:
    assert sorted(path.name for path in (dumped / "dump_path").iterdir()) == ["step0", "step2"]
    (directory,) = (dumped / "dump_path" / "step0").iterdir()
    data = json.loads((directory / "dump.json").read_text())["data"]
    assert {"Module.0.Conv2d.forward.0", "Module.3.Linear.parameters_grad.0", "Functional.relu.0.backward"} <= set(data)


def test_the_commands_run_as_they_stand(dumped: Path) -> None:
    shutil.copytree(dumped / "dump_path", dumped / "other_path")
    commands = [shlex.split(block) for block in re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)]
    assert [name for _, name, *_ in commands] == ["dump-recover", "compare"]
    for command, *arguments in commands:
        assert (command, CliRunner().invoke(app, arguments).exit_code) == ("trainermon", 0)


@pytest.mark.usefixtures("dumped")
def test_reading_runs_as_it_stands() -> None:
    exec(compile(READING, "precision-dump.md", "exec"), {})


def test_the_defaults_are_those_that_are_shown() -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", TEXT, flags=re.DOTALL)
    assert DumpConfig.model_validate(json.loads(shown)) == DumpConfig()
