"""The search for tensors in a result finds all of them, or says that it cannot."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from monitor.recording.tensor_paths import MOST_OBJECTS, NO_TENSORS, HiddenError, tensors_in


class Tensor:
    """Acts as one of a framework."""


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slots:
    __slots__ = ("empty", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Both(Slots):
    more: Any = None


class Items(list[Any]):
    more: Any = None


class Named(dict[str, Any]):
    more: Any = None


@dataclasses.dataclass
class Fields:
    x: Any


class Pair(NamedTuple):
    x: Any
    y: Any


class Raising:
    def __init__(self, x: Any) -> None:
        self._x = x

    def __getattr__(self, _name: str) -> Any:
        raise AssertionError("code of the object was run")

    @property
    def x(self) -> Any:
        raise AssertionError("code of the object was run")


def with_more(value: Any, x: Any) -> Any:
    value.more = x
    return value


def cyclic(x: Any) -> Any:
    value: list[Any] = [x]
    value.append(value)
    return value


def closure(x: Any) -> Callable[[], Any]:
    return lambda: x


A, B = Tensor(), Tensor()

LOOKED_INTO: dict[str, tuple[Any, list[Tensor]]] = {
    "alone": (A, [A]),
    "tuple": ((A, 3, [None, B, A]), [A, B]),
    "set": ({A, B}, [A, B]),
    "deque": (collections.deque([A]), [A]),
    "object": (Plain(x=Plain(x=A), y=B), [A, B]),
    "slots": (Slots(A), [A]),
    "slots and attributes": (with_more(Both(A), B), [A, B]),
    "list with attributes": (with_more(Items([A]), B), [A, B]),
    "dict with attributes": (with_more(Named(x=A), {B}), [A, B]),
    "dataclass with attributes": (with_more(Fields(A), B), [A, B]),
    "named tuple": (Pair(A, B), [A, B]),
    "user dict": (collections.UserDict(x=A), [A]),
    "default dict": (collections.defaultdict(list, x=[A]), [A]),
    "namespace": (types.SimpleNamespace(x=A), [A]),
    "behind a property": (Raising(A), [A]),
    "cycle": (cyclic(A), [A]),
    "closure": (closure(A), [A]),
    "partial": (functools.partial(closure(A), B), [A, B]),
    "bound method": (Plain(x=Raising(A).__init__), [A]),  # type: ignore[misc]
    "deep": (functools.reduce(lambda value, _: [value], range(200), A), [A]),
    "none": ({"a": 1, "b": [None, "c", 2.0, int, logging.INFO, threading.Lock()]}, []),
}


@pytest.mark.parametrize(("result", "expected"), LOOKED_INTO.values(), ids=LOOKED_INTO)
def test_every_tensor_is_found_once(result: Any, expected: list[Tensor]) -> None:
    found = tensors_in(result, Tensor, NO_TENSORS)
    assert sorted(map(id, found)) == sorted(map(id, expected))


HIDING: dict[str, Any] = {
    "generator": (x for x in (A,)),
    "iterator": iter([A]),
    "weak reference": weakref.ref(A),
    "exception": ValueError(A),
    "mapping proxy": types.MappingProxyType({"x": A}),
    "more than can be looked at": [[n] for n in range(MOST_OBJECTS)],
}


@pytest.mark.parametrize("hiding", HIDING.values(), ids=HIDING)
def test_what_cannot_be_looked_into_is_said(hiding: Any) -> None:
    with pytest.raises(HiddenError):
        tensors_in((A, Plain(x=hiding)), Tensor, NO_TENSORS)
