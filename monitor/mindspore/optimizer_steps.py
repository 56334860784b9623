"""Observes optimizer steps through hooks on the optimizers' cells, which run once a step and receive the gradients.

A step skipped by loss scaling makes no call, and a step compiled as a whole calls no hook. Neither is reported here; the count
of forwards shows them. The class of an optimizer is not changed, since its ``construct`` may be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from mindspore import Tensor, nn

from monitor.failures import Failures
from monitor.mindspore.hooks import after_forward, before_forward
from monitor.recording.backend import HookSet, StepListener


class GradientReceiver(Protocol):
    """Receives the gradients that an optimizer is given."""

    def begin_step(self, gradients: Sequence[Tensor | None]) -> None:
        """The optimizer was called with these gradients.

        Args:
            gradients: In the order of ``optimizer.parameters``; None for a gradient that is no tensor.
        """

    def end_step(self) -> None:
        """The step has ended: drop the gradients."""


class MindSporeOptimizerSteps:
    """Reports the steps of optimizers to a listener.

    Attributes:
        optimizers: The cells that users call: the outermost of nested optimizers.
    """

    evaluating = False

    def __init__(
        self, optimizers: Sequence[tuple[nn.Cell, GradientReceiver]], listener: StepListener, failures: Failures
    ) -> None:
        self.optimizers = tuple(optimizer for optimizer, _ in optimizers)
        self._listener = listener
        self._guarded = failures.guarded
        self._hooks = HookSet()
        for optimizer, given in optimizers:
            before, after = partial(self._before, given), partial(self._after, given)
            self._hooks.add(before_forward(optimizer, self._guarded("reading before the step", before)))
            self._hooks.add(after_forward(optimizer, self._guarded("ending the step", after)))

    def remove(self) -> None:
        self._hooks.remove()

    def _before(self, given: GradientReceiver, optimizer: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passed = (*args, *kwargs.values())
        given.begin_step(_tensors(passed[0] if passed else ()))
        self._guarded("reading before the step", self._listener.before_step)(optimizer)
        self._guarded("reading gradients", self._listener.gradients_ready)(optimizer)

    def _after(self, given: GradientReceiver, optimizer: nn.Cell, _args: Any, _kwargs: Any, _result: Any) -> None:
        try:
            self._listener.after_step(optimizer)
        finally:
            given.end_step()


def _tensors(gradients: Any) -> tuple[Tensor | None, ...]:
    """The gradients as a tuple. A single tensor counts as a tuple of one."""
    every = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
    return tuple(one if isinstance(one, Tensor) else None for one in every)
