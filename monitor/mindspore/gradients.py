"""Weight gradients, before and after the data-parallel ranks aggregate them.

MindSpore keeps no gradient with a parameter. A backward hands each parameter's gradient to whoever called it, which is where it
is read unreduced; the loop adds the micro-batches' up, has them reduced, and hands them to the optimizer, which is where they
are read reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from monitor.coordinator.ownership import Ownership
from monitor.failures import Failures
from monitor.mindspore import tensors
from monitor.mindspore.frameworks import Framework
from monitor.mindspore.hooks import on_gradient
from monitor.mindspore.recorder import Recorder
from monitor.mindspore.reductions import Reductions
from monitor.recording import gradients
from monitor.recording.parameter_series import NamedParameter, ParameterSubset, SeriesOf
from monitor.recording.protocols import Removable
from monitor.recording.step_clock import Clock

NOT_SUMMED: Final = (
    "each backward hands out a gradient of its own, and MindSpore keeps no sum of them: with monitor_mbs_grad there is a row "
    "of each micro-batch, and without it none where a step has several"
)


class GradientCollector(gradients.GradientCollector):
    """``grad_unreduced`` and ``grad_reduced``."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        recorder: Recorder,
        clock: Clock,
        failures: Failures,
        series_of: SeriesOf,
        framework: Framework,
        ownership: Ownership,
        note: Callable[[str, str], None],
        *,
        each_micro_step: bool,
    ) -> None:
        self._framework: Framework = framework
        super().__init__(
            parameters,
            recorder,
            clock,
            failures,
            series_of,
            framework,
            ownership,
            note,
            tensors,
            each_micro_step=each_micro_step,
        )
        self._reductions = Reductions(ownership, failures)
        self.hook_thawed()

    def begin_step(self) -> None:
        super().begin_step()
        if len(self._reduced):
            self._reductions.begin_step()

    def remove(self) -> None:
        super().remove()
        self._reductions.remove()

    def forward_begins(self, root: Any) -> None:
        """What reduces is called after the backward."""

    def forward_ends(self) -> None:
        """As it begins."""

    def may_be_unscaled(self) -> None:
        """Loss scales are divided out by whoever calls the optimizer, before this is told of anything."""

    def are_still_scaled(self) -> None:
        """No optimizer of MindSpore scales by itself without the hooks around it seeing the gradients it is given."""

    def before_step(self, held: ParameterSubset) -> None:
        """Read what the optimizer is given."""
        self._reductions.begin_reading(self._framework.handed, self._waiting(held))
        self._read_reduced(held)
        if self._not_reduced:
            self._note("grad_reduced", self._not_reduced)
        if not self._each_micro_step and self._clock.micro_steps > 1:
            self.note_local_gradients(NOT_SUMMED)

    def end_turn(self, held: ParameterSubset) -> None:
        super().end_turn(held)
        self._reductions.end_turn()

    def _waiting(self, held: ParameterSubset) -> list[tuple[int, ...]]:
        """The shapes of the gradients that optimizers are still to be handed which step later."""
        if held is None:
            return []
        later = (one for one in self._reduced.parameters if one not in held and one not in self._stepped)
        return [tuple(one.tensor.shape) for one in later if one.tensor.requires_grad]

    def is_reduced(self, parameter: NamedParameter, gradient: Any) -> bool:
        del parameter
        return self._reductions.is_reduced(gradient)

    def _register(self, parameter: NamedParameter, read: Callable[[Any], None]) -> Removable:
        return on_gradient(parameter.tensor, read)

    def _found(self, parameter: NamedParameter, told: Any) -> None:
        """A backward hands out what it has found for a parameter."""
        if self._recorder.active:
            self._reductions.arrived()
        of_no_step = parameter in self._stepped  # but of the next one, whose reductions are followed
        if not self._recorder.active or of_no_step or (self._clock.micro_steps > 1 and not self._each_micro_step):
            return
        self._unreduced.record(parameter, told, self._micro_step(parameter))
