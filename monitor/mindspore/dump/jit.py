"""Reports calls of compiled functions (``@jit``) to a dump, each as one call of the prefix ``Jit``.

What happens inside is compiled and does not run in Python. While such a call runs, MindSpore's own functions are in their
places: the compiler reads them, and would compile other code with ours.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from mindspore import nn

from monitor.dump.backend import ApiListener
from monitor.mindspore.hooks import jit_context

__all__ = ["BytecodeContext", "CompiledFunctions", "Executor"]

JIT: Final = "Jit"

# The classes have moved between versions. A version without one of them compiles nothing in this way.
try:
    from mindspore.graph.api import _JitExecutor as Executor
except ImportError:
    try:
        from mindspore.common.api import _JitExecutor as Executor
    except ImportError:
        Executor = None
try:
    from mindspore.graph._utils.pijit_context import PIJitCaptureContext as BytecodeContext
except ImportError:
    try:
        from mindspore.common._pijit_context import PIJitCaptureContext as BytecodeContext
    except ImportError:
        BytecodeContext = None


class BytecodeCalls(threading.local):
    """The calls of a thread that are in progress: their contexts, and what the listener returned."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []


class CompiledFunctions:
    """Intercepts calls of functions that are compiled from their source (``capture_mode="ast"``) or from their bytecode.

    Args:
        pause: Restores MindSpore's own functions; called before each call.
        resume: Called after it.
    """

    def __init__(self, listener: ApiListener, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._listener = listener
        self._pause, self._resume = pause, resume
        self._within = BytecodeCalls()
        self._originals: dict[tuple[type, str], Callable[..., Any]] = {}

    def install(self) -> None:
        """Replace the methods that run compiled code."""
        if Executor is not None:
            self._replace(Executor, "__call__", self._executing)
        if BytecodeContext is not None:
            self._replace(BytecodeContext, "__enter__", self._entering)
            self._replace(BytecodeContext, "__exit__", self._leaving)

    def remove(self) -> None:
        """Restore them."""
        while self._originals:
            (owner, name), original = self._originals.popitem()
            setattr(owner, name, original)

    def _replace(self, owner: type, name: str, replacing: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = self._originals[owner, name] = vars(owner)[name]
        setattr(owner, name, functools.wraps(original)(replacing(original)))

    def _executing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(executor: Any, *args: Any, **kwargs: Any) -> Any:
            if jit_context() is not None:
                return original(executor, *args, **kwargs)
            call = self._begins(executor.fn, args, kwargs)
            try:
                result = original(executor, *args, **kwargs)
            except BaseException:
                self._raised(call)
                raise
            self._ended(call, result)
            return result

        return execute

    # A function that is compiled from bytecode runs within a context. Its arguments are variables of the calling frame.

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: Any) -> Any:
            caller = sys._getframe(1).f_locals
            call = self._begins(context.fn, caller.get("args", ()), caller.get("kwds", {}))
            self._within.calls.append((context, call))
            return original(context)

        return enter

    def _leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(context: Any, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> Any:
            left = original(context, kind, error, trace)
            calls = self._within.calls
            if calls and calls[-1][0] is context:  # or it was entered before the dump
                _, call = calls.pop()
                if kind is None:
                    self._ended(call, context.ret)
                else:
                    self._raised(call)
            return left

        return leave

    def _begins(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name, given = _named(function, args)
        call = self._listener.begins(JIT, name, given, kwargs)
        self._pause()
        return call

    def _ended(self, call: Any, result: Any) -> None:
        self._resume()
        if call is not None:
            self._listener.ended(call, result)

    def _raised(self, call: Any) -> None:
        self._resume()
        if call is not None:
            self._listener.raised(call)


def _named(function: Any, args: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """Name and arguments of a call. A compiled ``construct`` has the name of its cell's class. The object of a method is no
    argument.
    """
    name = str(function.__name__)
    method = getattr(type(args[0]), name, None) if args else None
    if not callable(method) or inspect.unwrap(method) is not function:
        return name, args
    of_cell = isinstance(args[0], nn.Cell) and name == "construct"
    return type(args[0]).__name__ if of_cell else name, args[1:]
