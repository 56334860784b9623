"""Whatever has happened to the files of a run, a comparison ends with a clear message, and damage is never called the same."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence import PROVES
from recorded_job import RecordedRank, merged
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.compare.cli import app
from monitor.series import Placement, Shard
from monitor.stats.partials import COUNT, SUM

SEEDS = range(32 if PROVES else 2)
VALUES: list[Any] = [None, True, -1, 2**70, 1e400, float("nan"), "", "\x1b[31m", "a" * 5000, [], {}, [[[]]], {"a": {}}]


def record(base: Path, ranks: int, format: str) -> None:  # noqa: A002
    for rank in range(ranks):
        one = RecordedRank(base, rank, ranks, format, {"dp": range(ranks)}, ops=("norm", "mean", "max", "shape"))
        one.place("grad_reduced", "w", Placement(shard=Shard(tuple(range(ranks)), (4,), (rank * 4 // ranks,))))
        for step in range(3):
            values = [1.0, 2.0, 3.0, 4.0 + step][rank * 4 // ranks : (rank + 1) * 4 // ranks]
            run = [Measured("loss", numbers={COUNT: 1, SUM: 2.0 - step})]
            actv = [Measured("m.output", values, micro) for micro in range(2)]
            one.write(step, {"actv": actv, "grad_reduced": [Measured("w", values)], "run": run})
        one.close()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    for ranks, format in ((1, "parquet"), (2, "parquet"), (2, "hdf5"), (2, "csv")):  # noqa: A001
        record(base / f"{ranks}-{format}", ranks, format)
    merged(base / "2-parquet")
    (base / "2-parquet" / "merged").rename(base / "2-merged")
    return base


def flipped(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 8, 200])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut(file: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content))])


def zeroed(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    begin = draw.randrange(len(content))
    content[begin : begin + 500] = bytes(len(content[begin : begin + 500]))
    file.write_bytes(content)


def removed(file: Path, _draw: random.Random) -> None:
    file.unlink()


def replaced(file: Path, draw: random.Random) -> None:
    others = [one for one in file.parent.iterdir() if one != file and one.is_file()]
    file.write_bytes(draw.choice(others).read_bytes() if others else b"PAR1" * 9)


def a_directory(file: Path, _draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def dangling(file: Path, _draw: random.Random) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def other_json(file: Path, draw: random.Random) -> None:
    """Another value somewhere in a manifest or a report."""
    found = list(file.parents[1].rglob("*.json"))
    path = draw.choice(found) if found else file
    data = json.loads(path.read_text()) if found else {}
    place = data
    while isinstance(place, (dict, list)) and place:
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if draw.random() < 0.4 or not isinstance(place[key], (dict, list)) or not place[key]:
            if draw.random() < 0.3:
                del place[key]
            else:
                place[key] = draw.choice(VALUES)
            break
        place = place[key]
    path.write_text(json.dumps(data))


DAMAGE: list[Callable[[Path, random.Random], None]] = [
    flipped, cut, zeroed, removed, replaced, a_directory, dangling, other_json
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda one: one.__name__)
@pytest.mark.parametrize("side", ["2-parquet", "2-hdf5", "2-csv", "2-merged"])
def test_damage_is_told_or_harms_nothing(
    tmp_path: Path, healthy: Path, side: str, damage: Callable[[Path, random.Random], None]
) -> None:
    for seed in SEEDS:
        draw = random.Random(f"{side} {damage.__name__} {seed}")
        base = tmp_path / str(seed)
        shutil.copytree(healthy / side, base)
        files = sorted(one for one in base.rglob("*") if one.is_file())
        file = draw.choice(files)
        loses_rows = damage in (removed, a_directory, dangling) and file.suffix in (".parquet", ".h5", ".csv")
        damage(file, draw)
        for other in (healthy / draw.choice(["1-parquet", "2-parquet"]), healthy / side):
            pair = [str(base), str(other)]
            options = draw.choice([[], ["--whole"], ["--ranks"], ["--tolerance", "0"]])
            outcome = CliRunner().invoke(app, [*options, *(pair if draw.random() < 0.5 else pair[::-1])])
            told = f"{side} {damage.__name__} {seed} {options}: {outcome.output}\n{outcome.exc_info}"
            assert outcome.exit_code in (0, 1, 2), told
            assert outcome.exception is None or isinstance(outcome.exception, SystemExit), told
            assert outcome.exit_code != 2 or outcome.output.startswith("Nothing was compared: "), told
            assert outcome.exit_code > 0 or not loses_rows or side == "2-merged", told
        shutil.rmtree(base)
