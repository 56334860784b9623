"""A small model, its loop, and MindSpore's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim

STEPS = 3
Made = Callable[[list[Any]], nn.Cell]

OPTIMIZERS: dict[str, Made] = {
    "nn.Adam": lambda p: nn.Adam(p, 0.01, eps=1e-3),
    "nn.Adam amsgrad": lambda p: nn.Adam(p, 0.01, beta2=0.9, eps=1e-3, use_amsgrad=True),
    "nn.Adam loss_scale": lambda p: nn.Adam(p, 0.01, eps=1e-3, loss_scale=64.0),
    "nn.LazyAdam": lambda p: nn.LazyAdam(p, 0.01, eps=1e-3),
    "nn.AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.01, eps=1e-3),
    "nn.SGD": lambda p: nn.SGD(p, 0.1),
    "nn.SGD momentum": lambda p: nn.SGD(p, 0.1, momentum=0.9),
    "nn.Momentum": lambda p: nn.Momentum(p, 0.1, momentum=0.9),
    "nn.RMSProp": lambda p: nn.RMSProp(p, 0.01),
    "nn.AdaMax": lambda p: nn.AdaMax(p, 0.01),
    "experimental.Adam": lambda p: optim.Adam(p, 0.01, eps=1e-3),
    "experimental.AdamW": lambda p: optim.AdamW(p, 0.01, eps=1e-3, weight_decay=0.0),
    "experimental.AdamW amsgrad": lambda p: optim.AdamW(p, 0.01, (0.9, 0.9), eps=1e-3, weight_decay=0.0, amsgrad=True),
    "experimental.SGD": lambda p: optim.SGD(p, 0.1),
    "experimental.SGD momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
}


class Recurrent(nn.Cell):
    """A cell of an RNN: of an input and a state, each of shape ``(batch, size)``, the new state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Dense(size, size), nn.Dense(size, size)

    def construct(self, x: Tensor, state: Tensor) -> Tensor:
        return ops.tanh(self.of_input(x) + self.of_state(state))


class Net(nn.Cell):
    """Two layers with weights that are the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(4, 5)
        self.b = nn.Dense(5, 2)
        for seed, parameter in enumerate(self.trainable_params()):
            drawn = np.random.default_rng(seed).normal(size=parameter.shape)
            parameter.set_data(Tensor(drawn.astype(np.float32)))
        self.set_train(True)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.b(ops.tanh(self.a(x)))).sum()


def inputs(step: int) -> Tensor:
    return Tensor(np.random.default_rng(100 + step).normal(size=(3, 4)).astype(np.float32) * 3.0 / (1 + step))


def train(net: Net, optimizer: nn.Cell, steps: int = STEPS) -> list[np.ndarray]:
    """The losses."""
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)
    losses = []
    for step in range(steps):
        loss, gradients = gradients_of(inputs(step))
        optimizer(gradients)
        losses.append(loss.asnumpy())
    return losses


def grouped(net: Net) -> list[dict[str, Any]]:
    """Two groups, in another order than the model's."""
    return [{"params": net.b.trainable_params(), "lr": 0.05}, {"params": net.a.trainable_params(), "weight_decay": 0.01}]


def array(parameter: Parameter) -> np.ndarray:
    """Its numbers now: an optimizer writes where they stand."""
    found: np.ndarray = parameter.asnumpy().copy()
    return found
