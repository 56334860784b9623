"""Records weight gradients, before and after the data-parallel ranks aggregate them.

MindSpore keeps no gradient with a parameter. A backward returns each parameter's gradient to its caller: there it is read
unreduced. The loop sums the gradients of micro-batches, reduces them, and passes them to the optimizer: there they are read
reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from monitor.mindspore.hooks import on_gradient
from monitor.mindspore.reductions import MindSporeReductions
from monitor.recording.attachment_spec import NamedParameter, ParameterSubset
from monitor.recording.backend import Removable
from monitor.recording.parameters import GradientRows
from monitor.recording.phases import OptimizerTurn

NOT_SUMMED: Final = (
    "each backward returns its own gradient, and MindSpore keeps no sum of them: with monitor_mbs_grad there is a row "
    "of each micro-batch; without it, steps with several micro-batches have no row"
)


class MindSporeGradients:
    """Takes gradients of MindSpore (``GradientSource``)."""

    def __init__(self, rows: GradientRows) -> None:
        attached = rows.attached
        self._rows, self._framework = rows, attached.framework
        self._recorder, self._clock, self._note = attached.recorder, attached.clock, attached.note
        self.hooked: Sequence[NamedParameter] = rows.unreduced.parameters
        self.reductions = MindSporeReductions(attached.watch.ownership, attached.failures)

    def begin_step(self) -> None:
        """Nothing to do: no data of a step is kept."""

    def before_reading(self, turn: OptimizerTurn) -> None:
        self.reductions.begin_reading(self._framework.handed, self._waiting(turn.held))

    def after_reading(self, turn: OptimizerTurn, not_reduced: str) -> None:
        """Add the notes. Of ``turn.scaling`` there is none: the gradients are unscaled before the hooks see them."""
        del turn
        if not_reduced:
            self._note("grad_reduced", not_reduced)
        if not self._rows.each_micro_step and self._clock.micro_steps > 1:
            self._rows.note_local(NOT_SUMMED)

    def remove(self) -> None:
        """Nothing to do: all hooks are those of ``register``."""

    def _waiting(self, held: ParameterSubset) -> list[tuple[int, ...]]:
        """The shapes of gradients of optimizers that have not stepped yet."""
        if held is None:
            return []
        later = (one for one in self._rows.reduced.parameters if one not in held and one not in self._rows.stepped)
        return [tuple(one.tensor.shape) for one in later if one.tensor.requires_grad]

    def can_be_hooked(self, parameter: NamedParameter) -> bool:
        return bool(parameter.tensor.requires_grad)

    def register(self, parameter: NamedParameter, read: Callable[[Any], None]) -> Removable:
        return on_gradient(parameter.tensor, read)

    def found(self, parameter: NamedParameter, argument: Any) -> None:
        """Record a gradient that a backward returns."""
        if not self._recorder.active:
            return
        self.reductions.arrived()
        if parameter in self._rows.stepped:  # the gradient is of the next step, whose reductions are observed
            return
        if self._clock.micro_steps == 1 or self._rows.each_micro_step:
            self._rows.unreduced.record(parameter, argument, self._rows.micro_step(parameter))
