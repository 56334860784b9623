"""Methods that may be called on an object or on its class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class HasLatest(Protocol):
    """A class that knows the object of it that was made last."""

    def latest(self, asked_for: str) -> Any:
        """That object. Raises ``RuntimeError`` where there is none, with the name of the method that needs one."""


class OnClassToo(Generic[P, R]):
    """A method that on the class means the object that was made last.

    >>> PrecisionDebugger("config.json")                # doctest: +SKIP
    >>> PrecisionDebugger.start(model)                  # doctest: +SKIP
    """

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, one: Any, kind: HasLatest) -> Callable[P, R]:
        if one is not None:
            return MethodType(self._method, one)

        @functools.wraps(self._method)
        def on_latest(*args: P.args, **kwargs: P.kwargs) -> R:
            return self._method(kind.latest(self._method.__name__), *args, **kwargs)

        return on_latest
