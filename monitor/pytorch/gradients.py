"""Records weight gradients for PyTorch, before and after the data-parallel ranks reduce them, and detects clipping."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from monitor.coordinator.ownership import Ownership
from monitor.failures import Failures
from monitor.pytorch import tensors
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.hooks import first_after_accumulation, untraced, when_backward_ends
from monitor.pytorch.process_group import has_others
from monitor.pytorch.recorder import Recorder
from monitor.pytorch.reductions.seen import GradientReductions
from monitor.recording import gradients
from monitor.recording.backend import Removable
from monitor.recording.gradients import NOT_ACCUMULATED, SUMMED_EARLY
from monitor.recording.parameter_series import NamedParameter, ParameterSubset, SeriesOf
from monitor.recording.step_clock import Clock

# --- Changes of gradients between the end of backward and the optimizer's step, such as clipping. Gradients are read at the
# step, so a loop that clips has done it by then. Most reducers write to gradients inside backward, which is no such change. So
# a gradient's version is taken when backward, including its reducer, has ended.

MAX_SENTINELS: Final = 4
"""Gradients that are checked. A few suffice: clipping changes all of them."""


class GradientVersion:
    """A weak reference to a gradient and its version, to detect later whether it was replaced or changed.

    Views are compared by their base: FSDP makes new views of one gradient after every micro-batch. Changes that bypass the
    version (``p.grad.data``) are not detected.
    """

    __slots__ = ("_gradient", "_version")

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = weakref.ref(_base_of(gradient))
        self._version = gradient._version

    def refers_to(self, gradient: Tensor | None) -> bool:
        return gradient is not None and self._gradient() is _base_of(gradient)

    def is_intact(self, gradient: Tensor | None) -> bool:
        return gradient is not None and self.refers_to(gradient) and gradient._version == self._version


class ChangeDetector:
    """Follows the first and the last gradients of each backward of a step."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._task = -1
        self._latest: NamedParameter | None = None
        self._sentinels: dict[NamedParameter, GradientVersion | None] = {}

    def begin_step(self) -> None:
        self._latest = None
        self._sentinels.clear()

    def arrived(self, parameter: NamedParameter) -> None:
        """Backward has reached a parameter."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._sentinels = dict.fromkeys(self._sentinels)  # in case this backward does not end
            self._add(parameter)
            when_backward_ends(self._failures.guarded("following the gradients", self._ended, "Clipping may go unnoticed."))
        self._latest = parameter

    def changed(self, reduced: Callable[[NamedParameter], Tensor | None], held: ParameterSubset = None) -> bool:
        """Whether a gradient that is about to be read was written to since backward ended.

        Args:
            reduced: Finds the tensor that is about to be read. If backward left another tensor, nothing is known.
            held: The parameters that are about to be read.
        """
        for parameter, left in self._sentinels.items():
            gradient = None if left is None or (held is not None and parameter not in held) else reduced(parameter)
            if left is not None and left.refers_to(gradient) and not left.is_intact(gradient):
                return True
        return False

    def _add(self, parameter: NamedParameter) -> None:
        if len(self._sentinels) < MAX_SENTINELS:
            self._sentinels.setdefault(parameter)

    def _ended(self) -> None:
        """Take all versions again: later backwards of a step add to the gradients of earlier ones."""
        self._task = -1
        if self._latest is not None:
            self._add(self._latest)
        for parameter in self._sentinels:
            gradient = parameter.tensor.grad
            self._sentinels[parameter] = None if gradient is None else GradientVersion(gradient)


def _base_of(gradient: Tensor) -> Tensor:
    base: Tensor | None = gradient._base
    return gradient if base is None else base


CHANGED: Final = (
    "changed in place between backward and the optimizer's step, by clipping, scaling or reducing outside backward: a "
    "row holds the gradient that the optimizer received"
)
SUMMED_ADVICE: Final = (
    "In step {} the gradient of {} may already have been a sum over data-parallel ranks when it was accumulated. A hook of "
    "Tensor.register_hook that reduces has this effect. Such gradients have no grad_unreduced. To get these rows, reduce in "
    "register_post_accumulate_grad_hook or after backward."
)
UNSCALED: Final = "divided by loss_scale"
STILL_SCALED: Final = "multiplied by loss_scale: the optimizer divides by it inside its step"


class GradientCollector(gradients.GradientCollector):
    """``grad_unreduced`` and ``grad_reduced``.

    A gradient accumulates in place over the micro-batches. Its local sum is read when the last micro-batch has been added,
    before any reducer can change it (its hooks run after the parameter's own). Statistics of single micro-batches could not be
    combined to those of the sum.
    """

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
        self._framework: Framework = framework
        self._parameters = self._unreduced.parameters
        self._left: dict[NamedParameter, GradientVersion] = {}
        self._read: set[NamedParameter] = set()
        self._warned_summed = False
        self._summed: set[NamedParameter] = set()
        self._changes = ChangeDetector(failures)
        self._scaling = ""
        self._reductions = GradientReductions(framework, ownership, failures, self._reduced.parameters)
        caught = framework.catch_unreduced(self._parameters, self, failures)
        if caught is not None:
            self._hooks.add(caught)
            self._frozen = {one for one in self._frozen if not framework.catches(one)}
        self.hook_thawed()

    @property
    def wanted(self) -> bool:
        """Whether gradients are read: the step in progress is collected."""
        return bool(self._recorder.active)

    def begin_step(self) -> None:
        super().begin_step()
        self._left.clear()
        self._read.clear()
        self._summed.clear()
        self._changes.begin_step()
        self._scaling = ""
        if len(self._reduced):
            self._reductions.begin_step()

    def pause(self) -> None:
        super().pause()
        self._reductions.pause()

    def forward_begins(self, root: nn.Module) -> None:
        self._reductions.forward_begins(root)

    def forward_ends(self) -> None:
        self._reductions.forward_ends()

    def end_turn(self, held: ParameterSubset) -> None:
        super().end_turn(held)
        self._scaling = ""  # it was this optimizer's
        self._reductions.end_turn()

    def may_be_unscaled(self) -> None:
        """From now on gradients may be unscaled, even if their version is unchanged."""
        self._scaling = UNSCALED

    def are_still_scaled(self) -> None:
        """The optimizer unscales gradients by itself, inside its step."""
        self._scaling = STILL_SCALED

    def before_step(self, held: ParameterSubset) -> None:
        """The step pre-hook. Reduction is done; the training loop may have clipped."""
        if not self._each_micro_step:
            self._failures.guarded("finishing an accumulation", self._finish_short_accumulation)(held)
        self._reductions.begin_reading()
        self._read_reduced(held)
        self._reductions.end_reading(held is None)
        self._note_changes(held)

    def remove(self) -> None:
        super().remove()
        self._reductions.remove()

    def is_reduced(self, parameter: NamedParameter, gradient: Tensor | None) -> bool:
        return self._reductions.is_reduced(parameter, gradient)

    def _can_be_hooked(self, parameter: NamedParameter) -> bool:
        """A lazy parameter must have a shape, too."""
        return super()._can_be_hooked(parameter) and not is_lazy(parameter.tensor)

    def _register(self, parameter: NamedParameter, read: Callable[[Any], None]) -> Removable:
        hook = untraced(read)
        if hasattr(parameter.tensor, "main_grad"):  # an existing hook fills main_grad
            handle: Removable = parameter.tensor.register_post_accumulate_grad_hook(hook)
            return handle
        return first_after_accumulation(parameter.tensor, hook)

    def _note_changes(self, held: ParameterSubset) -> None:
        """Note how the gradients just read differ from those that backward left."""
        may_be_clipped = len(self._reduced) > 0 and not self._framework.reads_before_clipping
        changed = may_be_clipped and self._changes.changed(self._framework.reduced, held)
        if changed or self._scaling == STILL_SCALED or self._not_reduced:
            said = [self._scaling, CHANGED if changed else "", self._not_reduced]
            self._note("grad_reduced", "; ".join(filter(None, said)))

    def _found(self, parameter: NamedParameter, told: Tensor) -> None:
        """Backward has accumulated into a parameter."""
        gradient = self._framework.local_gradient(told) if self._recorder.active else None
        if gradient is None:
            return
        self._arrives(parameter, gradient)
        if parameter in self._stepped or parameter in self._summed:
            return
        if self._clock.micro_steps == 1 and not self._each_micro_step:  # nothing to count or to follow
            self._unreduced.record(parameter, gradient)
        else:
            self._accumulated(parameter, gradient)

    def arrived(self, parameter: NamedParameter, gradient: Tensor, *, complete: bool) -> None:
        """A framework has reported a gradient."""
        if self._framework.reports_twice and complete is self._each_micro_step:
            return
        self._arrives(parameter, gradient)
        if parameter in self._stepped or parameter in self._summed:
            return
        if complete and not self._each_micro_step:
            self._unreduced.record(parameter, gradient)
            self._left.pop(parameter, None)
        else:
            self._accumulated(parameter, gradient)

    def _arrives(self, parameter: NamedParameter, gradient: Tensor) -> None:
        self._changes.arrived(parameter)
        if self._reductions.follows and self._reductions.arrived(parameter, gradient):
            self._is_summed(parameter)

    def _is_summed(self, parameter: NamedParameter) -> None:
        """The gradient is no longer local to this rank. Later backwards of the step add to it, so it stays non-local."""
        self._summed.add(parameter)
        self._left.pop(parameter, None)
        if not self._warned_summed and parameter not in self._stepped:
            self._warned_summed = True
            self.note_local_gradients(f"{SUMMED_EARLY}: first in step {self._clock.step} for {parameter.name}")
            self._failures.warn("gradients that are summed early", SUMMED_ADVICE.format(self._clock.step, parameter.name))

    def _accumulated(self, parameter: NamedParameter, gradient: Tensor) -> None:
        micro_step = self._micro_step(parameter)
        if self._clock.micro_steps > 1:
            self._follow(parameter, gradient)
        if self._each_micro_step:
            self._unreduced.record(parameter, gradient, micro_step)
        elif micro_step >= self._clock.micro_steps - 1 or parameter in self._read:
            # The last micro-batch may come first: backwards in reverse order, or one backward of a sum of losses that adds
            # several times.
            self._unreduced.record(parameter, gradient)
            self._read.add(parameter)
            self._left.pop(parameter, None)

    def _follow(self, parameter: NamedParameter, gradient: Tensor) -> None:
        before = self._left.get(parameter)
        if before is not None and not before.refers_to(gradient):
            self.note_local_gradients(NOT_ACCUMULATED)
        self._left[parameter] = GradientVersion(gradient)

    def _finish_short_accumulation(self, held: ParameterSubset) -> None:
        """Record gradients that the last micro-batches did not reach (fewer micro-batches, or an expert that was not called).
        Their sums are complete if they are unchanged since backward.
        """
        lost = 0
        for parameter, left in [(one, self._left.pop(one)) for one in list(self._left) if held is None or one in held]:
            gradient = self._framework.reduced(parameter)
            if gradient is not None and left.is_intact(gradient) and not self._scaling and not has_others():
                self._unreduced.record(parameter, gradient)
            else:
                lost += 1
        if lost:
            said = f"In step {self._clock.step} {lost} gradients were complete before the last micro-batch of grad_acc_steps"
            advice = "and were aggregated, unscaled or clipped before it was known: their grad_unreduced is missing."
            self._failures.warn("fewer micro-steps", f"{said} ({self._clock.micro_steps}) {advice}")
