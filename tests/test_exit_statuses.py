"""Every command ends with a status of the one table in ``docs/formats.md``."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).resolve().parent / "sinks"))
sys.path.append(str(Path(__file__).resolve().parent / "merge"))
sys.path.append(str(Path(__file__).resolve().parent / "anomalies" / "ranking"))

from played_job import PlayedRank
from recorded_job import RecordedRank
from sink_rows import Measured

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SCRIPTS = dict(
    re.findall(
        r'^(trainermon|monitor-\S+) = "(.*)"', PROJECT.partition("[project.scripts]")[2].partition("\n[")[0], flags=re.MULTILINE
    )
)
Make = Callable[[Path], object]


def recorded(*ranks: int, world: int = 1, steps: int = 2, value: float = 1.0, dropped: str = "") -> Make:
    """Ranks of a job, with a row in each step."""

    def make(base: Path) -> None:
        for rank in ranks:
            one = RecordedRank(base, rank, world, "csv")
            for step in range(steps):
                one.write(step, {"grad_reduced": [Measured("w", [value])]})
            if dropped:
                one.manifest.dropped(steps, dropped)
            one.close()

    return make


def multiplied(outlier: float = 1.0, world: int = 1) -> Make:
    """A layer whose operands were recorded with histograms."""

    def make(base: Path) -> None:
        values = [0.5, 0.75, 1.0, outlier]
        names = {"actv": ("a.input", "a.output"), "actv_grad": ("a.input", "a.output"), "param_origin": ("a.weight",)}
        rows = {kind: [Measured(name, values, shape=(2, 2), magnitudes=True) for name in each] for kind, each in names.items()}
        one = RecordedRank(base, 0, world, "hdf5", ops=("absmax", "norm", "shape", "magnitude_histogram"))
        one.write(0, rows)
        one.close()

    return make


def watched(*ranks: int, world: int = 1) -> Make:
    """Ranks of a job that can be reconfigured."""

    def make(base: Path) -> None:
        (base / "config.json").write_text("{}")
        recorded(*ranks, world=world)(base)

    return make


def dumped(entries: object) -> Make:
    def make(base: Path) -> None:
        rank = base / "step0" / "rank0"
        rank.mkdir(parents=True)
        (rank / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L0", "data": entries}))

    return make


def nothing(_base: Path) -> None:
    """An empty directory."""


def sides(left: Make, right: Make) -> Make:
    def make(base: Path) -> None:
        for name, side in (("a", left), ("b", right)):
            (base / name).mkdir()
            side(base / name)

    return make


def later(base: Path) -> None:
    one = RecordedRank(base, 0, 1, "csv")
    one.write(7, {"grad_reduced": [Measured("w", [1.0])]})
    one.close()


TENSOR = {
    "output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "Max": 1, "Min": 1, "Mean": 1, "Norm": 1}]
}
CONVERSION: list[tuple[int, Make]] = [
    (0, recorded(0)),
    (1, recorded(0, world=2)),
    (1, recorded(0, dropped="queue full")),
    (1, recorded(0, steps=0)),
    (2, nothing),
]
CASES: dict[str, list[tuple[int, Make]]] = {
    "monitor-rank-anomalies": [
        (0, lambda base: PlayedRank().write(base)),
        (1, lambda base: PlayedRank().fire("actv", "b.output").write(base)),
        (1, lambda base: PlayedRank(rows_judged=0).write(base)),
        (1, lambda base: PlayedRank(trained=(0, 9)).write(base)),
        (1, lambda base: PlayedRank(closed=False).write(base)),
        (1, lambda base: PlayedRank(groups={"dp": (0, 1)}).write(base)),
        (2, nothing),
    ],
    "trainermon": CONVERSION,
    "monitor-merge": CONVERSION,
    "monitor-report": [
        (0, recorded(0, steps=20)),
        (1, recorded(0)),
        (1, recorded(0, steps=20, value=float("nan"))),
        (1, recorded(0, steps=0)),
        (2, nothing),
    ],
    "monitor-top": [
        (0, recorded(0, steps=20)),
        (1, recorded(0, dropped="no room")),
        (1, recorded(0, world=2)),
        (1, recorded(0, steps=20, value=float("nan"))),
        (2, nothing),
    ],
    "monitor-query": CONVERSION,
    "monitor-precision": [
        (0, multiplied()),
        (1, multiplied(outlier=1e12)),
        (1, multiplied(world=2)),
        (1, recorded(0)),
        (2, nothing),
    ],
    "monitor-convert": CONVERSION,
    "monitor-csv2tensorboard": CONVERSION,
    "monitor-csv2db": CONVERSION,
    "monitor-compare": [
        (0, sides(recorded(0), recorded(0))),
        (0, sides(dumped({"one": TENSOR}), dumped({"one": TENSOR}))),
        (1, sides(recorded(0), recorded(0, value=2.0))),
        (1, sides(recorded(0), later)),
        (1, sides(recorded(0, steps=0), recorded(0, steps=0))),
        (1, sides(dumped({}), dumped({}))),
        (2, sides(nothing, nothing)),
    ],
    "monitor-ctl": [(0, watched(0)), (1, watched(1, world=2)), (2, nothing)],
    "monitor-dump-recover": [(0, dumped({"one": TENSOR})), (1, nothing), (2, lambda base: base.rmdir())],
}
ARGUMENTS: dict[str, Callable[[Path], list[str]]] = {
    "trainermon": lambda base: ["merge", str(base)],
    "monitor-compare": lambda base: [str(base / "a"), str(base / "b")],
    "monitor-convert": lambda base: [str(base), "--to", "sqlite"],
    "monitor-ctl": lambda base: [str(base), "status"],
}


@pytest.mark.parametrize(
    ("command", "status", "make"),
    [(command, *case) for command, cases in CASES.items() for case in cases],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_a_command_ends_with_the_status_of_the_table(command: str, status: int, make: Make, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    make(base)
    module, _, name = SCRIPTS[command].partition(":")
    arguments = ARGUMENTS.get(command, lambda base: [str(base)])(base)
    result = CliRunner().invoke(getattr(importlib.import_module(module), name), arguments)
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.output.strip()


@pytest.mark.parametrize("command", SCRIPTS)
def test_every_command_has_a_case_of_each_status_and_a_row_in_the_document(command: str) -> None:
    if command != "monitor-run":  # it becomes another program, in a process of its own: tests/launching
        assert {status for status, _ in CASES[command]} == {0, 1, 2}
    section = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8").partition("## Exit statuses")[2]
    (row,) = re.findall(rf"^\| `{command}` \|(.*)\|$", section.partition("\n## ")[0], flags=re.MULTILINE)
    assert len(row.split("|")) == 3


@pytest.mark.parametrize("command", SCRIPTS)
def test_arguments_that_no_command_takes_end_with_2(command: str) -> None:
    module, _, name = SCRIPTS[command].partition(":")
    assert CliRunner().invoke(getattr(importlib.import_module(module), name), ["--no-such-option"]).exit_code == 2
