"""Hooks that leave no trace: removed exactly, and copied or saved with a model as a callable of the standard library that
does nothing, so that a checkpoint loads where the monitor is not installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Removable(Protocol):
    """What frameworks return when they take a hook."""

    def remove(self) -> None: ...


class ModuleHook:
    """A hook in a module's dictionaries, which ``copy.deepcopy`` and ``torch.save`` walk through."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        # What compiled code computes is not observed yet: no row is better than a graph broken at every module.
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class HookSet:
    """Handles of hooks that are in place."""

    def __init__(self) -> None:
        self._handles: list[Removable] = []

    def add(self, handle: Removable) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        """Take every hook away."""
        while self._handles:
            self._handles.pop().remove()
