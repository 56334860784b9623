"""What a precision dump costs a transformer of MindSpore: a step with it against one without, in turn, in one process.

python bench/mindspore_precision_dump.py
python bench/mindspore_precision_dump.py --workload tiny --level mix

MindSpore computes on threads of its own while Python continues. On a CPU a dump waits for each tensor that it
reads. Work that no longer overlaps is in these figures, too.
"""

from __future__ import annotations

import os

os.environ.setdefault("GLOG_v", "3")  # before MindSpore is imported: it says much on standard error

import mindspore
import numpy as np
from dumping import Training, main
from mindspore import Tensor, nn, ops
from models import WORKLOADS

from monitor.mindspore import PrecisionDebugger


class Block(nn.Cell):
    """Attention and two dense layers, each around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.qkv, self.out = nn.Dense(width, 3 * width), nn.Dense(width, width)
        self.up, self.gelu, self.down = nn.Dense(width, 4 * width), nn.GELU(), nn.Dense(4 * width, width)
        self._heads = heads

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attended(self.qkv(self.norm1(x))))
        return x + self.down(self.gelu(self.up(self.norm2(x))))

    def _attended(self, qkv: Tensor) -> Tensor:
        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        q, k, v = ops.chunk(qkv.reshape(batch, length, 3 * self._heads, -1).swapaxes(1, 2), 3, axis=1)
        weights = ops.softmax(ops.matmul(q, k.swapaxes(2, 3)) * (width // self._heads) ** -0.5)
        return ops.matmul(weights, v).swapaxes(1, 2).reshape(batch, length, width)


class Transformer(nn.Cell):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.CellList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm((width,)), nn.Dense(width, vocabulary, has_bias=False)

    def construct(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(ops.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def training_of(workload: str) -> Training:
    """Adam, float32, and a batch that never changes."""
    chosen = WORKLOADS[workload]
    vocabulary, context = chosen.shape["vocabulary"], chosen.shape["context"]
    mindspore.set_seed(0)
    network = Transformer(**chosen.shape).set_train(True)
    optimizer = nn.Adam(network.trainable_params(), learning_rate=1e-4)
    text = np.random.default_rng(0).integers(vocabulary, size=(chosen.batch, context))
    tokens = Tensor(text, mindspore.int32)

    def loss() -> Tensor:
        return ops.cross_entropy(network(tokens).reshape(-1, vocabulary), tokens.reshape(-1))

    differentiated = mindspore.value_and_grad(loss, None, optimizer.parameters)
    found: list[Tensor] = []

    def gradients() -> None:
        _, found[:] = differentiated()
        for gradient in found:
            gradient.asnumpy()

    def update() -> None:
        optimizer(tuple(found))
        for parameter in optimizer.parameters:
            parameter.asnumpy()

    return Training(network, gradients, update)


def on_cores(count: int) -> None:
    """MindSpore has threads of its own for most of what it does, and cannot be told to have fewer: they share the cores."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


if __name__ == "__main__":
    main(__doc__ or "", training_of, PrecisionDebugger, on_cores)
