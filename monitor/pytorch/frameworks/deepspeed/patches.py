"""Seeing what an engine of DeepSpeed is about to do, and that it has done it.

Neither the engine nor its optimizers have hooks. They are no torch optimizers: they may step the one inside several times or
not at all, and have unscaled and clipped by then. So two methods of the engine's class are patched. The patches are in place
only while somebody listens, and delegate everything.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any, Final, Protocol

from monitor.pytorch.frameworks.deepspeed.engine import engine_class


class EngineListener(Protocol):
    """Whoever wants to know of calls of a method of an engine. Must not raise."""

    def engine_begins(self, engine: Any) -> None: ...

    def engine_ended(self, engine: Any) -> None:
        """Unless the method raised."""


class EnginePatch:
    """The patch of one method, in place while there are listeners.

    It knows them weakly: a model that is let go of while it is monitored is not kept alive by a class of DeepSpeed.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._listeners: tuple[weakref.ref[EngineListener], ...] = ()
        self._original: Any = None
        self._ours: Any = None

    def fits(self) -> bool:
        """Whether engines have this method. What it takes does not matter: it is handed on."""
        return self._method in vars(engine_class())

    def add(self, listener: EngineListener) -> None:
        self._install()
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))

    def remove(self, listener: EngineListener) -> None:
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def _forget(self, gone: weakref.ref[EngineListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone)
        # Somebody may have patched it since. Then ours stays in the chain, and has nobody to tell.
        if not self._listeners and vars(engine_class()).get(self._method) is self._ours:
            setattr(engine_class(), self._method, self._original)

    def _install(self) -> None:
        of = engine_class()
        if self._ours is not None and vars(of).get(self._method) is self._ours:
            return
        original = self._original = getattr(of, self._method)

        @wraps(original)
        def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
            # One that was left below another patch, and then replaced by a new one above it, has nobody to tell either.
            listeners = self._living() if self._ours is method else ()
            for listener in listeners:
                listener.engine_begins(engine)
            result = original(engine, *args, **kwargs)
            for listener in listeners:
                listener.engine_ended(engine)
            return result

        self._ours = method
        setattr(of, self._method, method)

    def _living(self) -> tuple[EngineListener, ...]:
        return tuple(listener for known in self._listeners if (listener := known()) is not None)


STEP_PATCH: Final = EnginePatch("_take_model_step")
"""Called once where a step ends, after aggregation and before unscaling and clipping, whatever the stage."""

REDUCE_PATCH: Final = EnginePatch("allreduce_gradients")
"""Called after every backward, before anything is aggregated."""
