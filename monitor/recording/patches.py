"""Calls inside a framework that no hook tells of.

A patch stands in the place where callers look the function up, and only while somebody listens. It delegates everything, knows
its listeners weakly, so that no class or module of a framework keeps a model alive, and is taken away exactly.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any


class CallListener:
    """Whoever wants to know of calls; overrides what it wants to know. Must not raise."""

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The function is about to be called; of a method, the object is the first of ``args``."""

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """It has returned ``result``."""

    def call_raised(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """It has raised."""


class CallPatch:
    """The patch of one function.

    Args:
        owner: The class or module where callers look it up.
        parameters: The first that it takes, by which it is known; none where what it takes does not matter.
    """

    def __init__(self, owner: Any, name: str, parameters: Sequence[str] = ()) -> None:
        self.owner = owner
        self.name = name
        self._parameters = tuple(parameters)
        self._listeners: tuple[weakref.ref[CallListener], ...] = ()
        self._wants_begin = False
        self._original: Any = None
        self._ours: Any = None

    @property
    def fits(self) -> bool:
        """Whether the function is there, and takes what is expected."""
        function = vars(self.owner).get(self.name)
        if not callable(function) or not self._parameters:
            return callable(function)
        return tuple(inspect.signature(function).parameters)[: len(self._parameters)] == self._parameters

    def add(self, listener: CallListener) -> None:
        """Tell ``listener`` of every call from now on."""
        # In this order: one that is collected meanwhile, at whatever moment, may take the patch away as the last one did.
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))
        self._wants_begin |= type(listener).call_begins is not CallListener.call_begins
        self._install()

    def remove(self, listener: CallListener) -> None:
        """Tell it nothing more. Any number of times."""
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def _forget(self, gone: weakref.ref[CallListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone and known() is not None)
        # Somebody may have patched it since. Then ours stays in the chain, and has nobody to tell.
        if not self._listeners and self._ours is not None and self._now() is self._ours:
            setattr(self.owner, self.name, self._original)

    def _install(self) -> None:
        original = self._now()
        if original is not self._ours:
            self._original, self._ours = original, self._patched(original)
            setattr(self.owner, self.name, self._ours)

    def _patched(self, original: Any) -> Any:
        @wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            # One that was left below another patch, and then replaced by a new one above it, has nobody to tell either.
            listeners = self._listeners if self._ours is patched else ()
            if self._wants_begin:
                for listener in _living(listeners):
                    listener.call_begins(self, args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                for listener in _living(listeners):
                    listener.call_raised(self, args, kwargs)
                raise
            for known in listeners:
                if (told := known()) is not None:
                    told.call_ended(self, args, kwargs, result)
            return result

        return self._opaque(patched, original)

    def _opaque(self, patched: Any, original: Any) -> Any:
        """``patched``, as opaque to a compiler as ``original`` is."""
        del original
        return patched

    def _now(self) -> Any:
        return vars(self.owner)[self.name]


def _living(listeners: Sequence[weakref.ref[CallListener]]) -> list[CallListener]:
    return [listener for known in listeners if (listener := known()) is not None]
