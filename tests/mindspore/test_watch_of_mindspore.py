"""``monitor.watch`` with MindSpore: one line records what the three lines record, from the second step on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from attaching import EVERYTHING, Output, attached, with_fixed_weights
from mindspore import nn, ops
from training import inputs
from watching_cells import TwoLayers

import monitor

STEPS = 3


def trained(attach: Callable[[nn.Cell, Any], Any], micro_batches: int) -> None:
    net = with_fixed_weights(TwoLayers())
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    gradients_of = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
    with attach(net, optimizer):
        for step in range(STEPS):
            summed: Any = None
            for number in range(micro_batches):
                _, gradients = gradients_of(inputs(step + number))
                summed = (
                    gradients if summed is None else [ops.add(one, other) for one, other in zip(summed, gradients, strict=True)]
                )
            optimizer(tuple(summed))


def files(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.glob("*.csv") if not path.name.startswith("run_")}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_first_step_shows_how_many_micro_batches_there_are(micro_batches: int, output: Output) -> None:
    trained(lambda net, optimizer: attached(output, net, optimizer, micro_batches, **EVERYTHING), micro_batches)
    (first,) = output.directories()
    trained(lambda net, optimizer: monitor.watch(net, optimizer, None, **EVERYTHING), micro_batches)
    (second,) = set(output.directories()) - {first}

    expected = {name: text for name, text in files(first).items() if micro_batches == 1 or not name.endswith("_0-0.csv")}
    assert expected
    assert files(second) == expected


def test_health_is_the_default(output: Output) -> None:
    trained(monitor.watch, 1)
    assert {"grad_reduced", "param_origin", "param_updated"} <= set(monitor.open_run(output.base).kinds)
    assert "grad_unreduced" not in monitor.open_run(output.base).kinds
