"""Seeing a step that a GradScaler skips.

When it found Inf, ``GradScaler.step`` does not call the optimizer at all, and no hook of any kind runs: a patch is the only
way to learn of it. It lives here, is in place only while somebody listens, and delegates everything.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final, Protocol

from torch.amp.grad_scaler import GradScaler


class ScalerListener(Protocol):
    """Whoever wants to know of ``scaler.step(optimizer)``. Must not raise."""

    def scaler_begins(self, scaler: GradScaler, optimizer: Any) -> None: ...

    def scaler_ended(self, scaler: GradScaler, optimizer: Any) -> None: ...


class _ScalerPatch:
    """The patch of ``GradScaler.step``, in place while there are listeners."""

    def __init__(self) -> None:
        self._listeners: list[ScalerListener] = []
        self._original: Any = None
        self._ours: Any = None

    def add(self, listener: ScalerListener) -> None:
        if not self._listeners:
            self._install()
        self._listeners.append(listener)

    def remove(self, listener: ScalerListener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
            # Somebody may have patched it since. Then ours stays in the chain, and has nobody to tell.
            if not self._listeners and GradScaler.step is self._ours:
                GradScaler.step = self._original  # type: ignore[method-assign]

    def _install(self) -> None:
        if GradScaler.step is self._ours:
            return
        original = self._original = GradScaler.step

        @wraps(original)
        def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            for listener in tuple(self._listeners):
                listener.scaler_begins(scaler, optimizer)
            result = original(scaler, optimizer, *args, **kwargs)
            for listener in tuple(self._listeners):
                listener.scaler_ended(scaler, optimizer)
            return result

        self._ours = step
        GradScaler.step = step  # type: ignore[method-assign, assignment]


SCALER_PATCH: Final = _ScalerPatch()
