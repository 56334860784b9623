"""A program that knows nothing of the monitor; with ``BY_HAND=1`` it attaches it in one line. Prints the sum of its weights.

``MICRO_BATCHES`` is their number in a step.
"""

from __future__ import annotations

import os
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(4, 4) for _ in range(2)])
        self.head = nn.Dense(4, 1)

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = ops.relu(layer(x))
        return self.head(x)


ms.set_seed(0)
net = Net()
net.set_train(True)
optimizer = nn.Adam(net.trainable_params(), 0.01)
if os.environ.get("BY_HAND"):
    import monitor

    monitor.watch(net, optimizer)
gradients_of = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
numbers = np.random.default_rng(0)
for _ in range(6):
    summed: Any = ()
    for _ in range(int(os.environ.get("MICRO_BATCHES", "1"))):
        _, gradients = gradients_of(ms.Tensor(numbers.normal(size=(3, 4)).astype("float32")))
        summed = tuple(a + b for a, b in zip(summed, gradients, strict=True)) if summed else gradients
    optimizer(summed)
print(sum(float(p.asnumpy().astype("float64").sum()) for p in net.trainable_params()).hex())
