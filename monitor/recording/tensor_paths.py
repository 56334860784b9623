"""Finds the tensors in a module's arguments and results, and names each by its path."""

from __future__ import annotations

import dataclasses
import re
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time, timedelta, tzinfo
from enum import Enum
from functools import lru_cache, partial
from numbers import Number
from typing import Any, Final, NamedTuple

import numpy as np

# --- Search for every tensor in a result, including those without rows: in sets, attributes of objects and closures.
#
# The gradient of an input is a sum over all results of the module. If the search missed a part of the result, the sum would
# be wrong. So the search finds every tensor or raises an error. It runs no code of the examined objects.

MOST_OBJECTS: Final = 1000
"""Maximum number of objects to examine for one result. Beyond it, not all tensors are known."""

NO_TENSORS: Final[tuple[type, ...]] = (
    *(type(None), str, bytes, bytearray, range, Number, Enum, type, types.EllipsisType, np.generic, np.ndarray),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, date, time, timedelta, tzinfo, re.Pattern),
    *(type(threading.Lock()), type(threading.RLock())),
)
"""Classes whose objects hold no tensors that were computed in a call."""

SIMPLE: Final = frozenset({int, float, bool, str, type(None)})
"""Classes of most values that are no tensors, and hold none."""
_SEQUENCES: Final = frozenset({tuple, list})
_ITERABLE: Final = (tuple, list, set, frozenset, deque)
_BASES: Final = (OrderedDict, defaultdict, dict, *_ITERABLE, object)
_POINTER: Final = tuple.__itemsize__


class HiddenError(Exception):
    """A result may contain tensors that cannot be found."""


def hidden_result(module: str, why: object) -> str:
    """The warning about a module whose result hides tensors."""
    said = f"Gradients of the inputs of {module!r} are not recorded: its result may contain tensors that cannot be found"
    return f"{said} ({why}). Return tensors in tuples, lists, dicts or dataclasses."


def tensors_in(result: Any, tensor: type, without: tuple[type, ...]) -> list[Any]:
    """Every tensor in a result, each once.

    Args:
        tensor: The class of a tensor.
        without: Classes whose objects contain no tensors of a call.

    Raises:
        HiddenError: The result contains an object that cannot be examined, or more than ``MOST_OBJECTS`` objects.
    """
    if isinstance(result, tensor):
        return [result]
    found: dict[int, Any] = {}
    seen: set[int] = set()
    stack = [result]
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind in SIMPLE:
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
    """The objects that an object refers to. Raises ``HiddenError`` if they cannot be known."""
    if kind is types.FunctionType:
        yield from (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, vars(value))
    elif kind is types.CellType:
        yield from _content(value)
    elif kind is types.MethodType:
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


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return ()


def _attributes(value: Any) -> tuple[Any, ...]:
    try:
        return tuple(object.__getattribute__(value, "__dict__").values())
    except (AttributeError, TypeError) as error:
        raise HiddenError(f"it holds an object of class {type(value).__name__}") from error


def _in_slot(slot: types.MemberDescriptorType, value: Any) -> tuple[Any, ...]:
    try:
        return (slot.__get__(value, type(value)),)
    except AttributeError:  # empty
        return ()


@lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    return tuple(each for cls in kind.__mro__ for each in vars(cls).values() if isinstance(each, types.MemberDescriptorType))


@lru_cache(maxsize=1024)
def _shows_all(kind: type) -> bool:
    """Whether objects of a class hold only items, slots and attributes. A class written in C may have further fields."""
    base = next(each for each in _BASES if issubclass(kind, each))
    # The offset is negative if the attributes follow items, or precede the object and take no space in it.
    attributes = kind.__dictoffset__ > 0 or (kind.__dictoffset__ < 0 and base.__itemsize__ > 0)
    room = len(_slots(kind)) - len(_slots(base)) + attributes + (kind.__weakrefoffset__ > base.__weakrefoffset__)
    return kind.__basicsize__ <= base.__basicsize__ + _POINTER * room


MAX_DEPTH = 16
"""Deeper nesting is not searched: it contains no activations."""


class TensorPath(NamedTuple):
    """A tensor and its path.

    Attributes:
        suffix: The suffix of ``input`` or ``output``: empty for a single tensor, else ``_0``, ``_1_mask`` …
        position: The index in the outermost tuple, which targets refer to.
    """

    suffix: str
    position: int
    tensor: Any


class TensorPaths:
    """Finds the tensors of one framework.

    Args:
        tensor: The class of a tensor, parameters included.
        without: Classes of the framework whose objects contain no tensors that were computed in a call.
    """

    def __init__(self, tensor: type, without: tuple[type, ...] = ()) -> None:
        self._tensor = tensor
        self._without = (*NO_TENSORS, *without)
        self._opaque_without = (*self._without, types.FunctionType)

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[TensorPath]:
        """The tensors in a call's arguments. Keyword arguments have their names as paths, and follow the positional ones.

        The items of a single argument are named as if each were an argument. Their position is 0, that of the argument.
        """
        if len(args) == 1 and not kwargs:
            return [leaf._replace(position=0) if leaf.position else leaf for leaf in self.outputs(args[0])]
        return _distinct(self._walk([*enumerate(args), *kwargs.items()]))

    def outputs(self, value: Any) -> list[TensorPath]:
        """The tensors in a result (or in a single argument). A single tensor has no suffix."""
        if isinstance(value, self._tensor):
            return [TensorPath("", 0, value)]
        if isinstance(value, (tuple, list)) and len(value) == 1 and isinstance(value[0], self._tensor):
            return [TensorPath("", 0, value[0])]
        return _distinct(self._walk(_parts_of(value)))

    def held(self, value: Any) -> list[Any]:
        """Every tensor in a result, including those that ``outputs`` does not find.

        Raises:
            HiddenError: The result may contain a tensor that cannot be found.
        """
        return tensors_in(value, self._tensor, self._without)

    def finds_all(self, value: Any, depth: int = 0) -> bool:
        """Whether ``outputs`` finds every tensor in a result, without examining objects. A compiler can trace this."""
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
        """The structure of a result in the form of targets: ``tensor`` or ``tuple[2]``."""
        return "tensor" if isinstance(value, self._tensor) else f"tuple[{self.length(value)}]"

    def length(self, value: Any) -> int:
        """Number of elements of a result: 1 for a tensor."""
        return 1 if isinstance(value, self._tensor) else len(list(_parts_of(value)))

    def _walk(self, parts: Iterable[tuple[Any, Any]]) -> Iterator[TensorPath]:
        for position, (key, child) in enumerate(parts):
            for suffix, tensor in self._below(child, f"_{key}", ()):
                yield TensorPath(suffix, position, tensor)

    def _below(self, value: Any, suffix: str, above: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
        if isinstance(value, self._tensor):
            yield suffix, value
        elif value is not None and len(above) < MAX_DEPTH and (parts := children(value)) is not None:
            for one in above:
                if one is value:
                    return
            for key, child in parts:
                yield from self._below(child, f"{suffix}_{key}", (*above, value))


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The structure of a call's arguments in the form of targets: ``tuple[2]``."""
    return f"tuple[{len(args) + len(kwargs)}]"


def children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The items of a container, by name or index; None for other values."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return None


def _parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    parts = children(value)
    return () if parts is None else parts  # compilers cannot say whether an iterator is true


def _distinct(leaves: Iterable[TensorPath]) -> list[TensorPath]:
    """Make suffixes unique: two paths may have the same text (``a_b``, and ``b`` within ``a``). The later one gets a ``~``."""
    found: list[TensorPath] = []
    taken: set[str] = set()
    for leaf in leaves:
        suffix = leaf.suffix
        while suffix in taken:
            suffix += "~"
        taken.add(suffix)
        found.append(leaf._replace(suffix=suffix))
    return found
