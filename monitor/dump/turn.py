"""Who sees the calls of APIs: one debugger at a time, since each would stand in the way of the other and be seen by it."""

from __future__ import annotations

import os
import weakref
from typing import Final


class Turn:
    """Is had by one object of a process, as long as it lives."""

    def __init__(self) -> None:
        self._holder: weakref.ref[object] | None = None
        self._pid = 0

    def refuse_another(self, holder: object) -> None:
        """Raises ``RuntimeError`` if somebody else has it."""
        now = self._holder() if self._holder is not None and self._pid == os.getpid() else None
        if now is not None and now is not holder:
            said = "another PrecisionDebugger records the calls of APIs (level L1 or mix)"
            raise RuntimeError(f"{said}: call its stop() before this start().")

    def take(self, holder: object) -> None:
        self._holder, self._pid = weakref.ref(holder), os.getpid()

    def give_back(self, holder: object) -> None:
        if self._holder is not None and self._holder() is holder:
            self._holder = None


TURN: Final = Turn()
"""A framework's functions are there once in a process."""
