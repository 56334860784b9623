"""Hooks of modules, which leave no trace: they are copied or saved with a model as a callable of the standard library that
does nothing, so that a checkpoint loads where the monitor is not installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from monitor.capture.hooks import Removable


class ModuleHook:
    """A hook in a module's dictionaries, which ``copy.deepcopy`` and ``torch.save`` walk through."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        # What compiled code computes is not observed yet: no row is better than a graph broken at every module. A trace would
        # take what is done here for the model's own work.
        if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None:
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def takes_hooks(module: nn.Module) -> bool:
    """Whether there can be hooks on ``module``: scripted ones refuse them."""
    return not isinstance(module, torch.jit.ScriptModule)


def before_forward(module: nn.Module, call: Callable[..., None]) -> Removable:
    """Have ``call(module, args, kwargs)`` called before each forward."""
    return module.register_forward_pre_hook(ModuleHook(call), with_kwargs=True)


def after_forward(module: nn.Module, call: Callable[..., None], *, always: bool = False) -> Removable:
    """Have ``call(module, args, kwargs, result)`` called after each forward.

    Args:
        always: Also where it has raised, then with None, and while that exception is being handled.
    """
    return module.register_forward_hook(ModuleHook(call), with_kwargs=True, always_call=always)
