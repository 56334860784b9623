"""Weight gradients, before and after the data-parallel ranks aggregate them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from monitor.failures import Failures
from monitor.pytorch.clock import Clock
from monitor.pytorch.hooks import HookSet, Removable
from monitor.pytorch.parameters import NamedParameter, Owns, ParameterSeries
from monitor.pytorch.recorder import Recorder


class GradientCollector:
    """``grad_unreduced`` and ``grad_reduced``.

    A gradient accumulates in place over the micro-batches. Its local sum is read when the last of them has been added, before
    any reducer (whose hooks run after the parameter's own) can touch it: partials of micro-batches would not combine to it.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        recorder: Recorder,
        clock: Clock,
        failures: Failures,
        owns: Owns,
        *,
        each_micro_step: bool,
        main_grad: bool,
        aggregated: bool,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._failures = failures
        self._each_micro_step = each_micro_step
        self._main_grad = main_grad
        self._aggregated = aggregated
        micro_steps = tuple(range(clock.micro_steps)) if each_micro_step else (-1,)
        self._unreduced = ParameterSeries("grad_unreduced", parameters, recorder, owns, micro_steps)
        self._reduced = ParameterSeries("grad_reduced", parameters, recorder, owns)
        self._hooks = HookSet()
        self._hooked: set[NamedParameter] = set()
        self._pending: set[NamedParameter] = set()
        self.begin_step()

    def begin_step(self) -> None:
        """Hook what can be hooked: a frozen parameter can once it is thawed."""
        self._pending.clear()
        if len(self._hooked) == len(self._unreduced):
            return
        for parameter in self._unreduced.parameters:
            if parameter not in self._hooked and parameter.tensor.requires_grad:
                self._hooks.add(self._hook(parameter))
                self._hooked.add(parameter)

    def before_step(self) -> None:
        """The step pre-hook: aggregation is done, clipping by the optimizer's owner may be."""
        self._finish_short_accumulation()
        self._reduced.record_all(self._gradient)

    def remove(self) -> None:
        self._hooks.remove()

    def _hook(self, parameter: NamedParameter) -> Removable:
        read = self._failures.guarded(f"reading the gradient of {parameter.name!r}", partial(self._accumulated, parameter))
        handle: Removable = parameter.tensor.register_post_accumulate_grad_hook(read)
        return handle

    def _accumulated(self, parameter: NamedParameter, tensor: Tensor) -> None:
        if not self._recorder.active or tensor.grad is None:
            return
        micro_step = self._clock.backward_micro_step(parameter.chunk)
        if self._each_micro_step:
            self._unreduced.record(parameter, tensor.grad, micro_step)
        elif micro_step >= self._clock.micro_steps - 1:
            self._unreduced.record(parameter, tensor.grad)
            self._pending.discard(parameter)
        else:
            self._pending.add(parameter)

    def _finish_short_accumulation(self) -> None:
        """The step came after fewer micro-batches than ``grad_acc_steps``: the sums are complete all the same."""
        if self._pending and self._aggregated:
            said = f"step {self._clock.step} had fewer micro-batches than grad_acc_steps ({self._clock.micro_steps})"
            self._failures.warn(
                "fewer micro-steps", f"{said}: grad_unreduced is missing where gradients were aggregated since."
            )
            return
        for parameter in self._unreduced.parameters:
            if parameter in self._pending and parameter.tensor.grad is not None:
                self._unreduced.record(parameter, parameter.tensor.grad)

    def _gradient(self, parameter: NamedParameter) -> Tensor | None:
        main_grad: Tensor | None = getattr(parameter.tensor, "main_grad", None) if self._main_grad else None
        return parameter.tensor.grad if main_grad is None else main_grad
