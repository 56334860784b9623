"""Patches functions of a framework that have no hooks, to observe their calls.

A patch replaces a function where callers look it up, only while it has listeners. It delegates every call. It holds listeners
weakly, so that no class or module of a framework keeps a model alive. Removing it restores the original.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any


class CallListener:
    """Receives the calls of a patched function. Subclasses override the methods that they need, which must not raise."""

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The function is about to be called. For a method, the first of ``args`` is the object."""

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """The function has returned ``result``."""

    def call_raised(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The function has raised."""


class CallPatch:
    """The patch of one function.

    Args:
        owner: The class or module where callers look the function up.
        parameters: The expected names of its first parameters; empty to accept any.
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
        """Whether the function exists and has the expected first parameters."""
        function = vars(self.owner).get(self.name)
        if not callable(function) or not self._parameters:
            return callable(function)
        return tuple(inspect.signature(function).parameters)[: len(self._parameters)] == self._parameters

    def add(self, listener: CallListener) -> None:
        """Report every call to ``listener`` from now on."""
        # Install last: another listener may be collected at any moment, and remove the patch as the last listener.
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))
        self._wants_begin |= type(listener).call_begins is not CallListener.call_begins
        self._install()

    def remove(self, listener: CallListener) -> None:
        """Report no more calls to ``listener``. May be called repeatedly."""
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def _forget(self, gone: weakref.ref[CallListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone and known() is not None)
        # Another patch may have been installed since. Then this one stays in the chain, without listeners.
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
            if self._is_unseen():
                return original(*args, **kwargs)
            # A patch below another one that was replaced by a new patch above it reports nothing either.
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
                if (living := known()) is not None:
                    living.call_ended(self, args, kwargs, result)
            return result

        return self._opaque(patched, original)

    def _is_unseen(self) -> bool:
        """Whether the call that begins now is not reported. A compiler that traces it must be able to trace this method."""
        return False

    def _opaque(self, patched: Any, original: Any) -> Any:
        """``patched``, as opaque to a compiler as ``original`` is."""
        del original
        return patched

    def _now(self) -> Any:
        return vars(self.owner)[self.name]


def _living(listeners: Sequence[weakref.ref[CallListener]]) -> list[CallListener]:
    return [listener for known in listeners if (listener := known()) is not None]
