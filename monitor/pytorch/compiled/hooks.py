"""Hooks of modules as a compiler traces them: in each stands what is constant, and one operator is all that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from monitor.pytorch.compiled.operators import FOLLOW, SEE, Observed, begin, end
from monitor.pytorch.leaves import LEAVES
from monitor.recording.tensor_paths import Leaf
from monitor.selection import TensorChoice


class TracedHook:
    """A hook that asks for nothing but to be called."""

    def __init__(self, observed: Observed, *, ends: bool = False) -> None:
        self._observed = observed  # kept: compiled code has the handle alone
        self._handle = observed.handle
        self._ends = ends

    def __call__(self, _module: nn.Module, *_: Any) -> None:
        if self._ends:
            end([], self._handle, [], [], 0)
        else:
            begin([], self._handle, [], [], 0)


class TracedInputs(TracedHook):
    """Before a module's forward.

    Args:
        seen: The inputs to observe.
        followed: The inputs whose gradients are observed.
    """

    def __init__(self, observed: Observed, seen: TensorChoice, followed: TensorChoice) -> None:
        super().__init__(observed)
        self._seen = seen
        self._followed = followed

    def __call__(self, _module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        kwargs = kwargs or {}
        found = len(args) + len(kwargs)
        leaves = LEAVES.inputs(args, kwargs)
        slots = ["input" + leaf.suffix for leaf in leaves]
        begin([leaf.tensor for leaf in leaves], self._handle, slots, _wanted(self._seen, self._followed, leaves, found), found)


class TracedOutputs(TracedHook):
    """After a module's forward, likewise."""

    def __init__(self, observed: Observed, seen: TensorChoice, followed: TensorChoice) -> None:
        super().__init__(observed, ends=True)
        self._seen = seen
        self._followed = followed

    def __call__(self, _module: nn.Module, _args: Any = (), _kwargs: Any = None, result: Any = None) -> None:
        found = LEAVES.length(result)
        leaves = LEAVES.outputs(result)
        slots = ["output" + leaf.suffix for leaf in leaves]
        wanted = _wanted(self._seen, self._followed, leaves, found)
        end([leaf.tensor for leaf in leaves], self._handle, slots, wanted, found, LEAVES.finds_all(result))


def _wanted(seen: TensorChoice, followed: TensorChoice, leaves: Sequence[Leaf], found: int) -> list[int]:
    return [(SEE if _takes(seen, leaf, found) else 0) | (FOLLOW if _takes(followed, leaf, found) else 0) for leaf in leaves]


def _takes(choice: TensorChoice, leaf: Leaf, found: int) -> bool:
    """Whether a leaf is wanted; all are where the choice counts on another number of tensors than the call has."""
    return choice.wanted and (choice.index is None or choice.index == leaf.position or choice.length not in (None, found))
