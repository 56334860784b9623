"""Cells that a model got after it was attached: that they have no rows is said."""

from __future__ import annotations

import mindspore as ms
import pytest
from attaching import Output, attached, step_with, warnings_in
from mindspore import Tensor, nn
from training import Net


class Activated(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Dense(4, 5), nn.Tanh()
        self.set_train(True)

    def construct(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x)).sum()


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_a_cell_that_was_replaced_is_named(mode: int, output: Output, caplog: pytest.LogCaptureFixture) -> None:
    ms.set_context(mode=mode)
    net = Activated()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    try:
        with attached(output, net, optimizer, xy_distribution=True, all_xy=True, wg_distribution=True, ops=["norm"]):
            net.activation = nn.GELU()
            step_with(net, optimizer)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    note = output.manifest()["notes"]["modules_without_activations"]
    assert "after set_monitor was called: activation." in note
    assert [one for one in warnings_in(caplog) if "got modules" in one] == [f"[rank 0] {note}"]
    names = {row.name for row in output.rows("actv")}
    assert "layer.output" in names
    assert "activation.output" not in names


def test_a_model_that_stays_as_it_is_has_no_late_cells(output: Output) -> None:
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, xy_distribution=True, all_xy=True, ops=["norm"]):
        for number in range(3):
            step_with(net, optimizer, number)
    assert "modules_without_activations" not in output.manifest()["notes"]
