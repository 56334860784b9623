"""The command ``trainermon``, and what all commands have in common."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

import monitor
from monitor.cli import COMMANDS, app

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = dict(
    re.findall(
        r'^(trainermon|monitor-\S+) = "(.*)"',
        (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.scripts]")[2].partition("\n[")[0],
        flags=re.MULTILINE,
    )
)
ON_A_DIRECTORY = sorted(COMMANDS.keys() - {"compare", "precision", "query", "report", "run"})
EACH = pytest.mark.parametrize("name", COMMANDS)

HELP = """
import sys
from monitor.cli import app
try:
    app(["--help"])
finally:
    print("imported:", *sorted({"h5py", "mindspore", "numpy", "pyarrow", "pydantic", "rich", "torch"} & set(sys.modules)))
"""


THEN_AN_ARRAY = """
import sys
from {module} import app
sys.argv = {arguments}
try:
    app({given})
except SystemExit:
    pass
import pyarrow
pyarrow.array([0])
print("imported:", "pandas" in sys.modules)
"""


def app_of(script: str) -> Typer:
    module, _, name = SCRIPTS[script].partition(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, Typer)
    return found


def ran(arguments: Sequence[str], command: Typer = app) -> tuple[int, str]:
    """Exit status and what was said, in one line."""
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, " ".join(result.output.split())


def asked(name: str) -> list[str]:
    """What a subcommand needs beside the directory."""
    return {"ctl": ["status"], "convert": ["--to", "sqlite"]}.get(name, [])


def test_every_installed_command_is_a_subcommand_and_the_same_thing() -> None:
    assert {f"monitor-{name}": f"{one.module}:{one.app}" for name, one in COMMANDS.items()} | {
        "trainermon": "monitor.cli:app"
    } == SCRIPTS


def test_the_list_has_the_first_sentence_of_every_commands_help() -> None:
    status, said = ran(["--help"])
    assert status == 0
    for name, one in COMMANDS.items():
        assert f" {name} {one.summary}" in said
        assert (
            ran(["--help"], app_of(f"monitor-{name}"))[1]
            .partition("[OPTIONS] ")[2]
            .partition("Exit status:")[0]
            .count(one.summary)
        )


def fresh(tmp_path: Path, *arguments: str) -> str:
    """What a process of its own prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_the_list_imports_no_library(tmp_path: Path) -> None:
    assert fresh(tmp_path, "-c", HELP).endswith("\nimported:\n")


def test_the_package_can_be_run_as_the_command(tmp_path: Path) -> None:
    assert fresh(tmp_path, "-m", "monitor", "--version") == f"trainermon {monitor.__version__}\n"


@EACH
def test_every_command_has_a_version_and_its_help_says_what_its_exit_status_means(name: str) -> None:
    for command, before in ((app, [name]), (app_of(f"monitor-{name}"), [])):
        assert ran([*before, "--version"], command) == (0, f"trainermon {monitor.__version__}")
        status, said = ran([*before, "--help"], command)
        assert status == 0
        assert re.search(r"Exit status: 0 .* 1 .* 2 .*--version .*--help", said)
    assert ran(["--version"]) == (0, f"trainermon {monitor.__version__}")


@EACH
def test_a_subcommand_calls_itself_by_its_name_and_gets_every_argument(name: str) -> None:
    assert ran([name, "--help"])[1].startswith(f"Usage: root {name} [OPTIONS]")
    assert ran([name, "--no-such-option"])[0] == 2
    assert ran([name, "--", "--help"])[0] == 2  # a directory of this name


def test_an_unknown_subcommand_ends_with_2_and_is_named() -> None:
    status, said = ran(["merg"])
    assert (status, "No such command 'merg'" in said) == (2, True)


@pytest.mark.parametrize("name", ON_A_DIRECTORY)
def test_a_directory_may_be_given_as_an_argument_or_with_d(name: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "missing")
    as_argument = ran([name, directory, *asked(name)])
    assert (as_argument[0], directory in as_argument[1]) == (2, True)
    assert ran([name, "-d", directory, *asked(name)]) == as_argument
    assert ran([name, *asked(name), "--directory", directory]) == as_argument


@pytest.mark.parametrize("name", ON_A_DIRECTORY)
def test_a_directory_that_is_given_twice_or_not_at_all_is_one_clear_error(name: str) -> None:
    usage = f"Usage: root {name} [OPTIONS]"
    for arguments, error in (
        (["here", "-d", "there", *asked(name)], "the directory is given twice: here, and -d there. Give one."),
        ([*asked(name)], "no directory is given. Give it as an argument, or with -d."),
        ([], "no directory is given. Give it as an argument, or with -d."),
    ):
        status, said = ran([name, *arguments])
        assert (status, said.startswith(usage)) == (2, True)
        assert said.endswith(f" Error: Invalid value for DIR: {error}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["here"], "no action is given. Write on, off, set or status."),
        (["-d", "here"], "no action is given."),
        (["here", "start"], "'start' is not an action."),
        (["-d", "here", "start"], "'start' is not an action."),
        (["on", "status"], "Nothing was done: on "),  # a directory of this name
    ],
)
def test_ctl_says_which_word_is_wrong(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, told = ran(["ctl", *arguments])
    assert status == 2
    assert said in told


def test_the_readme_lists_every_command() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Commands")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `trainermon ([\w-]+) ", table, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("monitor.query.cli", ["monitor-query", "nowhere"]), ("monitor.cli", ["trainermon", "query", "nowhere"])],
)
def test_a_process_of_a_command_does_not_import_pandas(module: str, arguments: Sequence[str]) -> None:
    pytest.importorskip("pandas")
    assert imported_pandas(THEN_AN_ARRAY.format(module=module, arguments=arguments, given="")) is False


def test_a_program_that_calls_a_command_keeps_pandas() -> None:
    pytest.importorskip("pandas")
    script = THEN_AN_ARRAY.format(module="monitor.query.cli", arguments=["a program"], given=["nowhere"])
    assert imported_pandas(script) is True


def imported_pandas(script: str) -> bool:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # without what hides pandas from tests' processes
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.rpartition("imported: ")[2].strip() == "True"
