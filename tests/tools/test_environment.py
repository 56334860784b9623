"""The set-up that every make target begins with, run for real with one small package made here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from evidence import PROVES

ROOT = Path(__file__).resolve().parents[2]
WHEEL = {
    "METADATA": ("Metadata-Version: 2.1", "Name: leaf", "Version: 1.0"),
    "WHEEL": ("Wheel-Version: 1.0", "Generator: test", "Root-Is-Purelib: true", "Tag: py3-none-any"),
    "RECORD": (),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the set-up script, the files that it watches, and a wheel named ``leaf`` to install."""
    project = tmp_path_factory.mktemp("set-up") / "project"
    (project / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "environment.py", project / "tools")
    (project / "pyproject.toml").write_text("[project]\n")
    (project / "constraints.txt").write_text("leaf==1.0\n")
    with zipfile.ZipFile(project / "leaf-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("leaf.py", "")
        wheel.writestr("leaf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: leaf\nVersion: 1.0\n")
        wheel.writestr(
            "leaf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("leaf-1.0.dist-info/RECORD", "")
    return project


def command(*requirements: str) -> list[str]:
    return [sys.executable, "tools/environment.py", ".venv", "--no-index", "--find-links", ".", *requirements]


def set_up(project: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*requirements), cwd=project, capture_output=True, text=True, check=False)


def imports_leaf(project: Path) -> bool:
    python = project / ".venv" / "bin" / "python"
    return subprocess.run([python, "-c", "import leaf"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def failed(project: Path) -> subprocess.CompletedProcess[str]:
    """A set-up that failed half way, and a file in what it has left."""
    done = set_up(project, "leaf", "absent")
    (project / ".venv" / "half-made").touch()
    return done


@pytest.fixture(scope="module")
def made(project: Path, failed: subprocess.CompletedProcess[str]) -> list[tuple[int, str]]:
    """After that, two set-ups at the same time: the status of each and what it said."""
    assert failed.returncode == 1
    both = [subprocess.Popen(command("leaf"), cwd=project, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    return [(process.returncode, text) for process, text in zip(both, said, strict=True)]


def test_a_set_up_that_failed_half_way_says_so(failed: subprocess.CompletedProcess[str]) -> None:
    assert failed.returncode == 1
    assert "absent" in failed.stderr
    assert "starts from scratch" in failed.stderr


@pytest.mark.usefixtures("made")
def test_what_failed_half_way_is_done_again_from_scratch(project: Path) -> None:
    assert not (project / ".venv" / "half-made").exists()
    assert imports_leaf(project)


def test_two_set_ups_at_the_same_time_make_one_environment(project: Path, made: list[tuple[int, str]]) -> None:
    assert [status for status, _ in made] == [0, 0]
    assert sum("Setting up" in text for _, text in made) == 1
    assert not list(project.glob("*lock*"))


@pytest.mark.skipif(not PROVES, reason="it takes 4 s: make prove runs it")
@pytest.mark.usefixtures("made")
def test_an_environment_over_another_has_what_is_in_that_one_and_puts_its_own_before_it(project: Path) -> None:
    (found,) = (project / ".venv").glob("lib/python*/site-packages/leaf.py")
    found.write_text("of = 'the one below'\n")
    (found.parent / "other.py").write_text("")
    over = [sys.executable, "tools/environment.py", ".venv-2", "--over", ".venv", "--no-index", "--find-links", ".", "leaf"]
    subprocess.run(over, cwd=project, check=True)
    tried = [project / ".venv-2" / "bin" / "python", "-c", "import leaf, other; print(hasattr(leaf, 'of'))"]
    assert subprocess.run(tried, capture_output=True, text=True, check=False).stdout == "False\n"


@pytest.mark.skipif(not PROVES, reason="it takes 4 s: make prove runs it")
@pytest.mark.usefixtures("made")
def test_an_environment_is_made_once_and_again_when_the_constraints_change(project: Path) -> None:
    marker = project / ".venv" / "made-earlier"
    marker.touch()
    assert set_up(project, "leaf").stdout == ""
    assert marker.exists()

    (project / "constraints.txt").write_text("leaf>=1.0\n")
    assert set_up(project, "leaf").returncode == 0
    assert not marker.exists()
    assert imports_leaf(project)


def test_without_anything_to_install_the_usage_is_shown(project: Path) -> None:
    command = [sys.executable, "tools/environment.py", ".venv-of-nothing"]
    refused = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr == "usage: python3 tools/environment.py DIRECTORY [--over OTHER] PIP_ARGUMENT...\n"
    assert not (project / ".venv-of-nothing").exists()
