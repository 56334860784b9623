"""Hooks of modules, which leave no trace: they are copied or saved with a model as a callable of the standard library that
does nothing, so that a checkpoint loads where the monitor is not installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from monitor.recording import patches
from monitor.recording.protocols import Removable

# --- Functions of ours in the place of torch's own: a compiler is to find them as opaque as what they stand for.

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """``function``, which a compiler neither looks into nor compiles, nor anything that it calls.

    ``torch.compiler.disable`` does the same with a wrapper that costs every call a microsecond, and imports the compiler.
    """
    strategy = _skip_with_all_it_calls()
    if strategy is None:
        disabled: F = torch.compiler.disable(function)
        return disabled
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def not_compiled_alone(function: F) -> F:
    """``function``, which a compiler does not compile as a piece of its own where it comes to it between two graphs: there it
    runs as it is. Within what is compiled it is traced.
    """
    strategy = _skip_with_all_it_calls()
    if strategy is not None:
        torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def _skip_with_all_it_calls() -> Any:
    """None where this version of torch has no such thing."""
    frames: Any = torch._C._dynamo.eval_frame
    try:
        return frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    except AttributeError:
        return None


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


# --- Patches of torch's own functions, which its compiler meets.


class TorchCallPatch(patches.CallPatch):
    """Where a compiler could not look into the function, it does not look into what stands in its place."""

    def _opaque(self, patched: Any, original: Any) -> Any:
        return patched if isinstance(original, FunctionType) else untraced(patched)


# --- The end of the backward in progress, before whoever called it goes on.


def when_backward_ends(then: Callable[[], None]) -> None:
    """Call ``then`` after what a reducer has asked for at the end of the backward in progress.

    The engine makes its final calls in the order in which they were asked for. A reducer asks when its last gradient has
    arrived, which is after the first; so this asks for another one when it is called itself.
    """
    _queue(lambda: _queue(then))


def _queue(call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # where no engine runs the backward: in compiled code
        Variable._execution_engine.queue_callback(call)
