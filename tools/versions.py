"""Run the contract of ``tools/contract`` under old and new versions of Python, PyTorch and MindSpore.

For each combination this makes an environment, installs the project's wheel and the framework from the registry that pip is
configured to use, runs the contract, and removes the environment. It downloads gigabytes, so run it by hand:

    make versions
    make versions ARGS="--only torch==2.6.0,python3.12"

The contract: training has the same bits with and without the monitor, rows equal references in float64, files of all formats
are readable, and the ranks of a job merge. Compiled code and two ranks are included for PyTorch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PACKAGED = ("monitor", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE")
PYTHONS = ("3.11", "3.12", "3.13")
FRAMEWORKS = ("torch==2.4.1", "torch==2.6.0", "torch==2.8.0", "torch==2.10.0", "torch==2.11.0", "torch==2.13.0")
FRAMEWORKS += ("mindspore==2.4.10", "mindspore==2.7.0", "mindspore==2.7.2", "mindspore==2.10.0")
SCRIPTS = {"torch": "with_torch.py", "mindspore": "with_mindspore.py"}
GIGABYTE = 1 << 30
NEEDED = 12 * GIGABYTE
"""Free space on the disk for one environment: builds for CUDA take up to 8 GB, and pip unpacks them first."""

NO_BUILD = "No matching distribution found"
LONGEST = 1800.0
"""Seconds of a contract that hangs."""


@dataclass(frozen=True)
class Combination:
    """A Python version, such as ``3.12``, and a requirement, such as ``torch==2.6.0``."""

    python: str
    requirement: str

    @property
    def framework(self) -> str:
        """``torch`` or ``mindspore``."""
        return self.requirement.partition("==")[0]


@dataclass(frozen=True)
class Outcome:
    """What became of a combination: ``ok``, ``FAILED``, ``no build`` or ``no Python``; what was noted; numpy's version."""

    word: str
    remarks: tuple[str, ...] = ()
    numpy: str = ""


def main(arguments: Sequence[str]) -> int:
    """Run the combinations that ``arguments`` select. Returns the exit status."""
    options = parsed(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="trainermon-versions-", dir=options.directory) as directory:
        wheel = built_wheel(Path(directory)) if options.wheel is None else options.wheel.resolve()
        for number, combination in enumerate(options.only, start=1):
            began = time.monotonic()
            print(f"[{number}/{len(options.only)}] Python {combination.python}, {combination.requirement}", end=" ", flush=True)
            outcome = tried(combination, wheel, Path(directory))
            seconds = round(time.monotonic() - began)
            print(f"… {'; '.join((outcome.word, *outcome.remarks))}, {seconds} s", flush=True)
            rows.append((combination, outcome, seconds))
    print("\n" + table(rows))
    words = [outcome.word for _, outcome, _ in rows]
    return int("FAILED" in words or "ok" not in words)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; ``only`` is the list of combinations."""
    parser = argparse.ArgumentParser(
        prog="versions.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        type=selected,
        default=selected(""),
        metavar="WORD,...",
        help="some combinations: pythonX.Y and requirements, such as python3.12,torch==2.6.0. A requirement need not be one of "
        f"the default ones: {', '.join(FRAMEWORKS)}",
    )
    parser.add_argument(
        "--directory", type=Path, help="where environments are made (default: the system's temporary directory)"
    )
    parser.add_argument("--wheel", type=Path, help="the wheel to install (default: build it)")
    return parser.parse_args(arguments)


def selected(words: str) -> list[Combination]:
    """The combinations that ``--only`` means: all Pythons or frameworks where it names none."""
    named = [word for word in words.split(",") if word]
    pythons = [word.removeprefix("python") for word in named if word.startswith("python")]
    frameworks = [word for word in named if not word.startswith("python")]
    unknown = [word for word in frameworks if word.partition("==")[0] not in SCRIPTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: write pythonX.Y, torch==VERSION or mindspore==VERSION")
    return [Combination(python, framework) for framework in frameworks or FRAMEWORKS for python in pythons or PYTHONS]


def built_wheel(directory: Path) -> Path:
    """A wheel of the sources, built from a copy without earlier builds."""
    sources, wheels = directory / "sources", directory / "wheel"
    for name in PACKAGED:
        place = PROJECT / name
        if place.is_dir():
            shutil.copytree(place, sources / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(place, sources / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"The wheel could not be built:\n{done.stderr}")
    (wheel,) = wheels.glob("*.whl")
    return wheel


def tried(combination: Combination, wheel: Path, directory: Path) -> Outcome:
    """Run the contract in an environment of its own below ``directory``, which is removed afterwards."""
    interpreter = found_interpreter(combination.python)
    if interpreter is None:
        return Outcome("no Python", (f"install python{combination.python}, or pyenv install {combination.python}",))
    free = shutil.disk_usage(directory).free
    if free < NEEDED:
        return Outcome("FAILED", (f"{free / GIGABYTE:.0f} GB are free, {NEEDED // GIGABYTE} are needed: pass --directory",))
    environment = directory / "environment"
    try:
        return installed(combination, interpreter, wheel, environment) or under_contract(combination, environment)
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def found_interpreter(version: str) -> str | None:
    """The program ``pythonX.Y``, or pyenv's newest one of that version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True), shutil.which(f"python{version}")]
    return next((str(path) for path in candidates if path is not None), None)


def installed(combination: Combination, interpreter: str, wheel: Path, environment: Path) -> Outcome | None:
    """Make ``environment`` with the wheel and the framework, and all they need. Returns None, or why that failed."""
    python = str(environment / "bin" / "python")
    requirements = [f"trainermon[{combination.framework}] @ {wheel.as_uri()}", combination.requirement]
    for command in (
        [interpreter, "-m", "venv", "--clear", str(environment)],
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-cache-dir",
            "--no-compile",
            "--disable-pip-version-check",
            *requirements,
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no message of pip"]
            return Outcome("no build" if NO_BUILD in done.stderr else "FAILED", (errors[-1],))
    return None


def under_contract(combination: Combination, environment: Path) -> Outcome:
    """Run the contract's script with the interpreter of ``environment``."""
    python = str(environment / "bin" / "python")
    asked = "from importlib.metadata import version; print(version('numpy'))"
    numpy = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    script = PROJECT / "tools" / "contract" / SCRIPTS[combination.framework]
    unwanted = ("PYTHONPATH", "MONITOR_OUTPUT_DIR", "MONITOR_NATIVE", "DYNAMIC_MONITOR")
    variables = {name: value for name, value in os.environ.items() if name not in unwanted}
    temporary = environment / "temporary"  # compilers keep what they made; it goes with the environment
    temporary.mkdir()
    variables |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    command = [python, str(script)]
    try:
        done = subprocess.run(
            command, env=variables, cwd=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome("FAILED", (f"the contract ran longer than {LONGEST:.0f} s",), numpy)
    return verdict(done.returncode, done.stdout, done.stderr, numpy)


def verdict(status: int, printed: str, errors: str, numpy: str) -> Outcome:
    """The outcome of a contract that ended with ``status``. A failure's first line comes first in the remarks."""
    lines = printed.splitlines()
    if status == 0 and any(line.startswith("ok ") for line in lines):
        said = [line for line in lines if line.startswith(("skipped ", "note "))]
        return Outcome("ok", tuple(line.removeprefix("note ") for line in said), numpy)
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    last = [line for line in errors.splitlines() if line.strip()][-1:] or [f"no output, exit status {status}"]
    return Outcome("FAILED", tuple(failed or last), numpy)


def table(rows: Iterable[tuple[Combination, Outcome, int]]) -> str:
    """All outcomes as a table of Markdown."""
    lines = ["| Python | framework | numpy | outcome | seconds |", "|---|---|---|---|---|"]
    for combination, outcome, seconds in rows:
        said = "; ".join((outcome.word, *outcome.remarks)).replace("|", "\\|")
        lines.append(f"| {combination.python} | {combination.requirement} | {outcome.numpy} | {said} | {seconds} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
