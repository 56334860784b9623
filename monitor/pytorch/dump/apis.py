"""Calls of torch's functions and methods, as they happen.

A ``TorchFunctionMode`` sees every call from Python of what torch lets be overridden: nothing is wrapped, nothing left
behind. What one function calls inside is not seen: it is how the function works. Functions of ``torch.distributed`` and those
that users name cannot be overridden: they are patched while the dump runs.
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
from monitor.dump.levels import api_list as read_list
from monitor.dump.levels import packaged_list
from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording import patches
from monitor.recording.patches import CallListener

# --- What a function of torch's was called with.
#
# Functions that torch writes in Python (``embedding``, ``dropout``, ``split``) hand a call on to a
# ``TorchFunctionMode`` in words of their own: every argument, defaults too, and most by keyword. What the caller wrote
# is read from where it still stands: the values in the function's frame, and which of them were given, and how, in the
# instruction that calls it. Where the two do not agree to the letter (a ``functools.partial``, a decorator), the call
# stays as it was handed on.

HANDS_ON: Final = handle_torch_function.__code__
DISPATCHES: Final[CodeType] = torch.nn.functional.max_pool2d.__code__
"""Of the function that chooses between one with indices and one without, both of which torch names otherwise."""

MOST_CALLS: Final = 4096
"""Places of calls that are remembered."""

Function = Callable[..., Any]
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class CallShape(NamedTuple):
    """How an instruction calls.

    Attributes:
        positional: How many arguments are given by position, the object of a method not counted.
        keywords: The names of the rest.
    """

    positional: int
    keywords: tuple[str, ...]


def as_given(function: Function, is_method: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments as the caller gave them.

    To be called by what the mode has for ``__torch_function__``.

    Args:
        is_method: Whether it is most often called as a method, of its first argument.
        args: What was handed on, and ``kwargs``.
    """
    handing_on = sys._getframe(2)
    try:
        return _given(handing_on, function, is_method) or (args, kwargs)
    except Exception:  # of an interpreter whose instructions are others
        return args, kwargs


def _given(handing_on: FrameType, function: Function, is_method: bool) -> Arguments | None:
    if handing_on.f_code is not HANDS_ON or handing_on.f_back is None or handing_on.f_back.f_back is None:
        return None  # written in C, which hands on what it was given
    python, caller = handing_on.f_back, handing_on.f_back.f_back
    return _passed_through(caller, python, function) or _as_called(caller, python, function, is_method)


def _passed_through(caller: FrameType, python: FrameType, function: Function) -> Arguments | None:
    """Of a function that passes ``*args`` or ``**kwargs`` of its own through: those that it has."""
    names = _names(python.f_code)
    if names is None or _shape(caller.f_code, caller.f_lasti) is not None:
        return None
    args, kwargs = _rest_of(caller)
    if len(args) > python.f_code.co_argcount or not kwargs.keys() <= set(names[len(args) :]):
        return None
    given, there = {**dict(zip(names, args, strict=False)), **kwargs}, python.f_locals
    same = all(there.get(name, function) is value for name, value in given.items())
    rest = [name for name in names if name not in given]
    return (args, dict(kwargs)) if same and (caller.f_code is DISPATCHES or _left_out(rest, python, function)) else None


def _rest_of(caller: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a function has as ``*args`` and ``**kwargs``, empty where it takes none."""
    code = caller.f_code
    takes_args, takes_kwargs = bool(code.co_flags & inspect.CO_VARARGS), bool(code.co_flags & inspect.CO_VARKEYWORDS)
    at = code.co_argcount + code.co_kwonlyargcount
    args = caller.f_locals.get(code.co_varnames[at]) if takes_args else ()
    kwargs = caller.f_locals.get(code.co_varnames[at + takes_args]) if takes_kwargs else {}
    return args if isinstance(args, tuple) else (), kwargs if isinstance(kwargs, dict) else {}


def _as_called(caller: FrameType, python: FrameType, function: Function, is_method: bool) -> Arguments | None:
    """Of a function that is called by name: what the instruction says of its arguments."""
    names, shape = _names(python.f_code), _shape(caller.f_code, caller.f_lasti)
    if names is None or shape is None:
        return None
    there = python.f_locals
    for positional in (shape.positional + 1, shape.positional) if is_method else (shape.positional,):
        by_position = names[:positional]
        rest = [name for name in names[positional:] if name not in shape.keywords]
        if positional > python.f_code.co_argcount or not set(shape.keywords) <= set(names[positional:]):
            continue
        if _left_out(rest, python, function):
            return [there[name] for name in by_position], {name: there[name] for name in shape.keywords}
    return None


def _left_out(names: Sequence[str], python: FrameType, function: Function) -> bool:
    """Whether arguments of a function that runs have their defaults, so that the caller may have left them out."""
    if getattr(function, "__code__", None) is not python.f_code:
        return False
    defaults, there = _defaults(function), python.f_locals
    return all(name in defaults and there.get(name, function) is defaults[name] for name in names)


def _defaults(function: Function) -> Mapping[str, Any]:
    """By the name of the argument."""
    values = getattr(function, "__defaults__", None) or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(getattr(function, "__kwdefaults__", None) or {})}


@functools.lru_cache(MOST_CALLS)
def _names(code: CodeType) -> tuple[str, ...] | None:
    """The arguments of a function, those that can be given by position first; None where it takes any number."""
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_cellvars:
        return None
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@functools.lru_cache(MOST_CALLS)
def _shape(code: CodeType, at: int) -> CallShape | None:
    """How the instruction at an offset calls; None where that does not stand in it (``*args``) or it is no call."""
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
"""Where names of a prefix are looked up. A function that stands in several places has the first one's name."""

PREFIXES: Final = (*OVERRIDABLE, DISTRIBUTED)


class FunctionMode(TorchFunctionMode):
    """Tells a listener of the functions it knows."""

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
            call = listener.begins(*known, *as_given(function, known[0] == TENSOR, args, kwargs))
        if call is None or listener is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            listener.raised(call)
            raise
        listener.ended(call, result)
        return result


def _is_no_part_of_the_program(function: Function) -> None:
    """Compilers leave it alone, and what it calls.

    What could not be compiled of a compiled function calls torch, and so this, while everything that is called is taken to be
    part of the program: it would be compiled once more for each parameter of an optimizer. Where it is traced as a part of
    what calls it nothing changes.
    """
    compiler: Any = torch._C._dynamo.eval_frame
    if hasattr(compiler, "set_code_exec_strategy"):
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
    else:  # older versions
        compiler.skip_code(function.__code__)


_is_no_part_of_the_program(FunctionMode.__torch_function__)


class OpenCalls(threading.local):
    """Calls that have not ended, None for one that nobody wants to know of: each thread has its own."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


class PatchedCalls(CallListener):
    """Functions that nothing but a patch sees."""

    def __init__(self, listener: ApiListener) -> None:
        self._listener = listener
        self._patches: dict[tuple[int, str], tuple[TorchCallPatch, str]] = {}
        self._listed: dict[tuple[int, str], str] = {}
        self._threads = OpenCalls()
        self._listening = False

    def add(self, module: Any, api: str, prefix: str, *, listed: bool = False) -> None:
        """See calls of ``module.api`` under a prefix.

        Args:
            listed: Whether the list of APIs has it; a prefix that a user names later goes before that of the list.
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
        """What the user has named is seen no more, or under the prefix of the list again."""
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


class Interception:
    """Everything that sees calls of APIs."""

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
        _take_out_what_was_left()
        self._mode.listener = self._listener
        self._undo = _answer_as_without(self._mode)
        _put_below(self._mode)

    def remove(self) -> None:
        self._patched.remove()
        self._mode.listener = None  # wherever it still stands
        if not _take_out(self._mode) and self._undo is not None:
            said = "stop() was called in another thread than start(), where a TorchFunctionMode stays that records nothing"
            self._listener.warn("stop in another thread", f"{said}: call both in the same thread.")
        if self._undo is not None:
            self._undo()
            self._undo = None


def _functions(listed: Mapping[str, Sequence[str]]) -> dict[Function, tuple[str, str]]:
    """The functions that the list names, as far as this version of torch has them."""
    found: dict[Function, tuple[str, str]] = {}
    for prefix, place in OVERRIDABLE.items():
        for name in listed.get(prefix, ()):
            function = getattr(place, name, None)
            if callable(function):
                found.setdefault(function, (prefix, name))
    return found


def _put_below(mode: TorchFunctionMode) -> None:
    """Below the modes that users have entered: leaving one takes the uppermost away, whichever it is. Only torch's default
    device has to be lower.
    """
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    above = [_pop_mode() for one in _get_current_function_mode_stack() if one is not default]
    _push_mode(mode)
    for one in reversed(above):
        _push_mode(one)


def _take_out(mode: TorchFunctionMode) -> bool:
    """Take a mode from wherever it stands: users may have entered others since, and not left them yet. Whether it was there."""
    stack = _get_current_function_mode_stack()
    if not any(one is mode for one in stack):
        return False
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        _push_mode(one)
    return True


def _take_out_what_was_left() -> None:
    """Modes of ours that record nothing any more: ``remove`` was called in another thread, which has a stack of its own."""
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, FunctionMode) and mode.listener is None:
            _take_out(mode)


def traced() -> bool:
    """Whether ``torch.jit.trace`` writes down what is called: what reads a tensor would stand in the user's graph."""
    return torch._C._get_tracing_state() is not None


def _answer_as_without(mode: TorchFunctionMode) -> Function:
    """Have modules that ask whether anybody overrides functions be answered as if ``mode`` did not.

    Attention and encoder layers take another way, with other bits, in evaluation if somebody does. They look the question up in
    ``torch.overrides``; functions, which have to be told of the mode, have looked it up when they were made. Compilers look it
    up, too, and know it by its identity for as long as the process lives: so it stays where it is, and a module of torch's
    that runs is given another one as it looks.
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
