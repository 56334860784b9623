"""Running statistics, which BatchNorm cells keep as parameters: the model writes them, and each rank has others."""

from __future__ import annotations

import mindspore as ms
import pytest
from attaching import Output, attached, warnings_in
from mindspore import Tensor, mint, nn, ops
from watching_cells import drawn

from monitor.mindspore import modules


def test_they_have_no_rows_and_are_not_called_corrupted_weights(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.SequentialCell(nn.Dense(4, 3), nn.BatchNorm1d(3), nn.Dense(3, 1)).set_train(True)
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    monitor = attached(output, net, optimizer, param_distribution=True, replica_check=True)
    step = ms.value_and_grad(lambda x: ops.square(net(x)).mean(), None, optimizer.parameters)
    for number in range(4):
        optimizer(step(Tensor(drawn(number, 5, 4)))[1])
    monitor.close()
    assert {row.name for row in output.rows("param_origin")} == {one.name for one in optimizer.parameters}
    assert warnings_in(caplog) == []


def test_those_of_mint_are_none_of_the_parameters_either() -> None:
    assert [name for name, _ in modules.parts(mint.nn.BatchNorm2d(3)).parameters] == ["weight", "bias"]
