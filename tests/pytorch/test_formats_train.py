"""One training, written in every format at once: all of them say the same."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow.parquet import read_table
from torch import nn
from watching import EVERYTHING, Output, attached, train

from monitor.series import NO_MICRO_STEP, Series
from monitor.sinks.arrow import ShardMetadata
from monitor.sinks.csv import read_csv
from monitor.sinks.files import ALL_STEPS
from monitor.sinks.hdf5 import read_hdf5
from monitor.sinks.parquet import rows_of
from monitor.stats.partials import PARTIALS

OPS = EVERYTHING["ops"]
Values = Mapping[tuple[str, int, str], float | None]
"""By TensorBoard's tag without its op, step and op."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """Of five steps of a model whose fourth step meets a NaN."""
    base = tmp_path_factory.mktemp("formats") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONITOR_OUTPUT_DIR", str(base))
        record(Output(base))
    return Output(base)


def record(output: Output) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    config = {**EVERYTHING, "format": ["csv", "hdf5", "parquet", "tensorboard", "api"], "step_count_per_record": 2}
    x = torch.randn(6, 5)
    with attached(output, model, optimizer, **config):
        train(model, optimizer, 3, x)
        train(model, optimizer, 2, torch.where(x == x.max(), math.nan, x))


def of_csv(output: Output) -> dict[tuple[str, int, str], float | None]:
    tables = {path: read_csv(path) for path in output.directory().glob("*_*-*.csv")}
    rows = [{"kind": path.name.rpartition("_")[0], **row} for path, table in tables.items() for row in table.to_pylist()]
    return by_tag(rows)


def of_hdf5(output: Output) -> dict[tuple[str, int, str], float | None]:
    return by_tag([row for path in output.directory().glob("*.h5") for row in read_hdf5(path, ops=OPS).to_pylist()])


def of_tensorboard(output: Output) -> dict[tuple[str, int, str], float | None]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = EventAccumulator(str(output.directory()), size_guidance={"scalars": 0})
    run.Reload()
    scalars = {tuple(tag.rsplit("_", 1)): run.Scalars(tag) for tag in run.Tags()["scalars"]}
    return {(tag, one.step, op): one.value for (tag, op), found in scalars.items() for one in found}


def by_tag(rows: list[dict[str, Any]]) -> dict[tuple[str, int, str], float | None]:
    found: dict[tuple[str, int, str], float | None] = {}
    for row in rows:
        micro_step = NO_MICRO_STEP if row.get("micro_step") is None else row["micro_step"]
        tag = Series(row["kind"], row["vpp_stage"], row["name"]).tag(0, micro_step)
        assert (tag, row["step"], OPS[0]) not in found
        found |= {(tag, row["step"], op): row[op] for op in OPS}
    return found


def test_hdf5_and_csv_have_the_same_rows_with_the_same_values(trained: Output) -> None:
    csv, hdf5 = of_csv(trained), of_hdf5(trained)
    assert csv.keys() == hdf5.keys()
    for place, value in csv.items():
        assert value == pytest.approx(hdf5[place], rel=1e-15, abs=1e-16, nan_ok=True), place
    assert any(value is not None and math.isnan(value) for value in csv.values())


def test_parquet_has_the_partials_of_hdf5_in_its_order_and_its_ops_as_columns(trained: Output) -> None:
    directory = trained.directory()
    names = sorted(path.stem for path in directory.glob("*.h5"))
    assert names == sorted(path.stem for path in directory.glob("*.parquet"))
    assert len(names) > 1
    for name in names:
        shard, path = directory / f"{name}.h5", directory / f"{name}.parquet"
        assert repr(rows_of(path, ALL_STEPS).to_pylist()) == repr(read_hdf5(shard).to_pylist())
        shown = read_table(path)
        ops = [op for op in OPS if op in shown.column_names and op not in PARTIALS]
        assert {"norm", "mean"} <= set(ops)
        key = ["kind", "name", "step", "call_id"]
        theirs = read_hdf5(shard, ops=ops).select([*key, *ops]).to_pylist()
        assert repr(shown.select([*key, *ops]).to_pylist()) == repr(sorted(theirs, key=lambda row: [row[one] for one in key]))


def test_tensorboard_has_them_in_single_precision(trained: Output) -> None:
    csv, tensorboard = of_csv(trained), of_tensorboard(trained)
    expected = {place: float(np.float32(value)) for place, value in csv.items() if value is not None}
    assert expected.keys() == tensorboard.keys()
    for place, value in expected.items():
        assert value == pytest.approx(tensorboard[place], rel=1e-6, nan_ok=True), place


def test_kurtosis_is_the_same_in_every_format_and_as_the_definition_says(output: Output) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model[0].weight.pow_(3).add_(1)
        model[0].bias.fill_(0.1)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    config = {"param_distribution": True, "ops": ["kurtosis"], "format": ["csv", "hdf5", "tensorboard"], "ndigits": 17}
    with attached(output, model, optimizer, **config):
        train(model, optimizer, 1, torch.randn(6, 5))
    csv = read_csv(output.directory() / "param_origin_0-0.csv").to_pylist()
    (shard,) = output.directory().glob("*.h5")
    hdf5 = read_hdf5(shard, kinds=["param_origin"], ops=["kurtosis"]).to_pylist()
    found, exact = ({row["name"]: row["kurtosis"] for row in rows} for rows in (csv, hdf5))
    shown = [value for (tag, _, _), value in of_tensorboard(output).items() if "origin" in tag]
    assert {name for name, value in found.items() if value is None} == {"0.bias", "2.bias"}
    assert {name for name, value in exact.items() if value is None} == {"0.bias", "2.bias"}
    for name in ("0.weight", "2.weight"):
        off = weights[name].double() - weights[name].double().mean()
        expected = (off**4).mean() / off.square().mean().square() - 3
        assert found[name] == exact[name] == pytest.approx(expected.item(), rel=1e-6)  # float32 elements: decision 014
    assert sorted(shown) == pytest.approx(sorted(value for value in found.values() if value is not None), rel=1e-6)


def test_kurtosis_is_recorded_from_the_step_on_in_which_it_is_asked_for(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, param_distribution=True, ops=["norm"], format=["hdf5"]) as monitor:
        for ops in (["norm"], ["kurtosis"], ["max"]):
            monitor.ops = ops
            train(model, optimizer, 1, torch.randn(6, 5))
    rows = [row for path in output.directory().glob("*.h5") for row in read_hdf5(path, ops=["kurtosis"]).to_pylist()]
    assert {row["step"] for row in rows if row["kurtosis"] is not None} == {1}


def test_a_shard_holds_the_record_and_says_what_was_configured(trained: Output) -> None:
    paths = sorted(trained.directory().glob("*.h5"))
    assert [path.name for path in paths] == ["metrics_0-1.h5", "metrics_2-3.h5", "metrics_4-5.h5"]
    assert [ShardMetadata.unpacked(read_hdf5(path).schema.metadata) for path in paths] == [
        ShardMetadata(0, 1e-8, tuple(OPS))
    ] * 3


def test_rows_stand_in_the_order_in_which_they_were_measured(trained: Output) -> None:
    (path,) = trained.directory().glob("metrics_0-1.h5")
    table = read_hdf5(path, kinds=["actv"], steps=(1, 1))
    names = read_csv(trained.directory() / "actv_0-1.csv").to_pylist()
    assert table["name"].to_pylist() == [row["name"] for row in names if row["step"] == 1]
    assert table["call_id"].to_pylist() == sorted(table["call_id"].to_pylist())


def test_a_skipped_step_is_in_hdf5_marked_so(output: Output) -> None:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with attached(output, model, optimizer, wg_distribution=True, ops=["nans", "infs"], format=["hdf5", "tensorboard"]):
        for factor in (1.0, math.inf, 1.0):
            scaler.scale(model(torch.ones(2, 5)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    (path,) = output.directory().glob("*.h5")
    table = read_hdf5(path)
    assert ShardMetadata.unpacked(table.schema.metadata).skipped == (1,)
    assert set(table["step"].to_pylist()) == {0, 1, 2}
    assert output.manifest()["steps"]["written"]["ranges"] == [[0, 2, 1]]


class OddlyNamed(nn.Module):
    """UTF-8 has no half of a surrogate pair."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("half\ud800", nn.Linear(3, 3))
        self.register_parameter("scale\udfff", nn.Parameter(torch.ones(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x) * next(self.parameters())


def test_names_that_utf_8_lacks_are_escaped_in_every_file_and_stop_nothing(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = OddlyNamed()
    optimizer = torch.optim.SGD(list(next(model.children()).parameters()), 0.1)  # a warning names the other parameter
    formats = ["csv", "hdf5", "parquet", "tensorboard"]
    rules = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}
    config = EVERYTHING | {"format": formats, "alert": rules, "stack_info": True, "run_numbers": True}
    with attached(output, model, optimizer, **config) as monitor:
        monitor.log(**{"odd\ud800": 1.0})
        train(model, optimizer, 1, torch.full((2, 3), math.nan))

    expected = {".input", r"half\ud800.input", r"half\ud800.output", ".output"}
    assert {row.name for row in output.rows("actv")} == expected
    assert {row["name"] for path in output.directory().glob("*.h5") for row in read_hdf5(path).to_pylist()} >= expected
    assert r"odd\ud800" in {row.name for row in output.rows("run")}
    assert output.manifest()["failures"] == {"parameters of no optimizer": 1}
    (events,) = (json.loads(path.read_text()) for path in output.base.glob("anomaly_detected/rank0/anomaly-*.json"))
    assert any(r"half\ud800.output" in event["tag_name"] for event in events.values())
    said = [record.getMessage() for record in caplog.records]
    assert any(r"scale\udfff" in one for one in said)
    assert not any("failed" in one for one in said)
