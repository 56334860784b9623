"""A training whose directory has a bound: it stays within it, and every step is written or thinned, and known as that."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watching import Output, attached, train, warnings_in

from monitor import open_run
from monitor.coordinator.manifest_format import ManifestRecord, read_manifest
from monitor.merge.merge import Wanted, merge

BOUND = 250_000
STEPS = 120
BROKEN = 31
CONFIG = {
    "wg_distribution": True,
    "param_distribution": True,
    "ops": ["norm", "min", "nans"],
    "max_output_bytes": BOUND,
    "alert": {"rules": [{"rule_name": "AnomalyNan"}]},
}


def bytes_in(directory: Path) -> int:
    """Of all files. The writer renames and removes files meanwhile."""
    total = 0
    for name in os.listdir(directory):
        try:
            total += (directory / name).stat().st_size
        except FileNotFoundError:
            continue
    return total


def trained(output: Output, first: int, last: int, **config: Any) -> int:
    """Train with a NaN in the gradient of step ``BROKEN``. Returns the most bytes that the directory had after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    most = 0
    with attached(output, model, optimizer, start_iteration=first, **CONFIG, **config) as monitor:
        for step in range(first, last):
            train(model, optimizer, 1, torch.full((2, 8), math.nan if step == BROKEN else 1.0))
            if step == BROKEN:  # the NaN is in the weights, too
                for layer in model:
                    layer.reset_parameters()
            monitor.generate_wgrad_metrics()
            most = max(most, bytes_in(output.directories()[-1]))
    return most


def manifest_of(output: Output) -> ManifestRecord:
    return read_manifest(output.directory() / "manifest.json")


def steps_of(record: ManifestRecord) -> tuple[set[int], set[int]]:
    """The written and the thinned steps."""
    return set(record.steps.written.steps()), {step for steps in record.thinned.steps.values() for step in steps.steps()}


@pytest.mark.parametrize(
    ("form", "per_record"), [("csv", 1), ("csv", 4), ("parquet", 4), ("hdf5", 4)], ids=["csv-1", "csv", "parquet", "hdf5"]
)
def test_the_directory_stays_within_the_bound_and_every_step_is_accounted_for(
    output: Output, form: str, per_record: int, caplog: pytest.LogCaptureFixture
) -> None:
    most = trained(output, 0, STEPS, format=form, step_count_per_record=per_record)
    record = manifest_of(output)
    written, thinned = steps_of(record)
    assert written | thinned == set(range(STEPS))
    assert not written & thinned
    assert thinned
    assert {BROKEN - 1, BROKEN, BROKEN + 1} <= written
    assert set(range(STEPS - 8, STEPS)) <= written
    one_step = bytes_in(output.directory()) / len(written)
    assert most <= BOUND + 2 * per_record * one_step + 20_000  # the open record, what is rewritten, and the manifest
    assert not [said for said in warnings_in(caplog) if "failed" in said]

    run = open_run(output.base)
    for kind in ("grad_reduced", "param_origin"):
        assert set(run.rows(kind)["step"].to_pylist()) == written
        assert len(run.rows(kind)) == 12 * len(written)
    assert all("thinned to stay within max_output_bytes" in said or said.startswith("and ") for said in run.missing)
    assert run.missing
    report = merge(Wanted(output.base, output.base / "merged"))
    told = report.told()
    assert (report.clean, report.steps) == (False, written)
    assert sum(one["steps"]["count"] for one in told["thinned"]["listed"]) == len(thinned)
    assert [told[what]["count"] for what in ("gaps", "dropped", "incomplete", "set_aside")] == [0] * 4


def test_a_run_that_continues_in_the_directory_keeps_to_the_bound(output: Output) -> None:
    config = {"format": "csv", "append_output": ["Jan01_00-00-00", "Dec31_23-59-59"]}
    trained(output, 0, STEPS, **config)
    before = manifest_of(output)
    most = trained(output, STEPS - 20, STEPS + 60, **config)
    record = manifest_of(output)
    written, thinned = steps_of(record)
    assert written | thinned == set(range(STEPS + 60))
    assert not written & thinned
    assert {BROKEN - 1, BROKEN, BROKEN + 1} <= written
    assert steps_of(before)[1] - set(range(STEPS - 20, STEPS)) <= thinned
    assert most <= BOUND + 30_000
    assert set(open_run(output.base).rows("grad_reduced")["step"].to_pylist()) == written


def test_a_bound_that_the_newest_steps_exceed_is_reported_once_and_recording_continues(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, **{**CONFIG, "max_output_bytes": 1000}):
        train(model, optimizer, 60, torch.ones(2, 8))
    written, thinned = steps_of(manifest_of(output))
    assert written | thinned == set(range(60))
    assert set(range(52, 60)) <= written
    assert len([said for said in warnings_in(caplog) if "Raise max_output_bytes" in said]) == 1
    assert output.manifest()["failures"] == {"max_output_bytes": 1}


def test_without_a_bound_nothing_is_removed(output: Output) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, **{**CONFIG, "max_output_bytes": 0}):
        train(model, optimizer, 60, torch.ones(2, 8))
    assert steps_of(manifest_of(output)) == (set(range(60)), set())
