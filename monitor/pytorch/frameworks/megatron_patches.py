"""Calls inside Megatron that no hook of its own tells of: the beginning of a gradient reduction, and its optimizers' steps.

The optimizers of torch that Megatron wraps have hooks, but see gradients that were clipped, and nothing of a skipped step. The
patches live here, are in place only while somebody listens, and delegate everything.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any, Final, Protocol

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer


class CallListener(Protocol):
    """Whoever wants to know of the calls of a method. Must not raise."""

    def call_begins(self, method: str, of: Any) -> None:
        """``method`` is about to be called on the object ``of``."""

    def call_ended(self, method: str, of: Any, result: Any) -> None:
        """It has returned ``result``, or raised; then that is None."""


class MethodPatch:
    """The patch of one method of a class, in place while there are listeners, which it knows weakly."""

    def __init__(self, owner: type[Any], name: str) -> None:
        self.owner = owner
        self.name = name
        self._listeners: tuple[weakref.ref[CallListener], ...] = ()
        self._original: Any = None
        self._ours: Any = None

    @property
    def fits(self) -> bool:
        """Whether the class has such a method of its own."""
        return callable(vars(self.owner).get(self.name))

    def add(self, listener: CallListener) -> None:
        self._install()
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))

    def remove(self, listener: CallListener) -> None:
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def _forget(self, gone: weakref.ref[CallListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone)
        # Somebody may have patched it since. Then ours stays in the chain, and has nobody to tell.
        if not self._listeners and self._now() is self._ours:
            setattr(self.owner, self.name, self._original)

    def _install(self) -> None:
        if self._ours is not None and self._now() is self._ours:
            return
        original = self._original = self._now()

        @wraps(original)
        def method(of: Any, *args: Any, **kwargs: Any) -> Any:
            # One that was left below another patch, and then replaced by a new one above it, has nobody to tell either.
            listeners = self._living() if self._ours is method else ()
            for listener in listeners:
                listener.call_begins(self.name, of)
            result = None
            try:
                result = original(of, *args, **kwargs)
            finally:
                for listener in listeners:
                    listener.call_ended(self.name, of, result)
            return result

        self._ours = method
        setattr(self.owner, self.name, method)

    def _now(self) -> Any:
        return vars(self.owner)[self.name]

    def _living(self) -> tuple[CallListener, ...]:
        return tuple(listener for known in self._listeners if (listener := known()) is not None)


START_GRAD_SYNC: Final = MethodPatch(_ParamAndGradBucketGroup, "start_grad_sync")
STEPS: Final = tuple(
    MethodPatch(owner, name)
    for owner in (FP32Optimizer, MixedPrecisionOptimizer, ChainedOptimizer)
    for name in ("step", "prepare_grads")
)


def check_version() -> None:
    """Raises ``ValueError`` where what has to be patched is not there."""
    for patch in (START_GRAD_SYNC, *STEPS):
        if not patch.fits:
            raise ValueError(unknown_version(f"{patch.owner.__name__} has no {patch.name}"))


def unknown_version(what: str) -> str:
    """Says that the Megatron in use is another than the one that is known."""
    import megatron.core

    version = getattr(megatron.core, "__version__", "of no known version")
    return f"megatron-core {version} cannot be observed ({what}): use a version that is known to work, such as 0.16."
