"""A rank that ``mindspore.train.Model`` trains data-parallel, and shows its metrics; ``metrics_of_model.py YAML RESULTS``.

What numpy makes of the same data and weights goes to ``RESULTS/rank{i}.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, communication, dataset, nn, ops
from mindspore.train import Callback, FixedLossScaleManager, Model

from monitor.mindspore.training import TrainingMetricsCallback

YAML, RESULTS = sys.argv[1], Path(sys.argv[2])
STEPS, ROWS, FIRST, SECOND = 3, 2, 0.9, 0.999
SCALE = 1024.0


class Gate(nn.Cell):
    """Sends each token to the expert of its greatest number."""

    num_experts = 4

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, ops.argmax(x, dim=-1)


class Network(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.last = nn.Dense(4, 1, weight_init="ones", bias_init="zeros")

    def construct(self, x: Tensor) -> Tensor:
        return self.last(self.gate(x)[0])


class Weights(Callback):
    """The weights that each step begins with, and those at the end."""

    def __init__(self, network: Network) -> None:
        self._last = network.last
        self.seen: list[tuple[Any, Any]] = []

    def on_train_step_begin(self, _: Any) -> None:
        self.seen.append((self._last.weight.asnumpy().copy(), self._last.bias.asnumpy().copy()))

    def on_train_end(self, run_context: Any) -> None:
        self.on_train_step_begin(run_context)


def rows(rank: int) -> tuple[Any, Any]:
    x = np.random.default_rng(rank).normal(size=(STEPS * ROWS, 4)).astype(np.float32)
    return x, x.sum(1, keepdims=True) ** 2


def derived(rank: int, step: int, weight: Any, bias: Any) -> tuple[float, Any, Any]:
    """Loss of a rank, and its gradient."""
    x, y = (one[step * ROWS : (step + 1) * ROWS] for one in rows(rank))
    off = x @ weight.T + bias - y
    return float(np.mean(off**2)), 2 * off.T @ x / ROWS, 2 * off.sum(0) / ROWS


def norm(*arrays: Any) -> float:
    return float(np.linalg.norm(np.concatenate([np.asarray(one, dtype=np.float64).ravel() for one in arrays])))


def by_hand(rank: int, ranks: int, seen: list[tuple[Any, Any]]) -> dict[str, list[Any]]:
    told: dict[str, list[Any]] = {
        name: [] for name in ("loss", "local", "local_weight", "global", "m", "v", "weights", "tokens")
    }
    first = second = 0.0
    for step in range(STEPS):
        every = [derived(one, step, *seen[step]) for one in range(ranks)]
        loss, by_weight, by_bias = every[rank]
        mean = sum(one[1] for one in every) / ranks
        first, second = FIRST * first + (1 - FIRST) * mean, SECOND * second + (1 - SECOND) * mean**2
        told["loss"].append(loss)
        told["local"].append(norm(by_weight, by_bias))
        told["local_weight"].append(norm(by_weight))
        told["global"].append(norm(mean, sum(one[2] for one in every) / ranks))
        told["m"].append(norm(first))
        told["v"].append(norm(second))
        told["weights"].append(norm(*seen[step + 1]))
        x = rows(rank)[0][step * ROWS : (step + 1) * ROWS]
        told["tokens"].append(np.bincount(x.argmax(1), minlength=4).tolist())
    return told


mindspore.set_device("CPU")
communication.init("mccl")
rank, ranks = communication.get_rank(), communication.get_group_size()
mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=ranks)
network = Network()
weights = Weights(network)
optimizer = nn.Adam(network.trainable_params(), 0.1, beta1=FIRST, beta2=SECOND, loss_scale=SCALE)
x, y = rows(rank)
batches = dataset.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(ROWS)
metrics = TrainingMetricsCallback(YAML, routers=["gate"], model_flops=1e9)
scaling = FixedLossScaleManager(SCALE, drop_overflow_update=False)
model = Model(network, nn.MSELoss(), optimizer, loss_scale_manager=scaling)
model.train(1, batches, callbacks=[weights, metrics], dataset_sink_mode=False)
(RESULTS / f"rank{rank}.json").write_text(json.dumps(by_hand(rank, ranks, weights.seen)))
