"""Files of a job are cut off, changed, exchanged, or replaced: the command says so, and what is whole stays right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import Result
from evidence import examples
from hypothesis import HealthCheck, example, given, settings, strategies as st
from recorded_job import FORMATS, RecordedRank, table
from sink_rows import Measured
from typer.testing import CliRunner

from monitor.merge.cli import app
from monitor.series import Placement, Shard

RANKS = tuple(range(4))
CUT = (0, 1)
"""These hold ``w`` between them."""


class Damage(NamedTuple):
    """What is done to a file, told by numbers between 0 and 1."""

    how: str
    file: float
    other: float
    place: float
    byte: int


damages = st.builds(
    Damage,
    st.sampled_from(["cut off", "change", "exchange", "remove", "empty", "grow", "copy over", "directory", "pipe"]),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 255),
)


@pytest.fixture(scope="module", params=FORMATS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, merged."""
    base = tmp_path_factory.mktemp("whole")
    for rank in RANKS:
        one = RecordedRank(base, rank, len(RANKS), request.param, {"dp": RANKS})
        if rank in CUT:
            one.place("grad_reduced", "w", Placement(shard=Shard(CUT, (4,), (2 * rank,))))
        one.place("grad_reduced", "b", Placement(unclaimed=RANKS))
        for step in range(8):
            rows = [Measured("w", [step, rank + 0.5]), Measured("b", [step])]
            one.write(step, {"grad_reduced": rows, "actv": [Measured("m.output", [rank, step], 0)]})
        one.close()
    assert merged_by_command(base).exit_code == 0
    return base


def merged_by_command(base: Path) -> Result:
    return CliRunner().invoke(app, [str(base)])


def damage(base: Path, one: Damage) -> set[int]:
    """The ranks whose files are not as they were."""
    files = sorted(path for path in base.glob("*-rank*/*") if path.is_file())
    path, other = (files[int(where * len(files))] for where in (one.file, one.other))
    content = path.read_bytes()
    at = int(one.place * len(content))
    touched = {path} if one.how != "exchange" else {path, other}
    if one.how == "exchange":
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif one.how == "copy over":
        path.write_bytes(other.read_bytes())
    elif one.how in ("remove", "directory", "pipe"):
        path.unlink()
        {"remove": lambda: None, "directory": path.mkdir, "pipe": lambda: os.mkfifo(path)}[one.how]()
    else:
        changed = {
            "cut off": content[:at],
            "change": content[:at] + bytes(byte ^ one.byte for byte in content[at : at + 1]) + content[at + 1 :],
            "empty": b"",
            "grow": content + content[at:],
        }
        path.write_bytes(changed[one.how])
    return {int(path.parent.name.split("-rank")[1].split("-")[0]) for path in touched}


def rows_of(base: Path, folder: str, ranks: Sequence[int]) -> list[str]:
    """Those that only these ranks had a part in; of copies it does not matter whose was taken."""
    found = []
    for kind in {path.name.rsplit("_", 1)[0] for path in (base / "merged" / folder).iterdir()}:
        for row in table(base, folder, kind).to_pylist():
            held = {row["rank"]} if folder == "per_rank" else set(map(int, row.pop("ranks").split()))
            if held <= set(ranks):
                found.append(str(row))
    return sorted(found)


@settings(max_examples=examples(6, 12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(done=st.lists(damages, min_size=1, max_size=3))
@example(done=[Damage("change", file=0.125, other=0, place=0.08203125, byte=1)])  # in the root group of HDF5
def test_what_is_damaged_changes_nothing_of_what_is_not(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, done: list[Damage]
) -> None:
    base = tmp_path_factory.mktemp("job") / "job"
    shutil.copytree(whole, base, ignore=shutil.ignore_patterns("merged"))
    touched = set().union(*(damage(base, one) for one in done))
    result = merged_by_command(base)
    assert result.exit_code in (0, 1, 2), (result.exception, result.output)
    assert isinstance(result.exception, SystemExit | None), result.exception
    if result.exit_code == 2:
        assert "Nothing was merged: " in result.output
        assert not (base / "merged").exists()
    else:
        others = [rank for rank in RANKS if rank not in touched]
        assert rows_of(base, "per_rank", others) == rows_of(whole, "per_rank", others)
        assert set(rows_of(base, "global", others)) <= set(rows_of(whole, "global", RANKS))
    shutil.rmtree(base)
