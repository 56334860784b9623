"""Observes the steps of optimizers, which receive the gradients.

Hooks on the optimizers' cells run once a step. In compiled code operators replace them. A step that loss scaling skips makes no
call; the count of forwards shows it. The class of an optimizer is not changed, since its ``construct`` may be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

from mindspore import Parameter, Tensor, nn

from monitor.failures import Failures
from monitor.mindspore.compiled.outside import StepsFromOutside
from monitor.mindspore.compiled.program import Program
from monitor.mindspore.compiled.replay import flush
from monitor.mindspore.hooks import after_forward, before_forward
from monitor.mindspore.tape import compiled_code_is_excluded
from monitor.recording.backend import HookSet, StepListener
from monitor.recording.startup_estimate import records_run_numbers
from monitor.series import kinds_asked_for

NOT_IN_COMPILED_CODE: Final = (
    "update_ratio", "optimizer_health", "ur_distribution", "mg_direction", "recording_l2_features", "stack_info"
)  # fmt: skip
"""The fields of the configuration whose rows need more than the measurements of compiled code."""

NOT_OF_COMPILED_CELLS: Final = ("recording_l2_features", "stack_info")

MISSING: Final = (
    "Cells or steps are compiled, and compiled code measures single tensors only: it has no rows or values of {fields}. Remove "
    "@jit, or use PYNATIVE_MODE, to record them."
)


class GradientReceiver(Protocol):
    """Receives the gradients that an optimizer is given.

    Attributes:
        measured: What compiled code has measured of weights and moments, by the id of the parameter; None for other steps.
        is_outside: Whether compiled code makes the step in progress, and weights and moments are read outside of it.
    """

    measured: Mapping[int, Any] | None
    is_outside: bool

    def begin_step(self, gradients: Sequence[Tensor | None]) -> None:
        """The optimizer was called with these gradients.

        Args:
            gradients: In the order of ``optimizer.parameters``; None for a gradient that is no tensor.
        """

    def call_ended(self) -> None:
        """The optimizer was called: from now on, its moments are those of a step."""

    def end_step(self) -> None:
        """The step has ended: drop the gradients."""

    def tensors(self) -> Sequence[Parameter]:
        """The weights that the optimizer steps, and their moments."""

    def place(self, parameter: Parameter) -> int | None:
        """The index of a parameter in the optimizer; None if it is not stepped."""


class MindSporeOptimizerSteps:
    """Reports the steps of optimizers to a listener.

    Attributes:
        optimizers: The cells that users call: the outermost of nested optimizers.
    """

    @property
    def evaluating(self) -> bool:
        """Whether compiled code has made forwards inside the step of an optimizer that is read from outside."""
        return self._outside is not None and self._outside.is_replaying

    def __init__(
        self,
        optimizers: Sequence[tuple[nn.Cell, GradientReceiver]],
        listener: StepListener,
        failures: Failures,
        program: Program | None = None,
    ) -> None:
        self._program = program
        self.optimizers = tuple(optimizer for optimizer, _ in optimizers)
        self._listener = listener
        self._guarded, self._failures = failures.guarded, failures
        self._hooks = HookSet()
        for optimizer, given in optimizers:
            before, after = partial(self._before, given), partial(self._after, given)
            self._hooks.add(before_forward(optimizer, self._guarded("reading before the step", before)))
            self._hooks.add(after_forward(optimizer, self._guarded("ending the step", after)))
        self._has_warned = False
        self._outside: StepsFromOutside | None = None
        if program is not None:
            self._observe(program, optimizers)
        if not compiled_code_is_excluded():
            self._outside = StepsFromOutside(optimizers, listener, failures, program)

    def remove(self) -> None:
        flush(self._program)
        listener: Any = self._listener
        if self._program is not None and self._program.note == listener.sealer.note:
            self._program.note = None
        if self._outside is not None:
            self._outside.remove()
        self._hooks.remove()

    def _observe(self, program: Program, optimizers: Sequence[tuple[nn.Cell, GradientReceiver]]) -> None:
        """Follow the steps of optimizers in compiled code."""
        listener: Any = self._listener
        program.note = listener.sealer.note
        kinds = partial(_kinds_of, self._listener)
        for optimizer, given in optimizers if program.by_operations is None else ():
            stepped = self._guarded("ending a compiled step", partial(self._stepped, given, optimizer))
            self._hooks.add(program.optimizer(optimizer, given.tensors(), kinds, stepped))

    def _stepped(
        self,
        given: GradientReceiver,
        optimizer: nn.Cell,
        gradients: Sequence[Any],
        before: Mapping[int, Any],
        after: Mapping[int, Any],
    ) -> None:
        """An optimizer has stepped in compiled code, which has measured its gradients, weights and moments."""
        self._warn_of_missing(NOT_IN_COMPILED_CODE, of_steps=True)
        given.measured = before
        given.begin_step(gradients)
        self._guarded("reading before the step", self._listener.before_step)(optimizer)
        self._guarded("reading gradients", self._listener.gradients_ready)(optimizer)
        given.measured = after
        given.call_ended()
        try:
            with _postponed(self._listener):
                self._listener.after_step(optimizer)
        finally:
            given.end_step()

    def _warn_of_missing(self, fields: Sequence[str], *, of_steps: bool = False) -> None:
        """Warn once of what is configured and cannot be recorded in compiled code.

        Args:
            of_steps: Whether steps of optimizers are compiled, with their learning rates.
        """
        listener: Any = self._listener
        config = listener.watch.config
        missing = [field for field in fields if getattr(config, field)]
        if of_steps and records_run_numbers(config):
            missing.append("learning_rate")
        if missing and not self._has_warned and listener.modules.recorder.active:
            self._has_warned = True
            said = MISSING.format(fields=", ".join(missing))
            # The check for missing kinds says nothing of kinds that a cause names.
            self._failures.nothing_of(f"{kinds_asked_for(missing)} in compiled code", said)
            listener.sealer.note("compiled_code", said)

    def _before(self, given: GradientReceiver, optimizer: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flush(self._program)
        if self._program is not None:
            self._look_at(self._program, given)
        if self._outside is not None:
            self._outside.stepped_in_python()
        passed = (*args, *kwargs.values())
        given.begin_step(_tensors(passed[0] if passed else ()))
        self._guarded("reading before the step", self._listener.before_step)(optimizer)
        self._guarded("reading gradients", self._listener.gradients_ready)(optimizer)

    def _look_at(self, program: Program, given: GradientReceiver) -> None:
        """Python has called an optimizer: warn of what compiled code does not show of the step."""
        if program.is_compiled:
            self._warn_of_missing(NOT_OF_COMPILED_CELLS)
            program.warn_of_unreached(given.tensors())
        if program.clock is not None:
            program.absences.stepped_in_python(max(program.clock.forward) + 1)

    def _after(self, given: GradientReceiver, optimizer: nn.Cell, _args: Any, _kwargs: Any, _result: Any) -> None:
        given.call_ended()
        try:
            self._listener.after_step(optimizer)
        finally:
            given.end_step()


@contextmanager
def _postponed(listener: Any) -> Iterator[None]:
    """What is called at the end of a step runs on the thread that trains (``TrainerMon``), which this may not be."""
    when_ended, listener.when_ended = listener.when_ended, None
    try:
        yield
    finally:
        listener.when_ended = when_ended


def _kinds_of(listener: Any) -> frozenset[str]:
    return frozenset(listener.read)


def _tensors(gradients: Any) -> tuple[Tensor | None, ...]:
    """The gradients as a tuple. A single tensor counts as a tuple of one."""
    every = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
    return tuple(one if isinstance(one, Tensor) else None for one in every)
