"""When the outputs of a call are there: read then, and never by waiting for them.

A call that somebody waits for returns a handle of the runtime's, which MindSpore puts inside the ``CommHandle`` that its users
get. There stands one of ours around it: the ``CommHandle`` is MindSpore's own, and waits as it would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Handle:
    """A handle of the runtime's, which tells when somebody has waited for it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._told: list[Callable[[], object]] = []

    @property
    def has_listeners(self) -> bool:
        return bool(self._told)

    def tell(self, told: Callable[[], object]) -> None:
        """Have ``told`` called once, on the thread that has waited, before it goes on. What that raises, the wait raises."""
        self._told.append(told)

    def wait(self) -> None:
        self._handle.wait()
        told, self._told = self._told, []
        for one in told:
            one()

    def __repr__(self) -> str:
        return repr(self._handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
