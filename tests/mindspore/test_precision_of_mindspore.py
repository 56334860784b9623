"""``trainermon precision`` reads runs of MindSpore as it reads those of PyTorch."""

from __future__ import annotations

import mindspore
import numpy as np
from attaching import Output, attached, step_with
from mindspore import nn
from training import Net, inputs

from monitor.precision.advice import SAFE, advise
from monitor.precision.judging import Casting, Scaling
from monitor.query.opened import open_source
from monitor.query.sources import ALL


def in_e4m3(x: np.ndarray) -> np.ndarray:
    """Rounded as a cast to e4m3 rounds, with the scale that takes absmax to 448."""
    scale = 448.0 / np.abs(x).max()
    y = x.astype(np.float64) * scale
    distance = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(y), 1e-30))), -6.0) - 3.0)
    return np.round(y / distance) * distance / scale


def test_the_layers_of_a_run_of_mindspore_are_judged_by_their_operands(output: Output) -> None:
    net = Net()
    operands = {"weight": net.a.weight.asnumpy().copy(), "input": inputs(0).asnumpy()}
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    recorded = {"xy_distribution": True, "all_xy": True, "param_distribution": True, "wg_distribution": True}
    ops = ["absmax", "norm", "magnitude_histogram"]
    with attached(output, net, optimizer, **{"targets": {}, "format": "csv", "ndigits": 16, "ops": ops, **recorded}):
        step_with(net, optimizer)
    advice = advise(open_source(output.base), ALL, Scaling())
    assert [(one.name, one.verdict) for one in advice.gemms] == [("a", SAFE), ("b", SAFE)]
    assert advice.loss.expected is not None
    for what, x in operands.items():
        said = advice.gemms[0].operands[what].casts[Casting("e4m3", "current")].numbers
        error = float(np.linalg.norm(in_e4m3(x) - x) / np.linalg.norm(x))
        assert 0 < error <= said["most_error"]
        assert said["error"] < 3 * error


class Words(nn.Cell):
    """An embedding, whose parameter MindSpore does not call ``weight``, a layer, and a matrix that belongs to none."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Dense(4, 7)
        self.bare = mindspore.Parameter(mindspore.ops.ones((4, 4)), name="bare")

    def construct(self, tokens: mindspore.Tensor) -> mindspore.Tensor:
        return self.head(mindspore.ops.matmul(self.words(tokens), self.bare))


def test_the_table_of_an_embedding_is_no_matrix_without_a_layer(output: Output) -> None:
    net = Words()
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    recorded = {"xy_distribution": True, "all_xy": True, "param_distribution": True}
    ops = ["absmax", "norm", "magnitude_histogram"]
    with attached(output, net, optimizer, **{"targets": {}, "format": "hdf5", "ops": ops, **recorded}):
        tokens = mindspore.Tensor(np.array([[0, 3, 6], [1, 1, 2]]), mindspore.int32)
        gradients = mindspore.value_and_grad(lambda x: net(x).square().mean(), None, optimizer.parameters)(tokens)[1]
        optimizer(gradients)
    advice = advise(open_source(output.base), ALL, Scaling())
    assert [(one.name, one.verdict) for one in advice.gemms] == [("head", SAFE)]
    assert advice.without_layer == ["bare"]
