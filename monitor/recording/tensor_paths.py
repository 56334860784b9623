"""The tensors in a module's arguments and results, and what each is called."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time, timedelta, tzinfo
from enum import Enum
from functools import lru_cache, partial
from numbers import Number
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final, NamedTuple

import numpy as np

# --- The tensors that a result holds anywhere, also where they have no rows: in sets, in attributes of objects, in
# closures.
#
# The gradient of an input is the sum over all that a module makes of it. If a part of the result is overlooked, the sum
# is wrong. So the search either finds every tensor or says that it cannot. It runs no code of the objects that it looks
# into.

MOST_OBJECTS: Final = 1000
"""Looked into for one result. Of a result that reaches more, not all tensors are known."""

NO_TENSORS: Final[tuple[type, ...]] = (
    *(type(None), str, bytes, bytearray, range, Number, Enum, type, EllipsisType, np.generic, np.ndarray),
    *(ModuleType, BuiltinFunctionType, CodeType, date, time, timedelta, tzinfo, re.Pattern),
    *(type(threading.Lock()), type(threading.RLock())),
)
"""Classes whose objects hold no tensors that were computed in a call."""

_SIMPLE: Final = frozenset({int, float, bool, str, type(None)})
_SEQUENCES: Final = frozenset({tuple, list})
_ITERABLE: Final = (tuple, list, set, frozenset, deque)
_BASES: Final = (OrderedDict, defaultdict, dict, *_ITERABLE, object)
_POINTER: Final = tuple.__itemsize__


class HiddenError(Exception):
    """A result may hold tensors that cannot be found."""


def hidden_result(module: str, why: object) -> str:
    """What to say of a module whose result hides tensors."""
    said = f"Gradients of the inputs of {module!r} are not recorded: its result may hold tensors that cannot be found, {why}."
    return f"{said} Return tensors in tuples, lists, dicts or dataclasses."


def tensors_in(result: Any, tensor: type, without: tuple[type, ...]) -> list[Any]:
    """Every tensor that a result holds, each once.

    Args:
        tensor: The class of a tensor.
        without: More classes whose objects hold no tensors of a call.

    Raises:
        HiddenError: It holds what cannot be looked into, or too much.
    """
    if isinstance(result, tensor):
        return [result]
    found: dict[int, Any] = {}
    seen: set[int] = set()
    stack = [result]
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind in _SIMPLE:
            continue
        if isinstance(value, tensor):
            found[id(value)] = value
        elif id(value) not in seen:
            if len(seen) == MOST_OBJECTS:
                raise HiddenError(f"it reaches more than {MOST_OBJECTS} objects")
            seen.add(id(value))
            if kind in _SEQUENCES:
                stack += value
            elif not issubclass(kind, without):
                stack += _parts(value, kind)
    return list(found.values())


def _parts(value: Any, kind: type) -> Iterator[Any]:
    """What an object refers to. Raises ``HiddenError`` where that cannot be known."""
    if kind is FunctionType:
        yield from (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, vars(value))
    elif kind is CellType:
        yield from _content(value)
    elif kind is MethodType:
        yield from (value.__func__, value.__self__)
    elif issubclass(kind, partial):
        yield from (value.func, value.args, value.keywords)
    else:
        yield from _parts_of_object(value, kind)


def _parts_of_object(value: Any, kind: type) -> Iterator[Any]:
    if not _shows_all(kind):
        raise HiddenError(f"it holds an object of class {kind.__name__}")
    if issubclass(kind, dict):
        yield from (*dict.keys(value), *dict.values(value))
    for iterable in _ITERABLE:
        if issubclass(kind, iterable):
            yield from iterable.__iter__(value)
    for slot in _slots(kind):
        yield from _in_slot(slot, value)
    if kind.__dictoffset__:
        yield from _attributes(value)


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return ()


def _attributes(value: Any) -> tuple[Any, ...]:
    try:
        return tuple(object.__getattribute__(value, "__dict__").values())
    except (AttributeError, TypeError) as error:
        raise HiddenError(f"it holds an object of class {type(value).__name__}") from error


def _in_slot(slot: MemberDescriptorType, value: Any) -> tuple[Any, ...]:
    try:
        return (slot.__get__(value, type(value)),)
    except AttributeError:  # empty
        return ()


@lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[MemberDescriptorType, ...]:
    return tuple(each for cls in kind.__mro__ for each in vars(cls).values() if isinstance(each, MemberDescriptorType))


@lru_cache(maxsize=1024)
def _shows_all(kind: type) -> bool:
    """Whether objects of a class hold nothing but items, slots and attributes: a class written in C has room for more."""
    base = next(each for each in _BASES if issubclass(kind, each))
    # The offset is negative behind items, and where the attributes lie in front of the object and take no room in it.
    attributes = kind.__dictoffset__ > 0 or (kind.__dictoffset__ < 0 and base.__itemsize__ > 0)
    room = len(_slots(kind)) - len(_slots(base)) + attributes + (kind.__weakrefoffset__ > base.__weakrefoffset__)
    return kind.__basicsize__ <= base.__basicsize__ + _POINTER * room


MAX_DEPTH = 16
"""Deeper nesting is not walked: it holds no activations."""


class TensorPath(NamedTuple):
    """One tensor.

    Attributes:
        suffix: What is appended to ``input`` or ``output``: empty for a tensor that stands alone, else ``_0``, ``_1_mask`` …
        position: Its place in the outermost tuple, which targets refer to.
    """

    suffix: str
    position: int
    tensor: Any


class TensorPaths:
    """Finds the tensors of one framework.

    Args:
        tensor: The class of a tensor, parameters included.
        without: Classes of the framework whose objects hold no tensors that were computed in a call.
    """

    def __init__(self, tensor: type, without: tuple[type, ...] = ()) -> None:
        self._tensor = tensor
        self._without = (*NO_TENSORS, *without)
        self._opaque_without = (*self._without, FunctionType)

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[TensorPath]:
        """The tensors among a call's arguments. Keyword arguments are called by their names and counted after the others.

        Those within a lone argument are called as if each were an argument. Their position is that of the argument, 0.
        """
        if len(args) == 1 and not kwargs:
            return [leaf._replace(position=0) if leaf.position else leaf for leaf in self.outputs(args[0])]
        return _distinct(self._walk([*enumerate(args), *kwargs.items()]))

    def outputs(self, value: Any) -> list[TensorPath]:
        """The tensors in a result (or in a single argument). A tensor that stands alone has no suffix."""
        if isinstance(value, self._tensor):
            return [TensorPath("", 0, value)]
        if isinstance(value, (tuple, list)) and len(value) == 1 and isinstance(value[0], self._tensor):
            return [TensorPath("", 0, value[0])]
        return _distinct(self._walk(children(value) or ()))

    def held(self, value: Any) -> list[Any]:
        """Every tensor in a result, also those that ``outputs`` does not find.

        Raises:
            HiddenError: It may hold one that cannot be found.
        """
        return tensors_in(value, self._tensor, self._without)

    def finds_all(self, value: Any, depth: int = 0) -> bool:
        """Whether ``outputs`` finds every tensor in a result: it looks into no object. A compiler can trace this."""
        if value is None or isinstance(value, (self._tensor, int, float, str)):
            return True
        parts = children(value)
        if parts is None or depth == MAX_DEPTH:
            return isinstance(value, self._opaque_without)
        for _, child in parts:  # noqa: SIM110 (a compiler traces a loop in more versions)
            if not self.finds_all(child, depth + 1):
                return False
        return True

    def described_result(self, value: Any) -> str:
        """The shape of a result as targets spell it: ``tensor`` or ``tuple[2]``."""
        return "tensor" if isinstance(value, self._tensor) else f"tuple[{self.length(value)}]"

    def length(self, value: Any) -> int:
        """How many elements a result has: 1 for a tensor."""
        return 1 if isinstance(value, self._tensor) else len(list(children(value) or ()))

    def _walk(self, parts: Iterable[tuple[Any, Any]]) -> Iterator[TensorPath]:
        for position, (key, child) in enumerate(parts):
            for suffix, tensor in self._below(child, f"_{key}", ()):
                yield TensorPath(suffix, position, tensor)

    def _below(self, value: Any, suffix: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        if isinstance(value, self._tensor):
            yield suffix, value
        elif len(above) < MAX_DEPTH and id(value) not in above:
            for key, child in children(value) or ():
                yield from self._below(child, f"{suffix}_{key}", (*above, id(value)))


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The shape of a call's arguments as targets spell it, ``tuple[2]``."""
    return f"tuple[{len(args) + len(kwargs)}]"


def children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a value is made of, by name or number; None of what is not made of anything."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return None


def _distinct(leaves: Iterable[TensorPath]) -> list[TensorPath]:
    """Two paths may spell alike (``a_b`` and ``b`` within ``a``): the later one is marked, so that no row has two owners."""
    found: list[TensorPath] = []
    taken: set[str] = set()
    for leaf in leaves:
        suffix = leaf.suffix
        while suffix in taken:
            suffix += "~"
        taken.add(suffix)
        found.append(leaf._replace(suffix=suffix))
    return found
