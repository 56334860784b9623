"""The modules that a description asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from loops import Call, Module, Part
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 3, 4
"""The shape of every activation."""


def built(part: Part, values: Sequence[Any]) -> Any:
    """The module of a part of a description."""
    if isinstance(part, int):
        return values[part]
    parts = [built(one, values) for one in part.parts]
    if part.form == "dict":
        return {f"d{place}": one for place, one in enumerate(parts)}
    return tuple(parts) if part.form == "tuple" else parts


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Mix(nn.Module):
    """A tensor of several, which may be given back beside it."""

    def __init__(self, inputs: int, gives: Part) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(inputs, WIDTH))
        self.gives = gives

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = list(tensors_in((args, kwargs)))
        made = sum(x.to(factor.dtype) * factor for x, factor in zip(given, self.factors, strict=True))
        return built(self.gives, [*given, torch.tanh(made)])


class Block(nn.Module):
    """Calls its children.

    Attributes:
        micro_batch: Set by the loop, on the root.
        checkpointing: Whether calls are repeated in backward where the description says so.
    """

    micro_batch = 0
    checkpointing = True

    def __init__(self, module: Module, children: Sequence[nn.Module]) -> None:
        super().__init__()
        self.described = module
        for place, child in enumerate(children):
            self.add_module(f"m{place}", child)
        for place in module.again:
            self.add_module(f"again{place}", children[place])
        self.own = nn.Parameter(torch.randn(ROWS, WIDTH)) if module.own else None
        self.callees = [getattr(self, f"m{place}") for place in range(len(children))]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = list(tensors_in((args, kwargs)))
        if self.own is not None:
            values.insert(self.described.inputs, self.own)
        for call in self.described.calls:
            values += self._results(call, values)
        return built(self.described.gives, values)

    def _results(self, call: Call, values: Sequence[Tensor]) -> list[Tensor]:
        module, child = self.callees[call.child], self.described.children[call.child]
        args = [built(one, values) for one in call.args]
        kwargs = {f"k{place}": built(one, values) for place, one in enumerate(call.keywords)}
        if call.only and (call.only == "first") != (self.micro_batch == 0):
            return [next(tensors_in((args, kwargs)))] * child.results
        if child.kind == "relu_":
            args = [args[0] + 0.5]  # a tensor that nothing else needs
        if not (call.checkpoint and self.checkpointing and torch.is_grad_enabled()):
            return list(tensors_in(module(*args, **kwargs)))
        reentrant = call.checkpoint == "reentrant" and any(x.requires_grad for x in args)
        return list(tensors_in(checkpoint(module, *args, use_reentrant=reentrant, **kwargs)))


def network(described: Module, dtype: torch.dtype) -> Block:
    """The network of a loop, with the same weights each time."""
    torch.manual_seed(0)
    linears: list[nn.Linear] = []
    root = _made(described, linears).to(dtype)
    assert isinstance(root, Block)
    for name, (module, one) in _described(root).items():
        del name
        if one.frozen:
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
    return root


def put_in_mode(root: Block, training: bool) -> None:
    root.train(training)
    for module, described in _described(root).values():
        if described.asleep:
            module.eval()


def _described(root: Block) -> dict[str, tuple[nn.Module, Module]]:
    found: dict[str, tuple[nn.Module, Module]] = {}

    def walk(module: nn.Module, described: Module, name: str) -> None:
        found[name] = module, described
        if isinstance(module, Block):
            for place, child in enumerate(described.children):
                walk(module.callees[place], child, f"{name}.m{place}")

    walk(root, root.described, "")
    return found


def _made(one: Module, linears: list[nn.Linear]) -> nn.Module:
    if one.kind == "block":
        return Block(one, [_made(child, linears) for child in one.children])
    if one.kind == "mix":
        return Mix(one.inputs, one.gives)
    if one.kind == "linear":
        linear = nn.Linear(WIDTH, WIDTH)
        if one.tied and linears:
            linear.weight = linears[0].weight
        linears.append(linear)
        return linear
    kinds: dict[str, Any] = {
        "scale": Scale,
        "norm": lambda: nn.LayerNorm(WIDTH),
        "tanh": nn.Tanh,
        "relu_": lambda: nn.ReLU(inplace=True),
        "dropout": nn.Dropout,
    }
    return kinds[one.kind]()
