"""The project as a whole: clean to its linters, true to its README, and about nothing but itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

needs_git = pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a git checkout")


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("MONITOR_OUTPUT_DIR", None)
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def block(text: str, language: str, index: int = 0) -> str:
    """The ``index``-th fenced block of ``text`` in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[index]


@pytest.mark.parametrize("check", [("check",), ("format", "--check")], ids=["rules", "format"])
def test_ruff_has_nothing_to_say(check: tuple[str, ...]) -> None:
    ruff = run("-m", "ruff", *check, "--no-cache", ".")
    assert ruff.returncode == 0, ruff.stdout + ruff.stderr


def test_the_types_hold_under_strict_mypy() -> None:
    mypy = run("-m", "mypy")
    assert mypy.returncode == 0, mypy.stdout + mypy.stderr


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every file of text that is or would be committed, by its path."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names if not name.endswith(".png")}


@needs_git
def test_no_file_names_a_place_of_one_machine(texts: dict[str, str]) -> None:
    place = re.compile(r"(?<![\w.$}~/-])/(?:work|opt|root|home|Users|tmp/w)" + "/")
    assert [name for name, text in texts.items() if place.search(text)] == []


@needs_git
def test_no_file_speaks_of_how_it_was_made(texts: dict[str, str]) -> None:
    words = ("co-" + "authored-by", "generated " + "with", "ai" + "-generated", "issues " + "show")
    making = re.compile("|".join(words), re.IGNORECASE)
    assert [name for name, text in texts.items() if making.search(text)] == []


@needs_git
def test_every_document_that_is_mentioned_exists(texts: dict[str, str]) -> None:
    known = {Path(name).name for name in texts}
    mentioned = {document for text in texts.values() for document in re.findall(r"\b[\w-]+\.md\b", text)}
    assert mentioned - known == set()


@needs_git
def test_links_between_documents_lead_somewhere(texts: dict[str, str]) -> None:
    links = [
        (name, target)
        for name, text in texts.items()
        if name.endswith(".md")
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    ]
    assert [(name, target) for name, target in links if not (ROOT / name).parent.joinpath(target).exists()] == []


@needs_git
def test_nothing_heavy_is_kept(texts: dict[str, str]) -> None:
    assert [name for name, text in texts.items() if len(text) > 500_000] == []
    assert [path.name for path in (ROOT / "docs" / "pictures").iterdir() if path.stat().st_size > 150_000] == []


def test_everything_that_make_installs_by_name_is_pinned() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["torch"], *extras["test"]]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in asked} - set(pinned) == set()


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example(readme: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's example has run."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "monitor_config.json").write_text(block(readme, "json"))
    (folder / "train.py").write_text(block(readme, "python"))
    (folder / "read.py").write_text(block(readme, "python", 1))
    training = run("train.py", cwd=folder)
    assert training.returncode == 0, training.stderr
    return folder


def test_the_example_records_exactly_the_files_that_the_readme_shows(readme: str, example: Path) -> None:
    (directory,) = example.glob("monitor_output/*-rank0-*")
    shown = set(re.findall(r"\b[\w-]+\.\w+\b", block(readme, "text").partition("\n")[2]))
    recorded = {path.name for path in directory.iterdir()}
    assert {name for name in recorded if name.endswith(".csv")} == {name for name in shown if name.endswith(".csv")}
    assert shown <= recorded


def test_the_rows_that_the_readme_shows_are_the_rows_recorded(readme: str, example: Path) -> None:
    (path,) = example.glob("monitor_output/*/grad_reduced_0-4.csv")
    header, *shown = (line.split(",") for line in block(readme, "csv").splitlines())
    recorded_header, *recorded = (line.split(",") for line in path.read_text().splitlines()[: len(shown) + 1])
    assert recorded_header == header
    assert [row[:3] for row in recorded] == [row[:3] for row in shown]
    # Another CPU may sum in another order.
    values = [[float(cell) for cell in row[3:]] for row in recorded]
    assert values == [pytest.approx([float(cell) for cell in row[3:]], rel=1e-3) for row in shown]


def test_the_way_to_read_the_files_reads_every_step_of_every_parameter(example: Path) -> None:
    reading = run("read.py", cwd=example)
    assert reading.returncode == 0, reading.stderr
    steps = [int(line.split()[0]) for line in reading.stdout.splitlines()]
    assert steps == [step for step in range(10) for _ in range(4)]


def test_the_command_that_the_readme_names_merges_what_was_recorded(readme: str, example: Path) -> None:
    directory = re.findall(r"`trainermon merge (\w+)`", readme)[0]
    merging = run("-m", "monitor", "merge", directory, cwd=example)
    assert merging.returncode == 0, merging.stderr
    assert {path.name for path in example.glob("monitor_output/merged/global/grad_*")} == {
        "grad_reduced_0-9.parquet",
        "grad_unreduced_0-9.parquet",
    }


def test_the_commands_that_the_readme_names_are_targets(readme: str) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make (\w+)`", readme))
    assert {"demo", "test"} <= named
    assert named <= targets
