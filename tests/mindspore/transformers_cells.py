"""Cells and data as MindSpore Transformers' trainer arranges them, and what numpy makes of the same steps."""

from __future__ import annotations

import time
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, dataset, nn, ops
from mindspore.train import Callback, Model

STEPS, ROWS = 3, 6
BETAS, RATE, SCALE, LIMIT, EXPERTS = (0.9, 0.999), 0.01, 1024.0, 0.5, 4
FLOPS, BASELINE = 2e9, 8.0


class Gate(nn.Cell):
    """Sends each row to the expert of its greatest number."""

    num_experts = EXPERTS

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, ops.argmax(x, dim=-1)


class Network(nn.Cell):
    """Returns its loss, as models of MindSpore Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.layers = nn.CellList([nn.Dense(4, 4), nn.Dense(4, 1)])
        for seed, parameter in enumerate(self.trainable_params()):
            drawn = np.random.default_rng(seed).normal(size=parameter.shape)
            parameter.set_data(Tensor(drawn.astype(np.float32)))
        self.set_train(True)

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        x, _ = self.gate(x)
        for layer in self.layers:
            x = layer(x)
        return ((x - y) ** 2).mean()


class PassesOn(nn.Cell):
    """Orders the inputs for the network. The names of parameters do not contain it."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return self.network(x=x, y=y)


class MFTrainOneStepCell(nn.TrainOneStepWithLossScaleCell):
    """Has the name, attributes and results of MindSpore Transformers' cell: the fifth is the norm before it clips."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, *, use_clip_grad: bool = True) -> None:
        super().__init__(network, optimizer, Tensor(SCALE, ms.float32))
        self.use_clip_grad = use_clip_grad

    def construct(self, *inputs: Tensor) -> tuple[Any, ...]:
        loss = self.network(*inputs)
        scale = self.scale_sense
        gradients = [one / scale for one in self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss) * scale)]
        norm = None
        if self.use_clip_grad:
            norm = ops.sqrt(sum((one * one).sum() for one in gradients)).reshape((1,))
            gradients = [one * (LIMIT / ops.maximum(norm, Tensor(LIMIT)))[0] for one in gradients]
        self.optimizer(tuple(gradients))
        return loss, Tensor(False), scale, Tensor(RATE), norm


class Observed(Callback):
    """The weights that each step begins with, those at the end, and when steps end."""

    def __init__(self, network: nn.Cell) -> None:
        self._network = network
        self.weights: list[dict[str, Any]] = []
        self.ends: list[float] = []
        self.began = 0.0

    def on_train_step_begin(self, _: Any) -> None:
        self.began = self.began or time.monotonic()
        self.weights.append({one.name: one.asnumpy().astype(np.float64) for one in self._network.trainable_params()})

    def on_train_step_end(self, _: Any) -> None:
        self.ends.append(time.monotonic())

    def on_train_end(self, run_context: Any) -> None:
        self.on_train_step_begin(run_context)


def rows() -> tuple[Any, Any]:
    x = np.random.default_rng(9).normal(size=(STEPS * ROWS, 4)).astype(np.float32)
    return x, x.sum(1, keepdims=True) ** 2


def batches() -> dataset.Dataset:
    x, y = rows()
    return dataset.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(ROWS)


def train(callbacks: list[Callback], *, use_clip_grad: bool = True) -> Observed:
    """Train as the trainer does: ``Model`` has the training cell only, and no optimizer."""
    network = Network()
    optimizer = nn.Adam(network.trainable_params(), RATE, *BETAS)
    observed = Observed(network)
    model = Model(MFTrainOneStepCell(PassesOn(network), optimizer, use_clip_grad=use_clip_grad))
    model.train(1, batches(), callbacks=[observed, *callbacks], dataset_sink_mode=False)
    return observed


# --- The same by numpy.


def norm(*arrays: Any) -> float:
    return float(np.sqrt(sum((np.asarray(one) ** 2).sum() for one in arrays)))


def differentiated(step: int, weights: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    x, y = (one[step * ROWS : (step + 1) * ROWS].astype(np.float64) for one in rows())
    first, second = weights["layers.0.weight"], weights["layers.1.weight"]
    hidden = x @ first.T + weights["layers.0.bias"]
    off = hidden @ second.T + weights["layers.1.bias"] - y
    by_output = 2 * off / ROWS
    by_hidden = by_output @ second
    by_layer = {"layers.0": (by_hidden.T @ x, by_hidden.sum(0)), "layers.1": (by_output.T @ hidden, by_output.sum(0))}
    gradients = {
        f"{layer}.{name}": one for layer, pair in by_layer.items() for name, one in zip(("weight", "bias"), pair, strict=True)
    }
    return float((off**2).mean()), gradients


def by_hand(observed: Observed) -> dict[str, dict[int, float]]:
    """The value of each metric by its tag, at each step, as far as it does not depend on time."""
    found: dict[str, dict[int, float]] = {}
    first, second = dict.fromkeys(observed.weights[0], 0.0), dict.fromkeys(observed.weights[0], 0.0)
    for step in range(STEPS):
        loss, gradients = differentiated(step, observed.weights[step])
        total = norm(*gradients.values())
        told = {"loss": loss, "learning-rate": RATE, "batch-size": ROWS, "loss-scale": SCALE, "grad-norm": total}
        told |= {"local_loss": loss, "device_accum_local_loss": loss, "device_local_norm": total}
        told |= {f"local_norm/{name}": norm(one) for name, one in gradients.items()}
        told["weight_norm"] = norm(*observed.weights[step + 1].values())
        chosen = rows()[0][step * ROWS : (step + 1) * ROWS].argmax(1)
        told |= {f"expert_load/gate/expert_{one}": float((chosen == one).mean()) for one in range(EXPERTS)}
        for name, one in gradients.items():
            clipped = one * LIMIT / max(total, LIMIT)
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * clipped
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * clipped**2
            if step + 1 < STEPS:  # the moments of the last step are not read
                told |= {f"adam_m_norm/{name}": norm(first[name]), f"adam_v_norm/{name}": norm(second[name])}
        for tag, value in told.items():
            found.setdefault(tag, {})[step + 1] = value
    return found
