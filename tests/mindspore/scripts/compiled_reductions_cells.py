"""Training steps that reduce gradients in different ways. MindSpore compiles methods of files that can be imported."""
# ruff: noqa: ARG002

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn, ops

from monitor.mindspore import TrainerMon

STEPS, SIZE = 2, 2
FACTORS = np.array([1.0, -2.0, 3.0], np.float32)


def inputs(rank: int, step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    drawn: np.ndarray[Any, np.dtype[np.float32]] = np.random.default_rng([rank, step]).normal(size=(5, 4)).astype(np.float32)
    return drawn


def weights_after(net: nn.Cell, monitor: TrainerMon | None) -> list[list[float]]:
    """The weights at the end of a run, and of its monitor."""
    if monitor is not None:
        monitor.close()
    return [one.asnumpy().ravel().tolist() for one in net.trainable_params()]


class Weighted(nn.Cell):
    """Its gradients do not depend on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(4, 3, weight_init="ones", bias_init="zeros")
        self.factors = Tensor(FACTORS)

    def construct(self, x: Tensor) -> Tensor:
        return (self.a(x) * self.factors).sum()


class Step(nn.Cell):
    """Gives the optimizer the gradients of this rank."""

    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.gradients_of = ms.value_and_grad(net, None, optimizer.parameters)
        self.reducer = nn.DistributedGradReducer(optimizer.parameters, True, SIZE)
        self.sum = ops.AllReduce()
        self.sum_of_one = ops.AllReduce(group=alone())

    def construct(self, x: Tensor) -> Tensor:
        loss, gradients = self.gradients_of(x)
        self.optimizer(self.given(gradients, loss))
        return loss

    def given(self, gradients: Any, loss: Tensor) -> Any:
        return gradients


class ByReducer(Step):
    def given(self, gradients: Any, loss: Tensor) -> Any:
        return self.reducer(gradients)


class ByPrimitive(Step):
    def given(self, gradients: Any, loss: Tensor) -> Any:
        return self.sum(gradients[0]) / SIZE, self.sum(gradients[1]) / SIZE


class ThenClipped(Step):
    def given(self, gradients: Any, loss: Tensor) -> Any:
        return ops.clip_by_value(self.reducer(gradients), -1e9, 1e9)


class Clipped(Step):
    def given(self, gradients: Any, loss: Tensor) -> Any:
        return ops.clip_by_value(gradients, -1e9, 1e9)


class LossAlone(Step):
    def given(self, gradients: Any, loss: Tensor) -> Any:
        return gradients[0] + 0 * self.sum(loss), gradients[1] + 0 * self.sum(loss)


class WithLocal(Step):
    def given(self, gradients: Any, loss: Tensor) -> Any:
        summed = self.reducer(gradients)
        return summed[0] + gradients[0], summed[1] * gradients[1]


class OverOneRank(Step):
    def given(self, gradients: Any, loss: Tensor) -> Any:
        return self.sum_of_one(gradients[0]), self.sum_of_one(gradients[1])


def alone() -> str:
    """A group of this rank."""
    name = f"alone{communication.get_rank()}"
    if name not in _MADE:
        communication.create_group(name, [communication.get_rank()])
        _MADE.append(name)
    return name


_MADE: list[str] = []

REDUCED: dict[str, type[Step]] = {"reducer": ByReducer, "by-primitive": ByPrimitive, "then-clipped": ThenClipped}
LOCAL: dict[str, type[Step]] = {
    "none": Step,
    "clipped": Clipped,
    "loss-alone": LossAlone,
    "with-local": WithLocal,
    "over-one-rank": OverOneRank,
}
WAYS = REDUCED | LOCAL
