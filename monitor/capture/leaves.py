"""The tensors in a module's arguments and results, and what each is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from monitor.capture.held import NO_TENSORS, tensors_in

MAX_DEPTH = 16
"""Deeper nesting is not walked: it holds no activations."""


class Leaf(NamedTuple):
    """One tensor.

    Attributes:
        suffix: What is appended to ``input`` or ``output``: empty for a tensor that stands alone, else ``_0``, ``_1_mask`` …
        position: Its place in the outermost tuple, which targets refer to.
    """

    suffix: str
    position: int
    tensor: Any


class Leaves:
    """Finds the tensors of one framework.

    Args:
        tensor: The class of a tensor, parameters included.
        without: Classes of the framework whose objects hold no tensors that were computed in a call.
    """

    def __init__(self, tensor: type, without: tuple[type, ...] = ()) -> None:
        self._tensor = tensor
        self._without = (*NO_TENSORS, *without)
        self._opaque_without = (*self._without, FunctionType)

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Leaf]:
        """The tensors among a call's arguments. Keyword arguments are called by their names and counted after the others.

        Those within a lone argument are called as if each were an argument. Their position is that of the argument, 0.
        """
        if len(args) == 1 and not kwargs:
            return [leaf._replace(position=0) if leaf.position else leaf for leaf in self.outputs(args[0])]
        return _distinct(self._walk([*enumerate(args), *kwargs.items()]))

    def outputs(self, value: Any) -> list[Leaf]:
        """The tensors in a result (or in a single argument). A tensor that stands alone has no suffix."""
        if isinstance(value, self._tensor):
            return [Leaf("", 0, value)]
        if isinstance(value, (tuple, list)) and len(value) == 1 and isinstance(value[0], self._tensor):
            return [Leaf("", 0, value[0])]
        return _distinct(self._walk(children(value) or ()))

    def held(self, value: Any) -> list[Any]:
        """Every tensor in a result, also those that ``outputs`` does not find.

        Raises:
            HiddenError: It may hold one that cannot be found.
        """
        return tensors_in(value, self._tensor, self._without)

    def finds_all(self, value: Any, depth: int = 0) -> bool:
        """Whether ``outputs`` finds every tensor in a result: it looks into no object. A compiler can trace this."""
        if value is None or isinstance(value, (self._tensor, int, float, str)):
            return True
        parts = children(value)
        if parts is None or depth == MAX_DEPTH:
            return isinstance(value, self._opaque_without)
        for _, child in parts:  # noqa: SIM110 (a compiler traces a loop in more versions)
            if not self.finds_all(child, depth + 1):
                return False
        return True

    def described_result(self, value: Any) -> str:
        """The shape of a result as targets spell it: ``tensor`` or ``tuple[2]``."""
        return "tensor" if isinstance(value, self._tensor) else f"tuple[{self.length(value)}]"

    def length(self, value: Any) -> int:
        """How many elements a result has: 1 for a tensor."""
        return 1 if isinstance(value, self._tensor) else len(list(children(value) or ()))

    def _walk(self, parts: Iterable[tuple[Any, Any]]) -> Iterator[Leaf]:
        for position, (key, child) in enumerate(parts):
            for suffix, tensor in self._below(child, f"_{key}", ()):
                yield Leaf(suffix, position, tensor)

    def _below(self, value: Any, suffix: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        if isinstance(value, self._tensor):
            yield suffix, value
        elif len(above) < MAX_DEPTH and id(value) not in above:
            for key, child in children(value) or ():
                yield from self._below(child, f"{suffix}_{key}", (*above, id(value)))


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The shape of a call's arguments as targets spell it, ``tuple[2]``."""
    return f"tuple[{len(args) + len(kwargs)}]"


def children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a value is made of, by name or number; None of what is not made of anything."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return None


def _distinct(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Two paths may spell alike (``a_b`` and ``b`` within ``a``): the later one is marked, so that no row has two owners."""
    found: list[Leaf] = []
    taken: set[str] = set()
    for leaf in leaves:
        suffix = leaf.suffix
        while suffix in taken:
            suffix += "~"
        taken.add(suffix)
        found.append(leaf._replace(suffix=suffix))
    return found
