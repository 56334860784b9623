"""Records weight gradients, before and after the data-parallel ranks aggregate them.

MindSpore keeps no gradient with a parameter. A backward returns each parameter's gradient to its caller: there it is read
unreduced. The loop sums the gradients of micro-batches, reduces them, and passes them to the optimizer: there they are read
reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from monitor.coordinator.ownership import Ownership
from monitor.failures import Failures
from monitor.mindspore import tensors
from monitor.mindspore.frameworks import MindSporeFramework
from monitor.mindspore.hooks import on_gradient
from monitor.mindspore.recorder import Recorder
from monitor.mindspore.reductions import MindSporeReductions
from monitor.recording import gradients
from monitor.recording.backend import Removable
from monitor.recording.parameter_series import NamedParameter, ParameterSubset, SeriesOf
from monitor.recording.step_clock import Clock

NOT_SUMMED: Final = (
    "each backward returns its own gradient, and MindSpore keeps no sum of them: with monitor_mbs_grad there is a row "
    "of each micro-batch; without it, steps with several micro-batches have no row"
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
        framework: MindSporeFramework,
        ownership: Ownership,
        note: Callable[[str, str], None],
        *,
        each_micro_step: bool,
    ) -> None:
        self._framework: MindSporeFramework = framework
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
        self._reductions = MindSporeReductions(ownership, failures)
        self.hook_thawed()

    def begin_step(self) -> None:
        super().begin_step()
        if len(self._reduced):
            self._reductions.begin_step()

    def remove(self) -> None:
        super().remove()
        self._reductions.remove()

    def forward_begins(self, root: Any) -> None:
        """Nothing to do: MindSpore reduces after the backward."""

    def forward_ends(self) -> None:
        """Nothing to do, as in ``forward_begins``."""

    def may_be_unscaled(self) -> None:
        """Nothing to do: the loop removes a loss scale before it calls the optimizer, so gradients arrive unscaled."""

    def are_still_scaled(self) -> None:
        """Nothing to do: no MindSpore optimizer unscales gradients before the hooks see them."""

    def before_step(self, held: ParameterSubset) -> None:
        """Read the gradients that the optimizer is given."""
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
        """The shapes of gradients of optimizers that have not stepped yet."""
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
        """Record a gradient that a backward returns."""
        if self._recorder.active:
            self._reductions.arrived()
        of_no_step = parameter in self._stepped  # it belongs to the next step, whose reductions are observed
        if not self._recorder.active or of_no_step or (self._clock.micro_steps > 1 and not self._each_micro_step):
            return
        self._unreduced.record(parameter, told, self._micro_step(parameter))
