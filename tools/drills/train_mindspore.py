"""The training of a drill in MindSpore."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from spec import Job


class Block(nn.Cell):
    """See ``train_torch.Block``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm((8,)), nn.Dense(8, 8)
        self.during: Callable[[], None] | None = None

    def construct(self, x: Tensor) -> Tensor:
        if self.during is not None:
            self.during()
        return x + ops.gelu(self.linear(self.norm(x)))


class MindSporeTraining:
    """Its steps depend on their number only, and on the weights."""

    def __init__(self, job: Job) -> None:
        ms.set_device("CPU")
        ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_seed(0)
        self._job = job
        self.model = nn.SequentialCell(nn.Dense(8, 8), Block(), Block(), nn.Dense(8, 4))
        self.optimizer = nn.AdamWeightDecay(self.model.trainable_params(), 0.01)
        self._gradients = ms.value_and_grad(lambda x: ops.square(self.model(x)).mean(), None, self.optimizer.parameters)

    def step(self, step: int) -> str:
        drawn = np.random.default_rng([step, self._job.rank]).normal(size=(4, 8)).astype(np.float32)
        loss, gradients = self._gradients(Tensor(drawn))
        self.optimizer(gradients)
        return float(loss.asnumpy()).hex()

    def compile_again(self) -> None:
        """Nothing is compiled."""

    def drop_gradients(self) -> None:
        """There are none."""

    def in_forward(self, call: Callable[[], None] | None) -> None:
        """See ``TorchTraining``."""
        self.model[1].during = call

    def end(self) -> None:
        """Nothing is left to do."""
