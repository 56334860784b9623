"""How many floating point operations a step of this rank's model takes: given, or counted once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, Literal

from monitor.failures import Failures

MEASURED: Final = "measure"
Given = float | Literal["measure"] | None

NOTHING_COUNTED: Final = "No floating point operations were counted in the first step: pass model_flops as a number."


class NoCounterError(Exception):
    """The floating point operations of this model cannot be counted. Says why, and what to do."""


Counter = Callable[[Any], AbstractContextManager[Callable[[], float]]]


class FlopCount:
    """Counts in the first step that is told of, if the number was not given.

    Attributes:
        per_step: None while it is not known.

    Args:
        given: The number; ``"measure"`` to count; None for neither.
        counter: Makes, for a model, what counts while it is entered.

    Raises:
        NoCounterError: ``counter`` raises it where it has nothing that counts.
    """

    def __init__(self, given: Given, counter: Counter, failures: Failures) -> None:
        self.per_step = None if isinstance(given, str) else given
        self._wanted = given == MEASURED
        self._counter = counter
        self._failures = failures
        self._entered = ExitStack()
        self._counted: Callable[[], float] | None = None
        self._so_far = 0.0

    def begin(self, model: Any) -> None:
        """What is to be counted begins: a step, or a part of the first one."""
        if not self._wanted or self._counted is not None:
            return
        try:
            self._counted = self._entered.enter_context(self._counter(model))
        except NoCounterError as error:
            self._wanted = False
            self._failures.warn("flops", str(error))

    def pause(self) -> None:
        """It has returned, or has raised. Any number of times."""
        counted, self._counted = self._counted, None
        self._entered.close()
        if counted is not None:
            self._so_far += counted()

    def give_up(self) -> None:
        """What was counted has raised: it is not that of a step, and the next step is counted."""
        self.pause()
        self._so_far = 0.0

    def end(self) -> None:
        """The step has done its work. Any number of times."""
        self.pause()
        if not self._wanted:
            return
        self._wanted = False
        self.per_step = self._so_far or None
        if self.per_step is None:
            self._failures.warn("flops", NOTHING_COUNTED)
