"""The same networks and optimizers in PyTorch and in MindSpore, with the same weights, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import mindspore as ms
import numpy as np
import torch
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint
from watching_cells import drawn

import monitor.mindspore
import monitor.pytorch

BATCH, INPUTS, OUTPUTS = 6, 4, 2
SEQUENCE, HEADS, SIZE, EXPERTS, TOP = 3, 2, 5, 4, 2

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "blocks": {
        "first.weight": (8, 4),
        "layers.0.a.weight": (8, 8),
        "layers.0.a.bias": (8,),
        "layers.0.b.weight": (2, 8),
        "layers.0.b.bias": (2,),
    },
    "mixture": {
        "query.weight": (SEQUENCE * HEADS * SIZE, INPUTS),
        "key.weight": (SEQUENCE * HEADS * SIZE, INPUTS),
        "gate.weight": (EXPERTS, SEQUENCE * HEADS * SIZE),
        "picking.weight": (EXPERTS, SEQUENCE * HEADS * SIZE),
        "shown.weight": (EXPERTS, SEQUENCE * HEADS * SIZE),
        "cooled.weight": (EXPERTS, SEQUENCE * HEADS * SIZE),
        "twice.weight": (OUTPUTS, OUTPUTS),
    },
}
"""The parameters that are trained, by network."""

ODD: dict[str, NDArray[Any]] = {
    "of_float16": np.array([[0.5, -0.0, 6e-8], [65504.0, np.inf, 1.0]], np.float16),
    "of_float32": np.array([1e-45, 3e38, -3e-5, 448.0, 0.1, 57344.0, -1e-8, 9e-9], np.float32),
    "of_float64": np.array([1e-300, -2.5, np.nan, 1e200]),
    "of_one": np.array([7.0], np.float32),
}
"""Parameters that are not trained: odd numbers of several types. ``of_bfloat16`` has the numbers of ``of_float32``."""


def weights(network: str) -> dict[str, NDArray[np.float32]]:
    """The first values of the parameters that are trained."""
    return {name: drawn(place, *shape) * 0.5 for place, (name, shape) in enumerate(SHAPES[network].items())}


class Stepping:
    """An optimizer, whose class and arguments have the same names in both frameworks.

    Args:
        name: The class, in ``torch.optim`` and in ``mindspore.experimental.optim``.
        groups: The arguments of each group of parameters, by the prefix of their names.
        common: Arguments of all groups.
    """

    def __init__(self, name: str, groups: Mapping[str, Mapping[str, Any]] | None = None, **common: Any) -> None:
        self.name, self.common = name, common
        self.groups: Mapping[str, Mapping[str, Any]] = {"": {}} if groups is None else groups

    def made(self, room: Any, named: Mapping[str, Any]) -> Any:
        """The optimizer of these parameters."""
        groups = [
            {"params": [one for name, one in named.items() if name.startswith(prefix)], **own}
            for prefix, own in self.groups.items()
        ]
        return getattr(room, self.name)(groups, **self.common)


class Twin(Protocol):
    """A network and its optimizers. ``monitor`` is the room of its framework."""

    monitor: ClassVar[Any]
    model: Any
    optimizers: Sequence[Any]

    def __init__(self, network: str, optimizers: Sequence[Stepping], *, recomputes: bool = False) -> None: ...

    def backward(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> Any:
        """Add the gradients of a micro-batch to those of the step. Returns the loss, a tensor."""

    def evaluate(self, x: NDArray[np.float32]) -> None:
        """A forward without a backward, in evaluation mode."""

    def clip(self, limit: float) -> None:
        """Clip the gradients of the step by their norm."""

    def step(self) -> None:
        """The optimizers' steps."""

    def forget(self) -> None:
        """Drop the gradients of the step."""

    def bits(self) -> dict[str, bytes]:
        """The parameters that are trained, as they are now."""


# --- PyTorch.


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, OUTPUTS)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.act(self.a(x) + x)
        return self.b(y) * scale, y


class TorchBlocks(torch.nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.first, self.layers = torch.nn.Linear(INPUTS, 8, bias=False), torch.nn.ModuleList([TorchBlock()])
        for name, values in ODD.items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(values.copy()), requires_grad=False))
        brain = torch.from_numpy(ODD["of_float32"].copy()).bfloat16()
        self.of_bfloat16 = torch.nn.Parameter(brain, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block, scale = self.layers[0], torch.tensor(0.5)
        if self.recomputes:
            # Reentrant, since MindSpore's recomputation is: what it returns has a graph of its own.
            y, skipped = checkpoint(lambda x: block(x, scale=scale), self.first(x), use_reentrant=True)
        else:
            y, skipped = block(self.first(x), scale=scale)
        return y + skipped.mean()


class TorchCore(torch.nn.Module):
    """Causal attention over (batch, sequence, heads, size)."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        q, k = query.transpose(1, 2), key.transpose(1, 2)
        mask = torch.full((SEQUENCE, SEQUENCE), -math.inf).triu(1)
        return torch.softmax(torch.matmul(q, k.transpose(2, 3)) * SIZE**-0.5 + mask, -1) @ k


class TorchGate(torch.nn.Module):
    """Returns the weights and the numbers of the experts that it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(EXPERTS, SEQUENCE * HEADS * SIZE))
        self.num_experts, self.top_k = EXPERTS, TOP

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = torch.topk(torch.softmax(x @ self.weight.T, -1), TOP)
        return weights, chosen.int()


class TorchScores(torch.nn.Module):
    """Returns the scores of all experts, of logits that are multiplied by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight, self.factor = torch.nn.Parameter(torch.zeros(EXPERTS, SEQUENCE * HEADS * SIZE)), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ self.weight.T * self.factor, -1)


class TorchMixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (torch.nn.Linear(INPUTS, SEQUENCE * HEADS * SIZE, bias=False) for _ in range(2))
        self.core, self.gate, self.twice = TorchCore(), TorchGate(), torch.nn.Linear(OUTPUTS, OUTPUTS, bias=False)
        self.picking = torch.nn.Linear(SEQUENCE * HEADS * SIZE, EXPERTS, bias=False)
        self.picking.top_k = TOP
        self.shown, self.cooled = TorchScores(1.0), TorchScores(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (layer(x).reshape(-1, SEQUENCE, HEADS, SIZE) for layer in (self.query, self.key))
        tokens = self.core(query, key).reshape(len(x), -1)
        weights, _ = self.gate(tokens)
        others = self.picking(tokens) * self.shown(tokens) * self.cooled(tokens)
        y: torch.Tensor = self.twice(torch.tanh(self.twice(weights))) + others.mean()
        return y


class OfTorch:
    monitor: ClassVar[Any] = monitor.pytorch

    def __init__(self, network: str, optimizers: Sequence[Stepping], *, recomputes: bool = False) -> None:
        made = {"blocks": lambda: TorchBlocks(recomputes), "mixture": TorchMixture}
        self.model = made[network]()
        self.model.load_state_dict({name: torch.from_numpy(x) for name, x in weights(network).items()}, strict=False)
        named = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.optimizers = [one.made(torch.optim, named) for one in optimizers]

    def backward(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> Any:
        loss = (self.model(torch.from_numpy(x)) - torch.from_numpy(y)).square().mean()
        loss.backward()
        return loss.detach()

    def evaluate(self, x: NDArray[np.float32]) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.from_numpy(x))
        self.model.train()

    def clip(self, limit: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def forget(self) -> None:
        self.model.zero_grad()

    def bits(self) -> dict[str, bytes]:
        return {name: one.detach().numpy().tobytes() for name, one in self.model.named_parameters() if one.requires_grad}


# --- MindSpore.


class MindSporeBlock(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Dense(8, 8), nn.ReLU(), nn.Dense(8, OUTPUTS)

    def construct(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = self.act(self.a(x) + x)
        return self.b(y) * scale, y


class MindSporeBlocks(nn.Cell):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.first, self.layers = nn.Dense(INPUTS, 8, has_bias=False), nn.CellList([MindSporeBlock()])
        if recomputes:
            self.layers[0].recompute()
        for name, values in ODD.items():
            self.insert_param_to_cell(name, Parameter(Tensor(values), name=name, requires_grad=False))
        self.of_bfloat16 = Parameter(Tensor(ODD["of_float32"]).astype(ms.bfloat16), requires_grad=False)

    def construct(self, x: Tensor) -> Tensor:
        y, skipped = self.layers[0](self.first(x), scale=Tensor(0.5, ms.float32))
        return y + skipped.mean()


class MindSporeCore(nn.Cell):
    """Causal attention over (batch, sequence, heads, size)."""

    def construct(self, query: Tensor, key: Tensor) -> Tensor:
        q, k = query.swapaxes(1, 2), key.swapaxes(1, 2)
        mask = Tensor(np.triu(np.full((SEQUENCE, SEQUENCE), -np.inf, np.float32), 1))
        return ops.matmul(ops.softmax(ops.matmul(q, k.swapaxes(2, 3)) * SIZE**-0.5 + mask), k)


class MindSporeGate(nn.Cell):
    """Returns the weights and the numbers of the experts that it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((EXPERTS, SEQUENCE * HEADS * SIZE), np.float32)))
        self.num_experts, self.top_k = EXPERTS, TOP

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = ops.topk(ops.softmax(ops.matmul(x, self.weight.T)), TOP)
        return weights, chosen


class MindSporeScores(nn.Cell):
    """Returns the scores of all experts, of logits that are multiplied by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((EXPERTS, SEQUENCE * HEADS * SIZE), np.float32)))
        self.factor = factor

    def construct(self, x: Tensor) -> Tensor:
        return ops.softmax(ops.matmul(x, self.weight.T) * self.factor)


class MindSporeMixture(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Dense(INPUTS, SEQUENCE * HEADS * SIZE, has_bias=False) for _ in range(2))
        self.core, self.gate, self.twice = MindSporeCore(), MindSporeGate(), nn.Dense(OUTPUTS, OUTPUTS, has_bias=False)
        self.picking = nn.Dense(SEQUENCE * HEADS * SIZE, EXPERTS, has_bias=False)
        self.picking.top_k = TOP
        self.shown, self.cooled = MindSporeScores(1.0), MindSporeScores(0.5)

    def construct(self, x: Tensor) -> Tensor:
        query, key = (layer(x).reshape(-1, SEQUENCE, HEADS, SIZE) for layer in (self.query, self.key))
        tokens = self.core(query, key).reshape(len(x), -1)
        weights, _ = self.gate(tokens)
        others = self.picking(tokens) * self.shown(tokens) * self.cooled(tokens)
        return self.twice(ops.tanh(self.twice(weights))) + others.mean()


class OfMindSpore:
    monitor: ClassVar[Any] = monitor.mindspore

    def __init__(self, network: str, optimizers: Sequence[Stepping], *, recomputes: bool = False) -> None:
        made = {"blocks": lambda: MindSporeBlocks(recomputes), "mixture": MindSporeMixture}
        self.model = made[network]().set_train(True)
        named = dict(self.model.parameters_and_names())
        for name, values in weights(network).items():
            named[name].set_data(Tensor(values))
        trained = {name: named[name] for name in weights(network)}
        self.optimizers = [one.made(optim, trained) for one in optimizers]
        parameters = [one for optimizer in self.optimizers for one in optimizer.parameters]
        self._gradients_of = ms.value_and_grad(self._loss, None, parameters)
        self._summed: list[Tensor] = []

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.square(self.model(x) - y).mean()

    def backward(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> Any:
        loss, found = self._gradients_of(Tensor(x), Tensor(y))
        self._summed = [a + b for a, b in zip(self._summed, found, strict=True)] if self._summed else list(found)
        return loss

    def evaluate(self, x: NDArray[np.float32]) -> None:
        self.model.set_train(False)
        self.model(Tensor(x))
        self.model.set_train(True)

    def clip(self, limit: float) -> None:
        self._summed = list(ops.clip_by_global_norm(tuple(self._summed), limit))

    def step(self) -> None:
        gradients: Iterator[Tensor] = iter(self._summed)
        for one in self.optimizers:
            one(tuple(next(gradients) for _ in one.parameters))

    def forget(self) -> None:
        self._summed = []

    def bits(self) -> dict[str, bytes]:
        return {one.name: one.asnumpy().tobytes() for one in self.model.trainable_params()}


FRAMEWORKS: tuple[type[Twin], ...] = (OfTorch, OfMindSpore)
