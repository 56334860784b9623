"""Hooks of modules, which leave no trace: they are copied or saved with a model as a callable of the standard library that
does nothing, so that a checkpoint loads where the monitor is not installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from monitor.pytorch.untraced import not_compiled_alone
from monitor.recording.protocols import Removable


class ModuleHook:
    """A hook in a module's dictionaries, which ``copy.deepcopy`` and ``torch.save`` walk through.

    Args:
        call: Called in eager code. A trace of ``torch.jit`` would take what it does for the model's own work: not there.
        traced: Called in its place by a compiler that looks into the module's call, but not in an export. Without one,
            compiled code has none of the hook, and no graph is broken by it.
    """

    def __init__(self, call: Callable[..., Any], traced: Callable[..., Any] | None = None) -> None:
        self._call = call
        self._traced = traced

    @not_compiled_alone
    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return None if self._traced is None or torch.compiler.is_exporting() else self._traced(*args)
        if torch._C._get_tracing_state() is None:
            self._call(*args)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def takes_hooks(module: nn.Module) -> bool:
    """Whether there can be hooks on ``module``: scripted ones refuse them."""
    return not isinstance(module, torch.jit.ScriptModule)


def before_forward(module: nn.Module, call: Callable[..., None], traced: Callable[..., Any] | None = None) -> Removable:
    """Have ``call(module, args, kwargs)`` called before each forward.

    Args:
        traced: Called likewise by a compiler: may return other arguments.
    """
    return module.register_forward_pre_hook(ModuleHook(call, traced), with_kwargs=True)


def after_forward(
    module: nn.Module, call: Callable[..., None], traced: Callable[..., None] | None = None, *, always: bool = False
) -> Removable:
    """Have ``call(module, args, kwargs, result)`` called after each forward.

    Args:
        traced: Called likewise by a compiler.
        always: Also where it has raised, then with None, and while that exception is being handled.
    """
    handle = module.register_forward_hook(ModuleHook(call, traced), with_kwargs=True, always_call=always)
    if always:
        _number_alike(handle, module)
    return handle


def first_after_accumulation(parameter: Any, call: Callable[[Any], None]) -> Removable:
    """Have ``call(parameter)`` called when a backward has added to its gradient, ahead of every other such hook that there is:
    those of frameworks and of training loops reduce the gradient, or take it away.
    """
    handle: Any = parameter.register_post_accumulate_grad_hook(call)
    hooks = parameter._post_accumulate_grad_hooks
    for earlier in [key for key in hooks if key != handle.id]:
        hooks[earlier] = hooks.pop(earlier)  # torch calls them in the order of the dictionary underneath
    removable: Removable = handle
    return removable


class HooksOfLoop(NamedTuple):
    """Whether hooks of the training loop on a parameter see its gradient before and after it is accumulated.

    Those that are registered on the node of autograd do not show.
    """

    before: bool
    after: bool


NO_HOOKS: Final = HooksOfLoop(before=False, after=False)


def hooks_of_loop(parameter: Any) -> HooksOfLoop:
    """Of a parameter that has one hook of ours, after accumulation."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return HooksOfLoop(bool(getattr(parameter, "_backward_hooks", None)), after is not None and len(after) > 1)


def _number_alike(handle: RemovableHandle, module: nn.Module) -> None:
    """Give a hook a number that the same hook has in every module: torch counts them, and a compiler compiles code for each
    number of a hook that is always called, so that layers could not share theirs.
    """
    number = min(0, *module._forward_hooks) - 1
    for hooks in (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called):
        hooks[number] = hooks.pop(handle.id)  # type: ignore[assignment]
    handle.id = number
