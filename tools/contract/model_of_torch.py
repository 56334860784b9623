"""The model of the contract in PyTorch, its training, and the tensors that the training has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rows import Arrays, Series, Tensors
from torch import Tensor, nn

STEPS = 3
KINDS_OF_STATE = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Attention(nn.Module):
    """Causal self-attention with two heads, after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (part.view(batch, length, 2, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        dropped: Tensor = self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        return dropped


class Net(nn.Module):
    """An attention block and an MLP."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.attention(self.first(x)))
        return y


Prepared = Callable[[Net, torch.optim.Optimizer], object]


def train(
    wrap: Callable[[Net], Any] | None = None,
    prepare: Prepared | None = None,
    after_backward: Callable[[], object] | None = None,
    after_step: Callable[[], object] | None = None,
    seed: int = 0,
) -> Arrays:
    """Train from fixed weights on fixed data.

    Args:
        wrap: Gives the model that is called: compiled, or parallel.
        prepare: Called with the model inside ``wrap`` and the optimizer, before the first step.
        after_backward, after_step: Called in each step, before and after the optimizer's.
        seed: Of the data.
    """
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    called = net if wrap is None else wrap(net)
    if prepare is not None:
        prepare(net, optimizer)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * seed + step + 1)
        loss = called(torch.randn(2, 5, 4)).square().mean()
        loss.backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()
        if after_step is not None:
            after_step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return arrays_of(net, optimizer, losses)


def arrays_of(net: Net, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> Arrays:
    """All that a run ended with, by name."""
    found = {"losses": torch.stack(losses).numpy(), "random state": torch.get_rng_state().numpy()}
    for name, parameter in net.named_parameters():
        found[name] = parameter.detach().numpy()
        found |= {f"{key} of {name}": optimizer.state[parameter][key].numpy() for key in KINDS_OF_STATE}
    return found


def observed() -> Tensors:
    """The tensors of an unmonitored run, by the rows that a monitor would have written."""
    seen = Observer()
    train(None, seen.watch, seen.before_step, seen.after_step)
    return seen.tensors


class Observer:
    """Copies of the tensors of a run, taken by hooks of torch's own."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self._step = 0

    def watch(self, net: Net, optimizer: torch.optim.Optimizer) -> None:
        """Hook all modules of ``net``."""
        self._net, self._optimizer = net, optimizer
        for name, module in net.named_modules():
            module.register_forward_hook(self._forward(name))
            module.register_full_backward_hook(self._backward(name))

    def before_step(self) -> None:
        """Copy gradients, weights and moments."""
        for name, parameter in self._net.named_parameters():
            for kind in ("grad_unreduced", "grad_reduced"):
                self._keep(kind, name, parameter.grad)
            self._keep("param_origin", name, parameter)
            for kind, key in KINDS_OF_STATE.items():
                self._keep(kind, name, self._optimizer.state[parameter].get(key))

    def after_step(self) -> None:
        """Copy the weights. The next step begins."""
        for name, parameter in self._net.named_parameters():
            self._keep("param_updated", name, parameter)
        self._step += 1

    def _forward(self, name: str) -> Callable[..., None]:
        def copy(_: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            self._keep("actv", f"{name}.input", given[0])
            self._keep("actv", f"{name}.output", result)

        return copy

    def _backward(self, name: str) -> Callable[..., None]:
        def copy(_: nn.Module, inputs: tuple[Tensor | None, ...], results: tuple[Tensor | None, ...]) -> None:
            self._keep("actv_grad", f"{name}.input", inputs[0])
            self._keep("actv_grad", f"{name}.output", results[0])

        return copy

    def _keep(self, kind: str, name: str, x: Tensor | None) -> None:
        if x is not None:
            self.tensors[Series(kind, name, self._step)] = x.detach().double().numpy().copy()
