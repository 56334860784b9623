"""``intervals`` with MindSpore: kinds have rows in every n-th step, equal to those of a run that has them in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
from attaching import EVERYTHING, Output, attached, with_fixed_weights
from mindspore import nn
from training import inputs
from watching_cells import TwoLayers

STEPS = 6
INTERVALS = {"xy_distribution": 4, "wg_distribution": 2, "param_distribution": 3, "mv_distribution": 3, "mg_direction": 2}
EVERY = {"actv": 4, "actv_grad": 4, "grad_reduced": 2, "grad_unreduced": 2, "param_origin": 3, "param_updated": 3, "exp_avg": 3}


def trained(output: Output, **config: Any) -> tuple[Path, list[bytes]]:
    net, before = with_fixed_weights(TwoLayers()), set(output.directories())
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    gradients_of = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
    with attached(output, net, optimizer, **EVERYTHING, mg_direction=True, **config):
        for step in range(STEPS):
            _, gradients = gradients_of(inputs(step))
            optimizer(gradients)
    (directory,) = set(output.directories()) - before
    return directory, [p.asnumpy().tobytes() for p in net.trainable_params()]


def test_rows_are_those_of_every_nth_step(output: Output) -> None:
    (whole, expected), (fewer, weights) = trained(output), trained(output, intervals=INTERVALS)
    assert weights == expected
    for kind, interval in EVERY.items():
        rows = output.rows(kind, fewer)
        assert rows == [row for row in output.rows(kind, whole) if row.step % interval == 0], kind
        assert rows, kind
    directions = [output.rows("other", one) for one in (whole, fewer)]
    assert directions[1] == [row for row in directions[0] if row.step % 2 == 0]
    assert directions[1]
