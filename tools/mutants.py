"""Check what the tests notice: plant one fault at a time into a copy of the project and run the tests of its package.

    python tools/mutants.py                         all mutants; a table, one row as soon as a mutant is done
    python tools/mutants.py --only stats merge      those of two packages
    python tools/mutants.py --only sinks.Shard.takes   one
    python tools/mutants.py --list                  where each mutant goes; nothing is run

The mutants are in tools/mutants.toml. Each names a package, a function, a line of the function and the line that replaces it.
The line is found by package, function and text, whatever the module is called; if the function was renamed, the text is enough
where it occurs once in the package. If a line was rewritten, rewrite its entry: --list names it.

The tests of a package run first without a mutant. They have to pass, and their time sets the limit: twice that and a minute.
Then they run once for each mutant and stop at the first failure; test files that take little time come first. A mutant that
passes all tests has survived: a test is missing. The exit status is 1 if any survived.

The copy lies in a directory for temporary files, with the extension modules that were built here. Nothing is written here.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final
from xml.etree import ElementTree

PROJECT: Final = Path(__file__).resolve().parent.parent
MUTANTS: Final = Path(__file__).with_suffix(".toml")
LEFT_OUT: Final = (
    ".git",
    ".venv*",
    "*_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "monitor_output",
)
PYTEST: Final = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-o", "junit_family=xunit1")
"""Hypothesis draws the same examples each time: whether a mutant is killed must not depend on luck."""

TIMES_AS_LONG, SECONDS_MORE = 2.0, 60.0
"""A run of tests is taken to hang after this many times the time of the tests without a mutant, and these seconds."""

PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""Exit statuses of pytest. It is interrupted if a module with tests cannot be imported."""


class MutantError(Exception):
    """A mutant cannot be planted, or the tests cannot tell."""


@dataclass(frozen=True)
class Package:
    """A package of the project and its tests.

    Attributes:
        folders: Of ``monitor/``, those that it may be called; the ones that exist count.
        tests: Paths of tests, likewise.
    """

    name: str
    folders: tuple[str, ...]
    tests: tuple[str, ...]

    def modules(self, project: Path) -> list[Path]:
        return sorted(path for folder in self.folders for path in (project / "monitor" / folder).rglob("*.py"))

    def test_files(self, project: Path) -> list[Path]:
        found = [path for name in self.tests for path in _test_files(project / name)]
        if not found:
            raise MutantError(f"package {self.name}: there are no tests in {', '.join(self.tests)}")
        return found


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        function: The qualified name of the function or method.
        before: The line as it is, without indentation.
        after: The line that replaces it.
        fault: What the user would suffer.
    """

    package: Package
    function: str
    before: str
    after: str
    fault: str

    @property
    def name(self) -> str:
        return f"{self.package.name}.{self.function}"


@dataclass(frozen=True)
class Place:
    """A line of a module, counted from 0."""

    path: Path
    line: int


@dataclass
class Outcome:
    """The result of a run of tests.

    Attributes:
        failed: The first test that failed; empty if all passed.
        seconds: How long the run took.
        seconds_of: How long each file with tests took.
    """

    failed: str
    seconds: float
    seconds_of: dict[str, float] = field(default_factory=dict)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="packages, or mutants as PACKAGE.FUNCTION")
    parser.add_argument("--list", action="store_true", help="print where each mutant goes and end")
    chosen = parser.parse_args(arguments)
    mutants = [one for one in mutants_of(MUTANTS) if not chosen.only or {one.name, one.package.name} & set(chosen.only)]
    try:
        places = [place_of(one, PROJECT) for one in mutants]
        if chosen.list:
            for one, place in zip(mutants, places, strict=True):
                print(f"{one.name:50} {place.path.relative_to(PROJECT)}:{place.line + 1}")
            return 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the tests end, and the copy goes
        with copy_of(PROJECT) as project:
            return report(mutants, project)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2


def mutants_of(path: Path) -> list[Mutant]:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    packages = {name: Package(name, tuple(one["folders"]), tuple(one["tests"])) for name, one in content["packages"].items()}
    return [Mutant(packages[one.pop("package")], **one) for one in content["mutants"]]


def place_of(mutant: Mutant, project: Path) -> Place:
    """The line that the mutant replaces.

    Raises:
        MutantError: There is no such line, or there are several.
    """
    anywhere: list[Place] = []
    inside: list[Place] = []
    for path in mutant.package.modules(project):
        text = path.read_text(encoding="utf-8")
        lines = [number for number, line in enumerate(text.split("\n")) if line.strip() == mutant.before]
        spans = [span for name, span in functions(ast.parse(text)) if name == mutant.function] if lines else []
        anywhere += [Place(path, number) for number in lines]
        inside += [Place(path, number) for number in lines if any(number in span for span in spans)]
    found = inside or anywhere
    if len(found) != 1:
        raise MutantError(f"{mutant.name}: {len(found)} lines are {mutant.before!r}; correct its entry in {MUTANTS.name}")
    return found[0]


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, range]]:
    """The qualified name of each function, and its lines, counted from 0."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{within}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, range(node.lineno - 1, node.end_lineno or node.lineno)
            yield from functions(node, f"{name}.")


@contextmanager
def copy_of(project: Path) -> Iterator[Path]:
    """A copy of the project that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Path(directory) / "project"
        shutil.copytree(project, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        yield copy


@contextmanager
def planted(mutant: Mutant, project: Path) -> Iterator[Place]:
    """The mutant in ``project``, for as long as this lasts."""
    place = place_of(mutant, project)
    original = place.path.with_name(f"{place.path.name}.original")
    shutil.copy2(place.path, original)  # with its time: what was compiled of it is valid again afterwards
    try:
        lines = original.read_text(encoding="utf-8").split("\n")
        lines[place.line] = lines[place.line].replace(mutant.before, mutant.after)
        content = "\n".join(lines)
        ast.parse(content)  # what no interpreter reads is killed by everything
        place.path.write_text(content, encoding="utf-8")
        yield place
    finally:
        os.replace(original, place.path)


def report(mutants: Sequence[Mutant], project: Path) -> int:
    """Run the tests for each mutant and print a table. Returns the exit status."""
    print("| mutant | fault | killed by | seconds |\n|---|---|---|---:|", flush=True)
    survivors: list[Mutant] = []
    for package in dict.fromkeys(one.package for one in mutants):
        files, limit = prepared(package, project)
        for one in (one for one in mutants if one.package is package):
            with planted(one, project):
                outcome = run(files, project, limit)
            survivors += [] if outcome.failed else [one]
            killed_by = outcome.failed or "**survived**"
            print(f"| `{one.name}` | {one.fault} | {killed_by} | {outcome.seconds:.0f} |", flush=True)
    print(f"\n{len(mutants) - len(survivors)} of {len(mutants)} mutants were killed.", flush=True)
    return int(bool(survivors))


def prepared(package: Package, project: Path) -> tuple[list[Path], float]:
    """The package's files with tests, the quick ones first, and the seconds after which a run of them hangs.

    Raises:
        MutantError: The tests fail without a mutant.
    """
    files = package.test_files(project)
    outcome = run(files, project, limit=None)
    if outcome.failed:
        raise MutantError(f"package {package.name}: without a mutant {outcome.failed} fails")
    files.sort(key=lambda path: outcome.seconds_of.get(path.relative_to(project).as_posix(), 0.0))
    print(f"| {package.name} without a mutant | | | {outcome.seconds:.0f} |", flush=True)
    return files, TIMES_AS_LONG * outcome.seconds + SECONDS_MORE


def run(files: Sequence[Path], project: Path, limit: float | None) -> Outcome:
    """Run the tests in these files, in this order, until one fails."""
    results = project.parent / "results.xml"
    results.unlink(missing_ok=True)
    shutil.rmtree(project / ".hypothesis", ignore_errors=True)  # failures that it found with another mutant
    command = [sys.executable, "-m", "pytest", *PYTEST, f"--junitxml={results}", *map(str, files)]
    environment = os.environ | {"PYTHONPATH": str(project)}
    # Its output goes nowhere: tests limit the size of files, and processes that a mutant leaves behind keep pipes open.
    nowhere = subprocess.DEVNULL
    begun = monotonic()
    process = subprocess.Popen(
        command, cwd=project, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
    )
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return Outcome(f"hangs: ended after {limit:.0f} s", monotonic() - begun)
    finally:
        end(process)
    return Outcome(_failed(status, results), monotonic() - begun, _seconds_of(results))


def end(process: subprocess.Popen[bytes]) -> None:
    """End the tests and the processes that they started: first so that they can clean up."""
    for number, seconds in ((signal.SIGINT, 30.0), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _failed(status: int, results: Path) -> str:
    """The first test that failed; empty if none did."""
    if status == PASSED:
        return ""
    cases = ElementTree.parse(results).iter("testcase") if results.exists() else ()
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            return f"{case.get('file', '')}::{case.get('name', '')}"
    if status in (FAILED, INTERRUPTED) or status < 0:
        return f"pytest ended with status {status}"
    raise MutantError(f"pytest cannot run: status {status}")


def _seconds_of(results: Path) -> dict[str, float]:
    """How long the tests of each file took."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(results).iter("testcase") if results.exists() else ():
        file = case.get("file", "")
        found[file] = found.get(file, 0.0) + float(case.get("time", 0.0))
    return found


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
