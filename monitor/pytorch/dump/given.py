"""What a function of torch's was called with.

Functions that torch writes in Python (``embedding``, ``dropout``, ``split``) hand a call on to a ``TorchFunctionMode`` in words
of their own: every argument, defaults too, and most by keyword. What the caller wrote is read from where it still stands: the
values in the function's frame, and which of them were given, and how, in the instruction that calls it. Where the two do not
agree to the letter (a ``functools.partial``, a decorator), the call stays as it was handed on.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch.nn.functional
from torch.overrides import handle_torch_function

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
