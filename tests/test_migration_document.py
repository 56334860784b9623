"""``docs/migrating-from-msprobe.md``: what its tables name on our side is there."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from monitor.selection import squashed

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "migrating-from-msprobe.md").read_text(encoding="utf-8")
MOVED = dict(re.findall(r"^\| `((?:msprobe|mindformers)\.[\w.]+)` \| `(monitor\.[\w.]+)` \|$", PAGE, re.MULTILINE))
COMMANDS = set(re.findall(r"`(monitor-[a-z0-9-]+)", PAGE))
MODULES = set(re.findall(r"python3? -m (monitor[\w.]*)", PAGE))
IN_MINDSPORE = sorted(ours for ours in MOVED.values() if ".mindspore." in ours)


def test_the_table_of_import_paths_is_complete() -> None:
    """Every class and function of the documents, in each of the places that they import it from."""
    documented = {
        *("TrainerMon", "PrecisionDebugger", "seed_all", "MsprobeStep", "MsprobeInitStep"),
        *("csv2tensorboard_by_step", "CSV2DBConfig", "csv2db"),
        *("MFLossMonitor", "TrainingStateMonitor", "TopkBiasBalanceCallback"),
    }
    assert documented == {theirs.rpartition(".")[2] for theirs in MOVED}
    assert all(theirs.rpartition(".")[2] == ours.rpartition(".")[2] for theirs, ours in MOVED.items())


@pytest.mark.parametrize("path", sorted({*MOVED.values()} - {*IN_MINDSPORE}))
def test_each_import_path_imports(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.skipif(importlib.util.find_spec("mindspore") is None, reason="MindSpore is not installed")
def test_so_do_those_of_mindspore() -> None:
    lines = [f"from {path.rpartition('.')[0]} import {path.rpartition('.')[2]}" for path in IN_MINDSPORE]
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_exists(command: str) -> None:
    scripts = re.findall(rf'^{command} = "([\w.]+):(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    ((module, app),) = scripts
    assert callable(getattr(importlib.import_module(module), app))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_each_module_can_be_run(module: str) -> None:
    assert importlib.util.find_spec(f"{module}.__main__") is not None


def test_all_commands_of_the_project_are_there() -> None:
    assert set(re.findall(r"^(monitor-[\w-]+) = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)) <= COMMANDS


def test_short_names_are_those_of_the_table() -> None:
    table = PAGE.split("### Short names")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", table, re.MULTILINE)
    assert squashed([full for full, _ in rows]) == dict(rows)
