"""Two dumps against each other: where they part, and by how much."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import floats, lists, tuples
from torch import Tensor, nn
from typer.testing import CliRunner

from monitor.compare.cli import app
from monitor.compare.values import of_leaves, of_numbers, of_tensors
from monitor.pytorch import PrecisionDebugger


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def dump(directory: Path, change: Callable[[Layers], object] = lambda _: None, **arguments: Any) -> Path:
    torch.manual_seed(0)
    network = Layers()
    change(network)
    debugger = PrecisionDebugger(dump_path=directory, **{"level": "mix", "task": "tensor", **arguments})
    for _ in range(2):
        debugger.start(network)
        network(torch.linspace(-1, 1, 18).view(3, 6)).sum().backward()
        debugger.step()
    debugger.close()
    return directory


def flip_last_bit(network: Layers) -> None:
    bits = network.blocks[2].weight.data.view(torch.int32)
    bits[3, 1] ^= 1


def compared(*arguments: object) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, [str(one) for one in arguments])
    return outcome.exit_code, outcome.output


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def test_two_identical_runs_are_the_same(tmp_path: Path) -> None:
    status, said = compared(dump(tmp_path / "a"), dump(tmp_path / "b"))
    assert (status, "the same: " in said) == (0, True)


@pytest.mark.parametrize("option", [["--map", "a=b"], ["--job", "a"], ["--whole"], ["--ranks"]])
def test_options_of_runs_are_refused(tmp_path: Path, option: list[str]) -> None:
    status, said = compared(dump(tmp_path / "a"), tmp_path / "a", *option)
    assert (status, option[0] in said, "are for runs" in said.replace("\n", " ")) == (2, True, True)


@pytest.mark.parametrize("arguments", [{"task": "tensor"}, {"config_path": "md5.json", "task": "statistics"}])
def test_one_bit_in_one_weight_is_found_where_it_is_seen_first(tmp_path: Path, arguments: dict[str, Any]) -> None:
    (tmp_path / "md5.json").write_text(json.dumps({"statistics": {"summary_mode": "md5"}}))
    if "config_path" in arguments:
        arguments = {**arguments, "config_path": tmp_path / "md5.json"}
    left, right = dump(tmp_path / "a", **arguments), dump(tmp_path / "b", flip_last_bit, **arguments)
    status, said = compared(left, right, "-o", tmp_path / "found.csv")
    assert status == 1
    first = rows(tmp_path / "found.csv")[0]
    assert (first["step"], first["name"], first["what"]) == ("0", "Functional.linear.2.forward.input_args.1", "values")
    assert "first: step 0" in said


@pytest.mark.parametrize("below", ["step1", "step1/*"])
def test_directories_of_a_step_are_compared_and_their_step_is_told(tmp_path: Path, below: str) -> None:
    left, right = dump(tmp_path / "a"), dump(tmp_path / "b", flip_last_bit)
    (one,), (other,) = left.glob(below), right.glob(below)
    status, said = compared(one, other, "-o", tmp_path / "found.csv")
    assert status == 1
    assert {row["step"] for row in rows(tmp_path / "found.csv")} == {"1"}
    assert "first: step 1" in said


def test_directories_of_two_steps_of_a_dump_are_compared(tmp_path: Path) -> None:
    found = dump(tmp_path / "a")
    status, said = compared(found / "step0", found / "step1")
    assert (status, "the same: " in said) == (0, True)


def test_the_module_that_has_the_weight_is_the_first_of_the_modules(tmp_path: Path) -> None:
    left, right = dump(tmp_path / "a", level="L0"), dump(tmp_path / "b", flip_last_bit, level="L0")
    compared(left, right, "-o", tmp_path / "found.csv")
    found = [row["name"] for row in rows(tmp_path / "found.csv")]
    assert found[0].startswith("Module.blocks.2.Linear.forward.0.")
    assert "Module.blocks.2.Linear.forward.0.parameters.weight" in found


def test_errors_and_the_cosine_are_those_of_the_elements(tmp_path: Path) -> None:
    def scale(network: Layers) -> None:
        with torch.no_grad():
            network.blocks[0].bias.mul_(-1)

    left, right = dump(tmp_path / "a", level="L0"), dump(tmp_path / "b", scale, level="L0")
    compared(left, right, "-o", tmp_path / "found.csv")
    (bias,) = [
        row
        for row in rows(tmp_path / "found.csv")
        if row["step"] == "0" and row["name"] == "Module.blocks.0.Linear.forward.0.parameters.bias"
    ]
    torch.manual_seed(0)
    greatest = Layers().blocks[0].bias.abs().max().item()
    assert float(bias["absolute_error"]) == pytest.approx(2 * greatest, rel=1e-5)
    assert (float(bias["relative_error"]), float(bias["cosine"])) == (2.0, -1.0)


def test_a_tolerance_lets_small_differences_pass(tmp_path: Path) -> None:
    left, right = dump(tmp_path / "a"), dump(tmp_path / "b", flip_last_bit)
    assert compared(left, right, "--tolerance", 0.01)[0] == 0


def test_a_call_that_is_on_one_side_alone_is_a_difference(tmp_path: Path) -> None:
    left, right = dump(tmp_path / "a", level="L0"), dump(tmp_path / "b")
    status, _ = compared(left, right, "-o", tmp_path / "found.csv")
    assert status == 1
    assert {row["what"] for row in rows(tmp_path / "found.csv")} == {"added"}


def test_another_shape_is_said_as_such(tmp_path: Path) -> None:
    for side, width in (("a", 2), ("b", 3)):
        debugger = PrecisionDebugger(dump_path=tmp_path / side)
        debugger.start()
        torch.relu(torch.ones(width))
        debugger.step()
    compared(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "found.csv")
    first = rows(tmp_path / "found.csv")[0]
    assert [first[key] for key in ("what", "left", "right")] == ["shape", "[2]", "[3]"]


def test_what_is_no_dump_is_named(tmp_path: Path) -> None:
    status, said = compared(tmp_path, tmp_path)
    assert status == 2
    assert "neither a precision dump nor a monitored run" in said.replace("\n", " ")


def test_the_same_nan_in_the_same_place_is_no_difference() -> None:
    a = np.array([1.0, math.nan, math.inf])
    assert of_tensors(a, a.copy()).same
    assert of_tensors(a, np.array([2.0, math.nan, math.inf])).relative == 0.5


def test_a_nan_against_a_number_is_larger_than_any_difference() -> None:
    assert of_tensors(np.array([1.0]), np.array([math.nan])).size == math.inf
    assert of_numbers([(1.0, None)]).size == math.inf


@given(lists(tuples(floats(), floats()) | floats().map(lambda one: (one, one)), min_size=1))
def test_numbers_differ_as_tensors_of_them_do(pairs: list[tuple[float, float]]) -> None:
    pairs = [(math.nan if math.isnan(a) else a, math.nan if math.isnan(b) else b) for a, b in pairs]  # NaN with the same bits
    numbers, tensors = of_numbers(pairs), of_tensors(*(np.array(side) for side in zip(*pairs, strict=True)))
    assert repr(replace(tensors, cosine=None)) == repr(numbers)


def test_opposite_infinities_differ_by_infinity() -> None:
    found = of_tensors(np.array([math.inf]), np.array([-math.inf]))
    assert (found.absolute, found.relative) == (math.inf, 1.0)


STATISTICS = ("Max", "Min", "Mean", "Norm")


def leaf(*numbers: float, shape: object = (4, 25)) -> dict[str, Any]:
    return {"shape": [*shape] if isinstance(shape, tuple) else shape, **dict(zip(STATISTICS, numbers, strict=True))}


@pytest.mark.parametrize(
    ("one", "other", "relative"),
    [
        (leaf(3.0, -3.0, 1e-6, 10.0), leaf(3.0, -3.0, -1e-6, 10.0), 2e-6),  # the root mean square is 1
        (leaf(3.0, -3.0, 1e-6, 10.0), leaf(3.0, -3.3, -1e-6, 10.0), 0.3 / 3.3),
        (leaf(2.0, 2.0, 2.0, 20.0), leaf(4.0, 4.0, 4.0, 40.0), 0.5),
        (leaf(3.0, -3.0, 1e-6, 10.0, shape=None), leaf(3.0, -3.0, -1e-6, 10.0, shape=None), 2.0),
    ],
)
def test_a_mean_near_zero_is_compared_with_the_size_of_the_elements(
    one: dict[str, Any], other: dict[str, Any], relative: float
) -> None:
    found = of_leaves(one, other, STATISTICS)
    assert (found.same, found.relative) == (False, pytest.approx(relative))


def test_a_mean_that_is_no_number_on_one_side_differs_by_nan() -> None:
    found = of_leaves(leaf(3.0, -3.0, math.nan, 10.0), leaf(3.0, -3.0, 0.0, 10.0), STATISTICS)
    assert (found.same, math.isnan(found.relative)) == (False, True)
