"""Features, shares and histograms come through the converters."""

from __future__ import annotations

from pathlib import Path

import pytest
from converted_job import curves, query
from recorded_job import RecordedRank
from sink_rows import Measured, magnitudes_of

from monitor.convert import CSV2DBConfig, csv2db, csv2tensorboard_by_step
from monitor.sinks.csv import read_csv
from monitor.stats.histograms import histogram_text
from monitor.stats.partials import COUNT, MAX, SMALLS, SUM, SUMSQ

OPS = ("norm", "mean", "magnitude_histogram", "underflow_fp16")
SMALL = [0.0, 2.0**-30, -0.75, 3.0]
ROWS = {
    "other": [Measured("all_reduce.post_0", SMALL, calls=3, magnitudes=True)],
    "mg_direction": [Measured("w", numbers={COUNT: 8, SUM: 6.0})],
    "linear_hook": [
        Measured("h.0.weight", numbers={COUNT: 20, SMALLS: 1, SUMSQ: 25.0, MAX: 2.0}),
        Measured("h.1.weight", numbers={COUNT: 20, SMALLS: 2, SUMSQ: 36.0, MAX: 2.0}),
    ],
    "attention_hook": [Measured("h.0.attn", micro_step=1, numbers={COUNT: 4, SUM: 6.0, SUMSQ: 3.0})],
    "update_ratio": [Measured("w", numbers={COUNT: 8, SUM: 1.0, SUMSQ: 4.0})],
    "adam_update": [Measured("w", histogram=[0, 2])],
}


@pytest.fixture
def rank(tmp_path: Path) -> RecordedRank:
    """A rank that has recorded two steps."""
    micro_step_kinds = ("actv", "attention_hook")
    one = RecordedRank(tmp_path, 0, 1, "csv", ops=OPS, counted_kinds=["other"], micro_step_kinds=micro_step_kinds, ndigits=6)
    for step in range(2):
        one.write(step, ROWS)
    one.close()
    return one


@pytest.fixture
def database(rank: RecordedRank) -> Path:
    base = rank.directory.parent
    return csv2db(CSV2DBConfig(base, output_dirpath=base / "db")).output


def test_shares_stand_in_the_file_of_calls_and_combine_none(rank: RecordedRank) -> None:
    assert (rank.directory / "other_0-4.csv").read_text().splitlines()[:3] == [
        "vpp_stage,name,step,norm,mean,magnitude_histogram,underflow_fp16,calls",
        "0,all_reduce.post_0,0,3.092329,0.562500,0:1 9.3132257e-10:1 1:1 4:1,0.250000,3",
        "0,w,0,0.750000,0.750000,,,",
    ]


def test_the_file_of_features_reads_as_it_was_written(rank: RecordedRank) -> None:
    (row, cut) = read_csv(rank.directory / "linear_hook_0-4.csv").slice(0, 2).to_pylist()
    identity = {"vpp_stage": 0, "step": 0}
    assert row == {**identity, "name": "h.0.weight", "sr": 2.5, "kernel_norm": 2.0, "frobenius_norm": 5.0}
    assert cut == {**identity, "name": "h.1.weight", "sr": None, "kernel_norm": None, "frobenius_norm": 6.0}


def test_the_database_has_a_column_for_each_feature(database: Path) -> None:
    found = query(database, "SELECT name, sr, kernel_norm, frobenius_norm FROM linear_hook WHERE step = 1")
    assert found == [("h.0.weight", 2.5, 2.0, 5.0), ("h.1.weight", None, None, 6.0)]
    assert query(database, "SELECT micro_step, entropy, softmax_max FROM attention_hook WHERE step = 0") == [(1, 1.5, 0.75)]
    assert query(database, "SELECT update_ratio, update_norm, weight_norm FROM update_ratio LIMIT 1") == [(0.5, 1.0, 2.0)]


def test_the_database_has_shares_beside_calls_and_histograms_as_text(database: Path) -> None:
    columns = "name, mean, calls, magnitude_histogram, typeof(magnitude_histogram), underflow_fp16"
    counted = ("all_reduce.post_0", 0.5625, 3, histogram_text(magnitudes_of(SMALL)), "text", 0.25)
    assert query(database, f"SELECT {columns} FROM other WHERE step = 0") == [counted, ("w", 0.75, None, None, "null", None)]
    assert query(database, "SELECT DISTINCT norm FROM adam_update") == [(5.0,)]


def test_the_curves_are_those_that_the_format_tensorboard_writes(rank: RecordedRank, tmp_path: Path) -> None:
    csv2tensorboard_by_step(str(rank.directory.parent), None, None, output_dirpath=tmp_path / "curves")
    found = {tag: curve for kind in ROWS for tag, curve in _curves(tmp_path / "curves" / "rank0", kind).items()}
    kinds = {kind: rows for kind, rows in ROWS.items() if kind != "adam_update"}
    own = RecordedRank(
        tmp_path / "recorded", 0, 1, "tensorboard", ops=OPS, counted_kinds=["other"], micro_step_kinds=("attention_hook",)
    )
    for step in range(2):
        own.write(step, kinds)
    own.close()
    rounded = {tag: pytest.approx([value for _, value in curve], rel=1e-6) for tag, curve in curves(own.directory).items()}
    assert {tag: [value for _, value in curve] for tag, curve in found.items() if "adam" not in tag} == rounded


def _curves(directory: Path, kind: str) -> dict[str, list[tuple[int, float]]]:
    return curves(directory / kind) if (directory / kind).is_dir() else {}
