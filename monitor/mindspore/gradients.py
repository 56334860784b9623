"""Weight gradients, before and after the data-parallel ranks aggregate them.

MindSpore keeps no gradient with a parameter. A backward hands each parameter's gradient to whoever called it, which is where it
is read unreduced; the loop adds the micro-batches' up, has them reduced, and hands them to the optimizer, which is where they
are read reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from monitor.capture.clock import Clock
from monitor.capture.hooks import HookSet, Removable
from monitor.capture.parameter_series import NamedParameter, ParameterSeries, SeriesOf
from monitor.failures import Failures
from monitor.mindspore import tensors
from monitor.mindspore.frameworks.framework import Framework
from monitor.mindspore.hooks import on_gradient
from monitor.mindspore.recorder import Recorder

NOT_SUMMED: Final = (
    "each backward hands out a gradient of its own, and MindSpore keeps no sum of them: with monitor_mbs_grad there is a row "
    "of each micro-batch, and without it none where a step has several"
)


class GradientCollector:
    """``grad_unreduced`` and ``grad_reduced``."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        recorder: Recorder,
        clock: Clock,
        failures: Failures,
        series_of: SeriesOf,
        framework: Framework,
        note: Callable[[str, str], None],
        *,
        each_micro_step: bool,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._failures = failures
        self._note = note
        self._framework = framework
        self._each_micro_step = each_micro_step
        micro_steps = tuple(range(clock.micro_steps)) if each_micro_step else (-1,)
        self._unreduced = ParameterSeries("grad_unreduced", parameters, recorder, series_of, failures, tensors, micro_steps)
        self._reduced = ParameterSeries("grad_reduced", parameters, recorder, series_of, failures, tensors)
        self._hooks = HookSet()
        self._arrived: dict[NamedParameter, int] = {}
        self._frozen = set(self._unreduced.parameters)
        self.hook_thawed()

    def begin_step(self) -> None:
        self._arrived.clear()

    def hook_thawed(self) -> None:
        """Hook what can be hooked: a frozen parameter can once it is thawed."""
        for parameter in [one for one in self._frozen if one.tensor.requires_grad]:
            self._hooks.add(self._hook(parameter))
            self._frozen.remove(parameter)

    def may_be_unscaled(self) -> None:
        """Loss scales are divided out by whoever calls the optimizer, before this is told of anything."""

    def are_still_scaled(self) -> None:
        """No optimizer of MindSpore scales by itself without the hooks around it seeing the gradients it is given."""

    def before_step(self) -> None:
        """Read what the optimizer is given."""
        self._reduced.record_all(self._framework.reduced)
        if not self._each_micro_step and self._clock.micro_steps > 1:
            self._note("grad_unreduced", NOT_SUMMED)

    def remove(self) -> None:
        self._hooks.remove()

    def _hook(self, parameter: NamedParameter) -> Removable:
        # Hooks are held where no collector of garbage looks: one that held the model would keep it for ever.
        found, known = weakref.WeakMethod(self._found), weakref.ref(parameter)

        def read(gradient: Any) -> None:
            living, watched = found(), known()
            if living is not None and watched is not None:
                living(watched, gradient)

        return on_gradient(parameter.tensor, self._failures.guarded("reading the gradient", read, of=parameter.name))

    def _found(self, parameter: NamedParameter, gradient: Any) -> None:
        """A backward hands out what it has found for a parameter."""
        if not self._recorder.active or (self._clock.micro_steps > 1 and not self._each_micro_step):
            return
        self._unreduced.record(parameter, gradient, self._micro_step(parameter))

    def _micro_step(self, parameter: NamedParameter) -> int:
        """The micro-step of this backward: where no root forward was seen, as many as reached the parameter before."""
        if self._clock.forward[parameter.chunk] >= 0:
            return self._clock.backward_micro_step(parameter.chunk)
        self._arrived[parameter] = self._arrived.get(parameter, -1) + 1
        return self._arrived[parameter]
