"""How many calls a row combines, wherever a user looks: the same number in every format, and in what is made of the files."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monitor.convert import CSV2DBConfig, csv2db
from monitor.merge.merge import Wanted, merge
from monitor.merge.outputs import read_merged
from monitor.sinks.hdf5 import read_hdf5

REDUCED = "all_reduce.post_0"
BY_STEP = [(0, 2), (1, 3)]
FORMATS = ["csv", "hdf5", "tensorboard", "api"]


@pytest.fixture(scope="module")
def job(run_ranks: Callable[..., Job]) -> Job:
    return run_ranks("counted.py", 2, others={"format": FORMATS, "wg_distribution": True, "step_count_per_record": 2})


def test_the_program_sees_them(job: Job) -> None:
    for rank in range(2):
        for step, calls in BY_STEP:
            for when in ("before", "after"):
                told: dict[str, dict[str, Any]] = job.monitored[rank][step][when]
                assert {tag: values["calls"] for tag, values in told.items()} == {f"0:{REDUCED}/rank{rank}/other": calls}
                (values,) = told.values()
                assert values["norm"] == pytest.approx((calls * 3) ** 0.5 * 2, rel=1e-12)
                assert isinstance(values["calls"], int)


def of_calls(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Step and calls of the operator's rows; the loss scale, which is of the same kind, is not a call."""
    assert [(row["step"], row["calls"]) for row in rows if row["name"] == "loss_scale"] == [(0, None), (1, None)]
    return [(row["step"], row["calls"]) for row in rows if row["name"] == REDUCED]


def test_csv_has_it(job: Job) -> None:
    for rank in range(2):
        rows = [{"name": row.name, "step": row.step, **row.values} for row in job.rows("other", rank)]
        assert of_calls(rows) == BY_STEP


def test_hdf5_has_it(job: Job) -> None:
    for directory in job.directories:
        rows = read_hdf5(directory / "metrics_0-1.h5")
        assert of_calls([row for row in rows.to_pylist() if row["kind"] == "other"]) == BY_STEP
        assert {row["calls"] for row in rows.to_pylist() if row["kind"] != "other"} == {None}


def test_tensorboard_has_it(job: Job) -> None:
    for rank, directory in enumerate(job.directories):
        run = EventAccumulator(str(directory))
        run.Reload()
        tags = [tag for tag in run.Tags()["scalars"] if tag.endswith("_calls")]
        assert tags == [f"0:{REDUCED}/rank{rank}/other_calls"]
        assert [(one.step, one.value) for one in run.Scalars(tags[0])] == BY_STEP


def test_the_merged_data_set_has_it(job: Job, tmp_path: Path) -> None:
    assert merge(Wanted(job.base, tmp_path / "merged")).clean
    rows = read_merged(tmp_path / "merged" / "per_rank" / "other_0-1.parquet").to_pylist()
    for rank in range(2):
        assert of_calls([row for row in rows if row["rank"] == rank]) == BY_STEP
    tensors = read_merged(tmp_path / "merged" / "global" / "other_0-1.parquet").to_pylist()
    assert [(row["ranks"], row["step"], row["calls"]) for row in tensors if row["name"] == REDUCED] == [
        (ranks, *one) for one in BY_STEP for ranks in ("0", "1")
    ]


def test_the_database_has_it(job: Job, tmp_path: Path) -> None:
    made = csv2db(CSV2DBConfig(job.base, output_dirpath=tmp_path)).output
    connection = sqlite3.connect(made)
    found = connection.execute("SELECT rank, step, calls FROM other WHERE calls IS NOT NULL ORDER BY 1, 2").fetchall()
    connection.close()
    assert found == [(rank, *one) for rank in range(2) for one in BY_STEP]
