"""``import monitor``: its names, its version, and what is said where a framework is missing."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import monitor

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"h5py", "mindspore", "numpy", "pyarrow", "pydantic", "rich", "torch", "typer"}
PUBLIC = {
    *("monitor", "monitor.pytorch", "monitor.mindspore", "monitor.pytorch.training", "monitor.mindspore.training"),
    *("monitor.convert", "monitor.training.expert_load"),
    *("monitor.pytorch.callbacks.huggingface", "monitor.pytorch.callbacks.lightning"),
}

IMPORTING = """
import importlib, json, sys
import monitor
said = {"file": monitor.__file__, "libraries": sorted(set(sys.modules) & set(json.loads(sys.argv[1])))}
for framework, room in (("torch", "monitor.pytorch"), ("mindspore", "monitor.mindspore")):
    sys.modules[framework] = None  # as where it is not installed
    try:
        importlib.import_module(room)
    except ImportError as error:
        said[room] = str(error)
print(json.dumps(said))
"""


def run(*arguments: str, path: list[Path], cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a fresh process finds that has another package ``monitor`` later on its path, and no framework."""
    later = tmp_path_factory.mktemp("later")
    (later / "monitor").mkdir()
    (later / "monitor" / "__init__.py").write_text("raise RuntimeError('this is another monitor')\n")
    said = run("-c", IMPORTING, json.dumps(sorted(LIBRARIES)), path=[ROOT, later], cwd=later.parent)
    found: dict[str, str] = json.loads(said)
    return found


def test_another_package_monitor_later_on_the_path_does_not_hide_ours(imported: dict[str, str]) -> None:
    assert Path(imported["file"]) == ROOT / "monitor" / "__init__.py"


def test_importing_the_package_imports_no_library(imported: dict[str, str]) -> None:
    assert imported["libraries"] == []


@pytest.mark.parametrize(("room", "extra"), [("monitor.pytorch", "torch"), ("monitor.mindspore", "mindspore")])
def test_without_its_framework_a_room_names_the_extra_to_install(imported: dict[str, str], room: str, extra: str) -> None:
    assert f"pip install 'trainermon[{extra}]'" in imported[room]
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("optional-dependencies")[2]


def test_a_torch_that_is_too_old_is_refused_with_the_version_that_is_needed(tmp_path: Path) -> None:
    old = "import torch; torch.__version__ = type(torch.__version__)('2.3.1+cpu'); import monitor.pytorch"
    caught = f"try:\n    {old}\nexcept ImportError as error:\n    print(error)"
    assert run("-c", caught, path=[ROOT], cwd=tmp_path).splitlines() == [
        "monitor.pytorch needs PyTorch 2.4 or later, and this is 2.3.1+cpu: pip install --upgrade 'trainermon[torch]'"
    ]


def test_every_public_name_can_be_had_and_is_listed() -> None:
    assert monitor.__all__ == sorted(monitor.__all__)
    assert set(monitor.__all__) <= set(dir(monitor))
    assert {name: getattr(monitor, name) is not None for name in monitor.__all__} == dict.fromkeys(monitor.__all__, True)


def test_type_checkers_and_programs_find_the_same_names() -> None:
    tree = ast.parse((ROOT / "monitor" / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = [one for one in tree.body if isinstance(one, ast.If)]
    shown = {alias.name: one.module for one in checked.body if isinstance(one, ast.ImportFrom) for alias in one.names}
    assert {*shown, "__version__"} == set(monitor.__all__)
    assert all(getattr(importlib.import_module(str(module)), name) is getattr(monitor, name) for name, module in shown.items())


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'monitor' has no attribute 'read_nothing'"):
        _ = monitor.read_nothing


def test_the_version_is_that_of_the_distribution() -> None:
    assert monitor.__version__ == version("trainermon")


def test_where_nothing_is_installed_the_version_says_so(tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    shutil.copy(ROOT / "monitor" / "__init__.py", tmp_path / "monitor")
    said = run("-S", "-c", "import monitor; print(monitor.__version__)", path=[tmp_path], cwd=tmp_path)
    assert said == "0+not.installed\n"


def test_readme_and_documents_import_from_public_places_only() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = re.compile(r"^\+?(?:from (monitor[\w.]*) import|import (monitor[\w.]*))", re.MULTILINE)
    found = {first or second for page in pages for first, second in named.findall(page.read_text(encoding="utf-8"))}
    assert found - PUBLIC == set()
    assert {"monitor", "monitor.pytorch"} <= found
