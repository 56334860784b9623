"""The model of the contract in MindSpore, its training, and the tensors that the training has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from rows import Array, Arrays, Series, Tensors

STEPS = 3
WIDTH = 8


class Attention(nn.Cell):
    """Self-attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)
        self.projection = nn.Dense(WIDTH, WIDTH)

    def construct(self, x: Tensor, *added: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = plus(self.qkv(x), added[:1])
        q, k, v = (part.reshape(batch, length, 2, -1).swapaxes(1, 2) for part in ops.split(qkv, WIDTH, axis=-1))
        weights = ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) / 2.0, axis=-1)
        mixed = ops.matmul(weights, v).swapaxes(1, 2).reshape(batch, length, WIDTH)
        return plus(self.projection(plus(mixed, added[1:2])), added[2:])


class Net(nn.Cell):
    """An attention block and an MLP, with weights that are the same in every run.

    ``added`` are zeros, each for a tensor that ``WIDTHS`` names. The gradient of such a zero is the gradient of the tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(4, WIDTH)
        self.attention = Attention()
        self.up = nn.Dense(WIDTH, 4 * WIDTH)
        self.activation = nn.ReLU()
        self.down = nn.Dense(4 * WIDTH, 2)
        for seed, parameter in enumerate(self.trainable_params()):
            drawn = np.random.default_rng(seed).normal(size=parameter.shape) / np.sqrt(WIDTH)
            parameter.set_data(Tensor(drawn.astype(np.float32)))
        self.set_train(True)

    def construct(self, x: Tensor, *added: Tensor) -> Tensor:
        y = self.attention(plus(self.first(x), added[:1]), *added[1:4])
        y = self.activation(plus(self.up(y), added[4:5]))
        return plus(self.down(plus(y, added[5:6])), added[6:])


WIDTHS = {
    "first.output": WIDTH,
    "attention.qkv.output": 3 * WIDTH,
    "attention.projection.input": WIDTH,
    "attention.projection.output": WIDTH,
    "up.output": 4 * WIDTH,
    "activation.output": 4 * WIDTH,
    "down.output": 2,
}
"""The tensors whose gradients are compared, in the order of ``added``, and their last dimensions."""

ALIKE = {
    "attention.projection.output": ("attention.output", "up.input"),
    "first.output": ("attention.input", "attention.qkv.input"),
    "up.output": ("activation.input",),
    "activation.output": ("down.input",),
    "down.output": (".output",),
}
"""Other names of the same tensors."""


def plus(x: Tensor, added: tuple[Tensor, ...]) -> Tensor:
    """The sum, or ``x`` if nothing is added."""
    return x + added[0] if added else x


def inputs(step: int) -> Tensor:
    """Data of a step, shape ``(2, 5, 4)``."""
    return Tensor(np.random.default_rng(100 + step).normal(size=(2, 5, 4)).astype(np.float32))


def train(prepare: Callable[[Net, nn.Cell], object] | None = None) -> Arrays:
    """Train from fixed weights on fixed data.

    Args:
        prepare: Called with the model and the optimizer before the first step.

    Returns:
        Losses, weights and moments, by name.
    """
    net, optimizer = made()
    if prepare is not None:
        prepare(net, optimizer)
    gradients_of = mindspore.value_and_grad(lambda x: net(x).square().mean(), None, optimizer.parameters)
    losses = []
    for step in range(STEPS):
        loss, gradients = gradients_of(inputs(step))
        optimizer(gradients)
        losses.append(loss.asnumpy())
    found = {"losses": np.stack(losses)}
    for kind, parameters in state_of(net, optimizer).items():
        found |= {f"{kind} of {name}": array(parameter) for name, parameter in parameters.items()}
    return found


def made() -> tuple[Net, nn.Cell]:
    """The model and its optimizer."""
    net = Net()
    return net, nn.AdamWeightDecay(net.trainable_params(), 0.01)


def state_of(net: Net, optimizer: Any) -> dict[str, dict[str, Parameter]]:
    """Weights and moments by kind and the parameter's name."""
    names = [parameter.name for parameter in net.trainable_params()]
    kinds = {"weight": net.trainable_params(), "exp_avg": optimizer.moments1, "exp_avg_sq": optimizer.moments2}
    return {kind: dict(zip(names, parameters, strict=True)) for kind, parameters in kinds.items()}


def observed() -> Tensors:
    """The tensors of an unmonitored run, by the rows that a monitor would have written."""
    net, optimizer = made()
    seen = Observer(net, optimizer)
    places = tuple(range(1, len(WIDTHS) + 1))
    gradients_of = mindspore.value_and_grad(lambda x, *added: net(x, *added).square().mean(), places, optimizer.parameters)
    zeros = [Tensor(np.zeros((2, 5, width), np.float32)) for width in WIDTHS.values()]
    for step in range(STEPS):
        _, (of_tensors, gradients) = gradients_of(inputs(step), *zeros)
        seen.before_step(step, of_tensors, gradients)
        optimizer(gradients)
        seen.after_step(step)
    return seen.tensors


class Observer:
    """Copies of the tensors of a run."""

    def __init__(self, net: Net, optimizer: Any) -> None:
        self.tensors: Tensors = {}
        self._step = 0
        self._net, self._optimizer = net, optimizer
        for name, cell in net.cells_and_names():
            cell.register_forward_hook(self._forward(name))

    def before_step(self, step: int, of_tensors: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
        """Copy gradients, weights and moments. An optimizer has no moments before its first step."""
        for tensor, gradient in zip(WIDTHS, of_tensors, strict=True):
            for name in (tensor, *ALIKE.get(tensor, ())):
                self._keep("actv_grad", name, gradient)
        for parameter, gradient in zip(self._optimizer.parameters, gradients, strict=True):
            for kind in ("grad_unreduced", "grad_reduced"):
                self._keep(kind, parameter.name, gradient)
        for kind, parameters in state_of(self._net, self._optimizer).items():
            for name, parameter in parameters.items() if kind == "weight" or step > 0 else ():
                self._keep("param_origin" if kind == "weight" else kind, name, parameter)

    def after_step(self, step: int) -> None:
        """Copy the weights. The next step begins."""
        for name, parameter in state_of(self._net, self._optimizer)["weight"].items():
            self._keep("param_updated", name, parameter)
        self._step = step + 1

    def _forward(self, name: str) -> Callable[..., None]:
        def copy(_: nn.Cell, given: tuple[Tensor, ...], result: Tensor) -> None:
            self._keep("actv", f"{name}.input", given[0])
            self._keep("actv", f"{name}.output", result)

        return copy

    def _keep(self, kind: str, name: str, x: Tensor) -> None:
        self.tensors[Series(kind, name, self._step)] = array(x)


def array(x: Tensor) -> Array:
    """A copy: an optimizer writes where its parameters stand."""
    copied: Array = x.asnumpy().copy()
    return copied
