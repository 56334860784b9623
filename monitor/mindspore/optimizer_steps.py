"""When the optimizer steps: the hooks of its cell, which is called once for each step and handed the gradients.

A step that loss scaling skips is a call that is not made, and one that was compiled as a whole calls no hook: of these there is
no word here, and whoever counts forwards knows. The class of an optimizer is left as it is: its ``construct`` may be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mindspore import Tensor, nn

from monitor.capture.backend import StepListener
from monitor.capture.hooks import HookSet
from monitor.failures import Failures
from monitor.mindspore.hooks import after_forward, before_forward


class Given(Protocol):
    """Takes what an optimizer is given."""

    def begin_step(self, gradients: Sequence[Tensor | None]) -> None:
        """The optimizer was called with these.

        Args:
            gradients: In the order of ``optimizer.parameters``; None in the place of what is no tensor.
        """

    def end_step(self) -> None:
        """Let go of them."""


class OptimizerSteps:
    """Tells a listener of the steps of one optimizer.

    Attributes:
        optimizer: The cell that users call: the outermost, where one is inside another.
    """

    def __init__(self, optimizer: nn.Cell, given: Given, listener: StepListener, failures: Failures) -> None:
        self.optimizer = optimizer
        self._given = given
        self._listener = listener
        self._guarded = failures.guarded
        self._hooks = HookSet()
        self._hooks.add(before_forward(optimizer, self._guarded("reading before the step", self._before)))
        self._hooks.add(after_forward(optimizer, self._guarded("ending the step", self._after)))

    def remove(self) -> None:
        self._hooks.remove()

    def _before(self, optimizer: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        self._given.begin_step(_tensors(given[0] if given else ()))
        self._guarded("reading before the step", self._listener.before_step)(optimizer)
        self._guarded("reading gradients", self._listener.gradients_ready)()

    def _after(self, _optimizer: nn.Cell, _args: Any, _kwargs: Any, _result: Any) -> None:
        try:
            self._listener.after_step()
        finally:
            self._given.end_step()


def _tensors(gradients: Any) -> tuple[Tensor | None, ...]:
    """One tensor may stand for a tuple of one."""
    every = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
    return tuple(one if isinstance(one, Tensor) else None for one in every)
