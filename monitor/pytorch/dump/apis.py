"""Intercepts calls of torch's functions and methods for the precision dump.

A ``TorchFunctionMode`` sees every call from Python of overridable functions, without wrapping them. Calls inside such a
function are its implementation and are not recorded. Functions of ``torch.distributed`` and those that users name are not
overridable: they are patched while the dump runs.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode, handle_torch_function

from monitor.dump.backend import ApiListener
from monitor.dump.levels import api_list as read_list, packaged_list
from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording import patches
from monitor.recording.patches import CallListener

# --- The arguments that the caller wrote. Functions that torch writes in Python (``embedding``, ``dropout``, ``split``) pass
# all arguments to a ``TorchFunctionMode``, defaults too, most by keyword. The caller's form is recovered from two places: the
# values from the function's frame, and which were passed, and how, from the calling instruction. If the two do not match (a
# ``functools.partial``, a decorator), the call is recorded as it was passed.

FORWARDS: Final = handle_torch_function.__code__
DISPATCHES: Final[CodeType] = torch.nn.functional.max_pool2d.__code__
"""Code of the function that dispatches to a variant with or without indices, which torch names differently."""

MOST_CALLS: Final = 4096
"""Call sites that are cached."""

Function = Callable[..., Any]
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class CallShape(NamedTuple):
    """The arguments of a call instruction.

    Attributes:
        positional: Number of positional arguments, without the object of a method.
        keywords: Names of the keyword arguments.
    """

    positional: int
    keywords: tuple[str, ...]


def caller_arguments(function: Function, is_method: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments as the caller wrote them.

    Must be called directly by the mode's ``__torch_function__``.

    Args:
        is_method: Whether it is usually called as a method of its first argument.
        args: The positional arguments that the mode received, with ``kwargs``.
    """
    forwarding = sys._getframe(2)
    try:
        return _given(forwarding, function, is_method) or (args, kwargs)
    except Exception:  # another interpreter has other instructions
        return args, kwargs


def _given(forwarding: FrameType, function: Function, is_method: bool) -> Arguments | None:
    if forwarding.f_code is not FORWARDS or forwarding.f_back is None or forwarding.f_back.f_back is None:
        return None  # written in C: passes the arguments unchanged
    python, caller = forwarding.f_back, forwarding.f_back.f_back
    return _forwarded(caller, python, function) or _as_called(caller, python, function, is_method)


def _forwarded(caller: FrameType, python: FrameType, function: Function) -> Arguments | None:
    """The arguments of a function that forwards its own ``*args`` or ``**kwargs``."""
    names = _names(python.f_code)
    if names is None or _shape(caller.f_code, caller.f_lasti) is not None:
        return None
    args, kwargs = _rest_of(caller)
    if len(args) > python.f_code.co_argcount or not kwargs.keys() <= set(names[len(args) :]):
        return None
    given, there = {**dict(zip(names, args, strict=False)), **kwargs}, python.f_locals
    same = all(there.get(name, function) is value for name, value in given.items())
    rest = [name for name in names if name not in given]
    return (args, dict(kwargs)) if same and (caller.f_code is DISPATCHES or _omitted(rest, python, function)) else None


def _rest_of(caller: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A function's ``*args`` and ``**kwargs``, empty if it takes none."""
    code = caller.f_code
    takes_args, takes_kwargs = bool(code.co_flags & inspect.CO_VARARGS), bool(code.co_flags & inspect.CO_VARKEYWORDS)
    at = code.co_argcount + code.co_kwonlyargcount
    args = caller.f_locals.get(code.co_varnames[at]) if takes_args else ()
    kwargs = caller.f_locals.get(code.co_varnames[at + takes_args]) if takes_kwargs else {}
    return args if isinstance(args, tuple) else (), kwargs if isinstance(kwargs, dict) else {}


def _as_called(caller: FrameType, python: FrameType, function: Function, is_method: bool) -> Arguments | None:
    """The arguments of a plain call, from the calling instruction."""
    names, shape = _names(python.f_code), _shape(caller.f_code, caller.f_lasti)
    if names is None or shape is None:
        return None
    there = python.f_locals
    for positional in (shape.positional + 1, shape.positional) if is_method else (shape.positional,):
        by_position = names[:positional]
        rest = [name for name in names[positional:] if name not in shape.keywords]
        if positional > python.f_code.co_argcount or not set(shape.keywords) <= set(names[positional:]):
            continue
        if _omitted(rest, python, function):
            return [there[name] for name in by_position], {name: there[name] for name in shape.keywords}
    return None


def _omitted(names: Sequence[str], python: FrameType, function: Function) -> bool:
    """Whether arguments of a running function have their defaults, so the caller may have omitted them."""
    if getattr(function, "__code__", None) is not python.f_code:
        return False
    defaults, there = _defaults(function), python.f_locals
    return all(name in defaults and there.get(name, function) is defaults[name] for name in names)


def _defaults(function: Function) -> Mapping[str, Any]:
    """Default values by argument name."""
    values = getattr(function, "__defaults__", None) or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(getattr(function, "__kwdefaults__", None) or {})}


@functools.lru_cache(MOST_CALLS)
def _names(code: CodeType) -> tuple[str, ...] | None:
    """Argument names of a function, positional ones first; None if it takes any number."""
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_cellvars:
        return None
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@functools.lru_cache(MOST_CALLS)
def _shape(code: CodeType, at: int) -> CallShape | None:
    """The arguments of the call instruction at an offset; None if it does not show them (``*args``) or is no call."""
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG")]
    place = bisect.bisect_right([one.offset for one in instructions], at) - 1
    call, before = instructions[place], instructions[place - 1]
    if call.opname not in ("CALL", "CALL_KW", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD"):
        return None
    named = before.opname == "KW_NAMES" or call.opname in ("CALL_KW", "CALL_FUNCTION_KW")
    keywords = code.co_consts[before.arg or 0] if named else ()
    if not isinstance(keywords, tuple) or call.arg is None:
        return None
    return CallShape(call.arg - len(keywords), keywords)


DISTRIBUTED: Final = "Distributed"

TENSOR: Final = "Tensor"
OVERRIDABLE: Final = {"Functional": torch.nn.functional, "Torch": torch, TENSOR: Tensor}
"""Namespaces by prefix. A function in several namespaces gets the name in the first one."""

PREFIXES: Final = (*OVERRIDABLE, DISTRIBUTED)


class FunctionMode(TorchFunctionMode):
    """Reports calls of listed functions to a listener."""

    def __init__(self, names: Mapping[Function, tuple[str, str]], listener: ApiListener) -> None:
        super().__init__()
        self._names = names
        self.listener: ApiListener | None = listener

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        listener = self.listener
        known = None if torch.compiler.is_compiling() or traced() else self._names.get(function)
        call = None
        if known is not None and listener is not None:
            call = listener.begins(*known, *caller_arguments(function, known[0] == TENSOR, args, kwargs))
        if call is None or listener is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            listener.raised(call)
            raise
        listener.ended(call, result)
        return result


def _skip_in_compilers(function: Function) -> None:
    """Have compilers skip ``function`` and everything that it calls.

    After a graph break, a compiled function calls torch eagerly and so this mode, and the compiler would compile it as part of
    the program, once more for each parameter of an optimizer. Inside a trace nothing changes.
    """
    compiler: Any = torch._C._dynamo.eval_frame
    if hasattr(compiler, "set_code_exec_strategy"):
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
    else:  # older versions
        compiler.skip_code(function.__code__)


_skip_in_compilers(FunctionMode.__torch_function__)


class PatchedCallStack(threading.local):
    """Calls of this thread that have not ended; None for a call that is not recorded."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


class PatchedCalls(CallListener):
    """Functions that only a patch can intercept."""

    def __init__(self, listener: ApiListener) -> None:
        self._listener = listener
        self._patches: dict[tuple[int, str], tuple[TorchCallPatch, str]] = {}
        self._listed: dict[tuple[int, str], str] = {}
        self._threads = PatchedCallStack()
        self._listening = False

    def add(self, module: Any, api: str, prefix: str, *, listed: bool = False) -> None:
        """Record calls of ``module.api`` under a prefix.

        Args:
            listed: Whether the list of APIs contains it. A prefix that a user names later takes precedence.
        """
        key = id(module), api
        known = self._patches.get(key)
        patch = TorchCallPatch(module, api) if known is None else known[0]
        self._patches[key] = patch, prefix
        if listed:
            self._listed[key] = prefix
        if self._listening and known is None:
            patch.add(self)

    def discard(self, module: Any, api: str) -> None:
        """Undo the user's registration: the function is no longer recorded, or has the prefix of the list again."""
        key = id(module), api
        patch, _ = self._patches.pop(key, (None, ""))
        if patch is None:
            return
        if key in self._listed:
            self._patches[key] = patch, self._listed[key]
        else:
            patch.remove(self)

    def listen(self) -> None:
        self._listening = True
        for patch, _ in self._patches.values():
            patch.add(self)

    def remove(self) -> None:
        self._listening = False
        for patch, _ in self._patches.values():
            patch.remove(self)

    def call_begins(self, patch: patches.CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        prefix = self._patches[id(patch.owner), patch.name][1]
        self._threads.calls.append(None if traced() else self._listener.begins(prefix, patch.name, args, kwargs))

    def call_ended(self, patch: patches.CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del patch, args, kwargs
        call = self._threads.calls.pop() if self._threads.calls else None
        if call is not None:
            self._listener.ended(call, result)

    def call_raised(self, patch: patches.CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del patch, args, kwargs
        call = self._threads.calls.pop() if self._threads.calls else None
        if call is not None:
            self._listener.raised(call)


class TorchApiInterception:
    """Intercepts calls of APIs, by function mode and patches."""

    def __init__(self, listener: ApiListener, api_list: str | None) -> None:
        listed = read_list(packaged_list(__file__) if api_list is None else api_list, PREFIXES)
        self._mode = FunctionMode(_functions(listed), listener)
        self._listener = listener
        self._patched = PatchedCalls(listener)
        if torch.distributed.is_available():
            for name in listed.get(DISTRIBUTED, ()):
                if callable(getattr(torch.distributed, name, None)):
                    self._patched.add(torch.distributed, name, DISTRIBUTED, listed=True)
        self._undo: Function | None = None

    def register(self, module: Any, api: str, prefix: str) -> None:
        self._patched.add(module, api, prefix)

    def restore(self, module: Any, api: str) -> None:
        self._patched.discard(module, api)

    def install(self) -> None:
        self._patched.listen()
        _remove_inactive_modes()
        self._mode.listener = self._listener
        self._undo = _hide(self._mode)
        _push_below(self._mode)

    def remove(self) -> None:
        self._patched.remove()
        self._mode.listener = None  # it may still be on a stack
        if not _remove_mode(self._mode) and self._undo is not None:
            said = "stop() was called in another thread than start(). An inactive TorchFunctionMode stays in that thread"
            self._listener.warn("stop in another thread", f"{said}, recording nothing. Call both in the same thread.")
        if self._undo is not None:
            self._undo()
            self._undo = None


def _functions(listed: Mapping[str, Sequence[str]]) -> dict[Function, tuple[str, str]]:
    """The listed functions that this version of torch has."""
    found: dict[Function, tuple[str, str]] = {}
    for prefix, place in OVERRIDABLE.items():
        for name in listed.get(prefix, ()):
            function = getattr(place, name, None)
            if callable(function):
                found.setdefault(function, (prefix, name))
    return found


def _push_below(mode: TorchFunctionMode) -> None:
    """Push ``mode`` below the modes that users have entered, since leaving a mode pops the top of the stack. Only torch's
    default device must be lower.
    """
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    above = [_pop_mode() for one in _get_current_function_mode_stack() if one is not default]
    _push_mode(mode)
    for one in reversed(above):
        _push_mode(one)


def _remove_mode(mode: TorchFunctionMode) -> bool:
    """Remove a mode from any position of the stack: users may have entered others since. Returns whether it was there."""
    stack = _get_current_function_mode_stack()
    if not any(one is mode for one in stack):
        return False
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        _push_mode(one)
    return True


def _remove_inactive_modes() -> None:
    """Remove inactive modes of the monitor. They stay if ``remove`` was called in another thread, which has another stack."""
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, FunctionMode) and mode.listener is None:
            _remove_mode(mode)


def traced() -> bool:
    """Whether ``torch.jit.trace`` is recording: reading a tensor would then become part of the user's graph."""
    return torch._C._get_tracing_state() is not None


def _hide(mode: TorchFunctionMode) -> Function:
    """Hide ``mode`` from modules of torch that ask whether functions are overridden.

    In evaluation, attention and encoder layers take another path, with other bits, if functions are overridden. They look up
    ``has_torch_function`` in ``torch.overrides`` at each call; functions, which must see the mode, looked it up at import.
    Compilers identify the function by its identity for the whole process. So it stays in place, and only lookups by running
    modules of torch get a replacement.
    """
    original = torch.overrides.has_torch_function

    def has_torch_function(args: Any) -> bool:
        stack = _get_current_function_mode_stack()
        if len(stack) != 1 or stack[0] is not mode:
            return bool(original(args))
        _pop_mode()
        try:
            return bool(original(args))
        finally:
            _push_mode(mode)

    class Overrides(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            if name == "has_torch_function" and sys._getframe(1).f_globals.get("__name__", "").startswith("torch.nn.modules."):
                return has_torch_function
            return ModuleType.__getattribute__(self, name)

    before = torch.overrides.__class__
    torch.overrides.__class__ = Overrides

    def undo() -> None:
        if torch.overrides.__class__ is Overrides:
            torch.overrides.__class__ = before  # type: ignore[assignment]

    return undo
