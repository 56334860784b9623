"""Seeing a step that a GradScaler skips.

When it found Inf, ``GradScaler.step`` does not call the optimizer at all, and no hook of any kind runs: a patch is the only
way to learn of it. It lives here, is in place only while somebody listens, and delegates everything.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any, Final, Protocol

from torch.amp.grad_scaler import GradScaler


class ScalerListener(Protocol):
    """Whoever wants to know of ``scaler.step(optimizer)``. Must not raise."""

    def scaler_begins(self, scaler: GradScaler, optimizer: Any) -> None: ...

    def scaler_ended(self, scaler: GradScaler, optimizer: Any) -> None: ...


class _ScalerPatch:
    """The patch of ``GradScaler.step``, in place while there are listeners.

    It knows them weakly: a model that is let go of while it is monitored is not kept alive by a class of torch.
    """

    def __init__(self) -> None:
        self._listeners: tuple[weakref.ref[ScalerListener], ...] = ()
        self._original: Any = None
        self._ours: Any = None

    def add(self, listener: ScalerListener) -> None:
        self._install()
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))

    def remove(self, listener: ScalerListener) -> None:
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def _forget(self, gone: weakref.ref[ScalerListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone)
        # Somebody may have patched it since. Then ours stays in the chain, and has nobody to tell.
        if not self._listeners and GradScaler.step is self._ours:
            GradScaler.step = self._original  # type: ignore[method-assign]

    def _install(self) -> None:
        if GradScaler.step is self._ours:
            return
        original = self._original = GradScaler.step

        @wraps(original)
        def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # One that was left below another patch, and then replaced by a new one above it, has nobody to tell either.
            listeners = self._living() if self._ours is step else ()
            for listener in listeners:
                listener.scaler_begins(scaler, optimizer)
            result = original(scaler, optimizer, *args, **kwargs)
            for listener in listeners:
                listener.scaler_ended(scaler, optimizer)
            return result

        self._ours = step
        GradScaler.step = step  # type: ignore[method-assign, assignment]

    def _living(self) -> tuple[ScalerListener, ...]:
        return tuple(listener for known in self._listeners if (listener := known()) is not None)


SCALER_PATCH: Final = _ScalerPatch()
