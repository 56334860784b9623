"""Two dumps of MindSpore against each other."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from cells_to_dump import Convolutional, Transformer, dumping, gradients_of, seeded
from mindspore import Tensor, nn
from typer.testing import CliRunner

from monitor.compare.cli import app


def dumped(base: Path, kind: type[nn.Cell], flipped: str = "") -> Path:
    """A dump, of a network in one of whose weights the last bit of the first element may have been flipped."""
    network = seeded(kind)
    if flipped:
        parameter = network.parameters_dict()[flipped]
        elements = parameter.asnumpy().copy()
        elements.view(np.uint32).flat[0] ^= 1
        parameter.set_data(Tensor(elements))
    with dumping(base, network, level="L0", task="tensor"):
        gradients_of(network)
    return base


@pytest.mark.parametrize("kind", [Convolutional, Transformer])
def test_two_runs_that_are_the_same_compare_clean(tmp_path: Path, kind: type[nn.Cell]) -> None:
    found = CliRunner().invoke(app, [str(dumped(tmp_path / name, kind)) for name in ("left", "right")])
    assert (found.exit_code, found.output[:9]) == (0, "the same:")


@pytest.mark.parametrize(
    ("kind", "weight", "first"),
    [
        (Convolutional, "conv2.weight", "Cell.conv2.Conv2d.forward.0"),
        (Transformer, "blocks.1.qkv.weight", "Cell.blocks.1.qkv.Dense.forward.0"),
    ],
)
def test_one_bit_of_one_weight_is_found_in_the_first_cell_that_sees_it(
    tmp_path: Path, kind: type[nn.Cell], weight: str, first: str
) -> None:
    left, right, table = dumped(tmp_path / "left", kind), dumped(tmp_path / "right", kind, weight), tmp_path / "found.csv"
    assert CliRunner().invoke(app, [str(left), str(right), "-o", str(table)]).exit_code == 1
    with open(table, newline="") as file:
        names = [row["name"] for row in csv.DictReader(file)]
    assert names[0].startswith(first)
    assert f"{first}.parameters.weight" in names
