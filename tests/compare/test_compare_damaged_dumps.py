"""What a comparison must not take for the same, and what it says of dumps that are not whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from monitor.compare.cli import app
from monitor.dump.files import FILE, Records

TENSOR = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0, "Min": 1.0, "Mean": 1.0, "Norm": 1.5}


def dump(directory: Path, data: dict[str, Any], rank: int = 0) -> Path:
    place = directory / "step0" / f"rank{rank}"
    place.mkdir(parents=True)
    (place / "dump.json").write_text(json.dumps({"task": "statistics", "data": data}))
    return place


def compared(tmp_path: Path) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, [str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "found.csv")])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit)
    return outcome.exit_code, outcome.output.replace("\n", "")


def found(tmp_path: Path) -> list[tuple[str, str, str]]:
    with (tmp_path / "found.csv").open() as file:
        return [(row["rank"], row["name"], row["what"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"type": TENSOR}, {"type": {**TENSOR, "Max": 2.0}}),
        ({**TENSOR, "Max": None}, {**TENSOR, "Max": float("nan")}),
        ([], {}),
        ([TENSOR], {"0": TENSOR}),
        ({"a.b": TENSOR, "a": {"b": TENSOR}}, {"a.b": {**TENSOR, "Max": 2.0}, "a": {"b": TENSOR}}),
    ],
)
def test_what_is_not_the_same_is_a_difference(tmp_path: Path, left: Any, right: Any) -> None:
    dump(tmp_path / "a", {"one": {"output": left}})
    dump(tmp_path / "b", {"one": {"output": right}})
    assert compared(tmp_path)[0] == 1


def test_an_argument_that_is_nan_on_both_sides_is_the_same(tmp_path: Path) -> None:
    for side in ("a", "b"):
        dump(tmp_path / side, {"one": {"output": [{"type": "float", "value": float("nan")}]}})
    assert compared(tmp_path)[0] == 0


def with_elements(directory: Path) -> Path:
    place = dump(directory, {"one": {"output": [{**TENSOR, "data_name": "one.npy"}]}})
    (place / "dump_tensor_data").mkdir()
    np.save(place / "dump_tensor_data" / "one.npy", np.ones(2, np.float32))
    return place / "dump_tensor_data" / "one.npy"


def test_elements_that_one_side_has_lost_are_a_difference(tmp_path: Path) -> None:
    with_elements(tmp_path / "a")
    with_elements(tmp_path / "b").unlink()
    assert compared(tmp_path)[0] == 1
    assert found(tmp_path) == [("rank0", "one.output.0", "missing")]


@pytest.mark.parametrize("kept", [0, 60, 130])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, kept: int) -> None:
    with_elements(tmp_path / "a")
    file = with_elements(tmp_path / "b")
    file.write_bytes(file.read_bytes()[:kept])
    status, said = compared(tmp_path)
    assert (status, "b/step0/rank0/dump_tensor_data/one.npy cannot be read" in said) == (2, True)


def test_calls_that_one_side_alone_has_stand_where_they_happened(tmp_path: Path) -> None:
    dump(tmp_path / "a", {"one": {}, "two": {"output": [TENSOR]}})
    dump(tmp_path / "b", {"zero": {}, "one": {}, "new": {}, "two": {"output": [{**TENSOR, "Max": 2.0}]}})
    compared(tmp_path)
    assert [name for _, name, _ in found(tmp_path)] == ["zero", "new", "two.output.0"]


def test_ranks_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for rank in (10, 2):
        dump(tmp_path / "a", {"one": {}}, rank)
        dump(tmp_path / "b", {}, rank)
    compared(tmp_path)
    assert [rank for rank, _, _ in found(tmp_path)] == ["rank2", "rank10"]


def test_the_dump_of_a_killed_process_is_to_be_recovered_first(tmp_path: Path) -> None:
    dump(tmp_path / "a", {})
    place = dump(tmp_path / "b", {})
    (place / "dump.json").unlink()
    Records(place / FILE).close()
    status, said = compared(tmp_path)
    assert (status, "run trainermon dump-recover" in said) == (2, True)


def test_a_directory_without_a_dump_is_named(tmp_path: Path) -> None:
    dump(tmp_path / "a", {"one": {"output": TENSOR}})
    (tmp_path / "b").mkdir()
    status, said = compared(tmp_path)
    assert status == 2
    assert "b has no dump.json in it: name a dump_path, or the directory of a rank's step." in said


def test_dumps_that_have_no_rank_in_common_are_not_compared(tmp_path: Path) -> None:
    for side, ranks in (("a", (0, 1)), ("b", (2, 3))):
        for rank in ranks:
            dump(tmp_path / side, {"one": {"output": TENSOR}}, rank)
    status, said = compared(tmp_path)
    assert status == 2
    assert "have no step and rank in common." in said


def test_a_file_that_is_no_dump_is_named(tmp_path: Path) -> None:
    for side in ("a", "b"):
        dump(tmp_path / side, {"one": {"output": TENSOR}})
    (tmp_path / "b" / "step0" / "rank0" / "dump.json").write_text("[]")
    status, said = compared(tmp_path)
    assert status == 2
    assert "dump.json is no file of a dump" in said
