"""How many floating point operations a step of this rank's model takes: given, or counted once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Final, Literal

from monitor.failures import Failures

MEASURED: Final = "measure"
Given = float | Literal["measure"] | None

NO_COUNTER: Final = "This framework counts no floating point operations: pass model_flops as a number."


class FlopCount:
    """Counts in the first step that is told of, if the number was not given.

    Attributes:
        per_step: None while it is not known.

    Args:
        given: The number; ``"measure"`` to count; None for neither.
        counter: Makes what counts while it is entered; None where the framework has nothing that does.
    """

    def __init__(
        self, given: Given, counter: Callable[[], AbstractContextManager[Callable[[], float]] | None], failures: Failures
    ) -> None:
        self.per_step = None if isinstance(given, str) else given
        self._wanted = given == MEASURED
        self._counter = counter
        self._failures = failures
        self._entered = ExitStack()
        self._counted: Callable[[], float] | None = None

    def begin(self) -> None:
        """A step begins."""
        if not self._wanted:
            return
        self._wanted = False
        counter = self._counter()
        if counter is None:
            self._failures.warn("flops", NO_COUNTER)
        else:
            self._counted = self._entered.enter_context(counter)

    def end(self) -> None:
        """It has done its work, or has raised. Any number of times."""
        counted, self._counted = self._counted, None
        self._entered.close()
        if counted is not None:
            self.per_step = counted()
