"""Records the rows of parameters around an optimizer's step: gradients, weights, moments and updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from monitor.failures import Failures
from monitor.recording.attachment_spec import AttachmentSpec, OwnedSeries
from monitor.recording.backend import RecordingBackend
from monitor.recording.gradients import AGGREGATED_EARLY, GradientCollector
from monitor.recording.optimizer_turns import OptimizerTurn
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.parameters import MomentCollector, ParameterContext, WeightCollector
from monitor.recording.recorder import Recorder
from monitor.recording.step_clock import Clock
from monitor.recording.updates import Updates

Note = Callable[[str, str], None]
"""Adds a note to the manifest: its key and its text."""


@dataclass(slots=True)
class ParameterRows:
    """Calls the configured collectors at each phase of a step. Without collectors it does nothing.

    Attributes:
        kinds: The kinds that this rank records for at least one parameter.
    """

    gradients: GradientCollector | None = None
    weights: WeightCollector | None = None
    moments: MomentCollector | None = None
    updates: Updates = field(default_factory=Updates)
    kinds: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        watch: AttachmentSpec,
        parameters: Sequence[NamedParameter],
        recorder: Recorder,
        clock: Clock,
        failures: Failures,
        backend: RecordingBackend,
        note: Note,
    ) -> ParameterRows:
        """Create the configured collectors. If one cannot be created, no hooks are left."""
        rows = cls()
        with ExitStack() as stack:
            stack.callback(rows.remove)
            config, series_of = watch.config, OwnedSeries(watch, recorder, failures, backend)
            if config.wg_distribution:
                rows.gradients = backend.factories.new_gradients(
                    parameters,
                    recorder,
                    clock,
                    failures,
                    series_of,
                    watch.framework,
                    watch.ownership,
                    note,
                    each_micro_step=config.monitor_mbs_grad,
                )
                rows.kinds |= rows.gradients.kinds
            watched = ParameterContext(
                parameters, recorder, series_of, failures, watch.framework, backend.tensors, note, rows.is_reduced, rows.kinds
            )
            rows.weights = WeightCollector(watched) if config.param_distribution else None
            rows.moments = MomentCollector(watched) if config.mv_distribution else None
            rows.updates = backend.factories.new_updates(config, watched)
            stack.pop_all()
        return rows

    def is_reduced(self, parameter: NamedParameter, gradient: Any) -> bool:
        """Whether a gradient is known to be reduced. If gradients are not recorded, every gradient counts as reduced."""
        return self.gradients is None or self.gradients.is_reduced(parameter, gradient)

    def begin_step(self, *, before_a_turn: bool) -> None:
        """Begin a new step. If an optimizer is about to step, keep what is known about its gradients."""
        if self.gradients is not None and before_a_turn:
            self.gradients.begin_with_gradients()
        elif self.gradients is not None:
            self.gradients.begin_step()

    def pause(self) -> None:
        """Begin a step that is not collected."""
        if self.gradients is not None:
            self.gradients.pause()

    def forward_begins(self, root: Any, watch: AttachmentSpec, clock: Clock, *, has_others: bool) -> None:
        """A training forward begins in a collected step."""
        if self.gradients is not None:
            self.gradients.forward_begins(root)
            early = max(clock.forward) < clock.micro_steps - 1
            if early and has_others and watch.framework.aggregates(root):
                self.gradients.note_local_gradients(AGGREGATED_EARLY)

    def forward_ends(self) -> None:
        """A forward has ended, in training or not."""
        if self.gradients is not None:
            self.gradients.forward_ends()
            self.gradients.hook_thawed()

    def before_step(self, stepping: OptimizerTurn) -> None:
        """An optimizer is about to step."""
        if self.moments is not None:
            self.moments.before_step(stepping)
        if self.weights is not None:
            self.weights.before_step(stepping)
        self.updates.before_step(stepping)

    def gradients_ready(self, stepping: OptimizerTurn) -> None:
        """The optimizer's gradients are complete."""
        if self.gradients is not None:
            self.gradients.before_step(stepping.held)
        self.updates.gradients_ready(stepping)

    def after_step(self, stepping: OptimizerTurn) -> None:
        """The optimizer has stepped."""
        if self.weights is not None:
            self.weights.after_step(stepping)
        self.updates.after_step(stepping)

    def end_turn(self, stepping: OptimizerTurn) -> None:
        """The optimizer has had its turn, but others have not."""
        self.updates.forget_step()
        if self.gradients is not None:
            self.gradients.end_turn(stepping.held)

    def forget_step(self) -> None:
        """The step was skipped, has raised or has ended: drop its temporary data."""
        self.updates.forget_step()

    def remove(self) -> None:
        """Take every hook away."""
        self.updates.forget_step()
        if self.gradients is not None:
            self.gradients.remove()
