"""Sees every communication operator that Python issues, each once, where all ways of calling it meet.

The functions of ``mint.distributed``, ``ops.communication`` and ``communication.comm_func`` end in functions in C++, which are
looked up in the module ``gen_ops_prim``, whoever has imported what and when; primitives (``ops.AllReduce``) end in the function
``_run_op``. These are replaced in their modules while somebody listens. A compiler meets neither: it knows operators by their
names, and does not look into how Python runs them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from mindspore.ops import primitive as PRIMITIVES
from mindspore.ops.auto_generate import gen_ops_prim as KERNELS

from monitor.mindspore.collectives.completion import Handle
from monitor.mindspore.collectives.operators import Kernel, Operator, kernels, primitives
from monitor.mindspore.compiling import jit_context

Function = Callable[..., Any]

RUN: Final = "_run_op"


class CollectiveListener:
    """Whoever wants to know of communication. Raises what is training's to know, and nothing else."""

    def call_begins(self, _operator: Operator, _args: Sequence[Any]) -> bool:
        """An operator is about to be called.

        Returns:
            Whether to tell of its result.
        """
        return False

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any, handle: Handle | None) -> None:
        """It has returned. Its outputs are there, or will be when somebody has waited for ``handle``."""


class _Inside(threading.local):
    """Whether this thread is in an operator: one that somebody else has patched meanwhile may pass here twice."""

    another = False


class Interception:
    """What stands in the way of calls, and who is told by it."""

    def __init__(self) -> None:
        self._listeners: tuple[weakref.ref[CollectiveListener], ...] = ()
        self._inside = _Inside()
        self._replaced: dict[tuple[ModuleType, str], tuple[Function, Function]] = {}

    @property
    def installed(self) -> bool:
        return bool(self._replaced)

    def add(self, listener: CollectiveListener) -> None:
        """Tell ``listener`` of every call from now on, as long as it lives."""
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))
        if not self._replaced:
            self._install()

    def remove(self, listener: CollectiveListener) -> None:
        """Tell it nothing more. Any number of times."""
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def _forget(self, gone: weakref.ref[CollectiveListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone and known() is not None)
        if self._listeners:
            return
        for (module, name), (original, ours) in self._replaced.items():
            if vars(module)[name] is ours:  # somebody may have patched it since
                setattr(module, name, original)
        self._replaced.clear()

    def _install(self) -> None:
        for kernel in kernels():
            self._replace(KERNELS, kernel.function, self._kernel(kernel, vars(KERNELS)[kernel.function]))
        self._replace(PRIMITIVES, RUN, self._runner(vars(PRIMITIVES)[RUN]))

    def _replace(self, module: ModuleType, name: str, ours: Function) -> None:
        self._replaced[module, name] = vars(module)[name], ours
        setattr(module, name, ours)

    def _kernel(self, kernel: Kernel, original: Function) -> Function:
        def observed(primitive: Any, args: Sequence[Any]) -> Any:
            return self._observed(kernel, args, original, primitive, args)

        observed.__name__ = observed.__qualname__ = kernel.function
        return observed

    def _runner(self, original: Function) -> Function:
        known = primitives()

        def run_op(primitive: Any, name: str, args: Sequence[Any]) -> Any:
            operator = known.get(name)
            if operator is None:  # nearly always
                return original(primitive, name, args)
            return self._observed(operator, (primitive, *args), original, primitive, name, args)

        run_op.__name__ = run_op.__qualname__ = RUN
        return run_op

    def _observed(self, operator: Operator, seen: Sequence[Any], original: Function, *args: Any) -> Any:
        inside = self._inside
        if inside.another or jit_context() is not None:  # which traces, and takes the result for its own
            return original(*args)
        told = [one for known in self._listeners if (one := known()) is not None and one.call_begins(operator, seen)]
        inside.another = True
        try:
            result = original(*args)
        finally:
            inside.another = False
        return _tell(told, operator, seen, result) if told else result


def _tell(told: Sequence[CollectiveListener], operator: Operator, args: Sequence[Any], result: Any) -> Any:
    """Returns what the caller is given: the result, its handle replaced by one that tells when somebody has waited for it."""
    handle = None
    if isinstance(operator, Kernel) and isinstance(result, tuple) and operator.is_awaited(args):
        handle = Handle(result[1])
    for listener in told:
        listener.call_issued(operator, args, result, handle)
    return result if handle is None or not handle.has_listeners else (result[0], handle)


INTERCEPTION: Final = Interception()
"""Of this process, whose modules are there once."""
