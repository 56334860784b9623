"""Weight gradients, before and after the data-parallel ranks aggregate them: what is the same wherever they are read."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from monitor.coordinator.ownership import Ownership
from monitor.failures import Failures
from monitor.recording.parameter_series import NamedParameter, ParameterSeries, ParameterSubset, SeriesOf, Tensors
from monitor.recording.protocols import HookSet, Removable
from monitor.recording.step_clock import Clock

NOT_ACCUMULATED: Final = "gradients are taken away after each micro-batch: a row holds the last micro-batch's alone"
EACH_MICRO_BATCH: Final = "gradients are aggregated after every micro-batch: a row holds the last micro-batch's alone"
AGGREGATED_EARLY: Final = (
    "gradients are aggregated after every micro-batch: a row holds the mean over the ranks so far and the last micro-batch of "
    "this rank; no_sync would keep them apart"
)
NOT_REDUCED: Final = (
    "missing where it did not show, when the optimizer's step began, that the data-parallel ranks had reduced a gradient: in "
    "step {step} for {count} parameters, {names}"
)
SUMMED_EARLY: Final = (
    "missing where data-parallel ranks may have summed a gradient before it was accumulated, or between two micro-batches"
)
MAX_LISTED: Final = 3
"""Names that a sentence lists."""

NOT_OF_THE_STEP: Final = frozenset({NOT_ACCUMULATED, EACH_MICRO_BATCH, AGGREGATED_EARLY})
"""What is noted of ``grad_unreduced`` where, of several micro-batches, it is not what this rank's make together."""


class GradientCollector(ABC):
    """``grad_unreduced`` and ``grad_reduced``.

    Attributes:
        kinds: Which of them this rank is to record of any parameter.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        recorder: Any,
        clock: Clock,
        failures: Failures,
        series_of: SeriesOf,
        framework: Any,
        ownership: Ownership,
        note: Callable[[str, str], None],
        tensors: Tensors,
        *,
        each_micro_step: bool,
    ) -> None:
        """Make the series. Nothing is hooked before ``hook_thawed``."""
        self._recorder = recorder
        self._clock = clock
        self._failures = failures
        self._note = note
        self._framework = framework
        self._ownership = ownership
        self._each_micro_step = each_micro_step
        micro_steps = tuple(range(clock.micro_steps)) if each_micro_step else (-1,)
        self._unreduced = ParameterSeries("grad_unreduced", parameters, recorder, series_of, failures, tensors, micro_steps)
        self._reduced = ParameterSeries("grad_reduced", parameters, recorder, series_of, failures, tensors)
        self.kinds = {one.kind for one in (self._unreduced, self._reduced) if one.is_recorded}
        self._hooks = HookSet()
        self._frozen = set(self._unreduced.parameters)
        self._backwards: Counter[NamedParameter] = Counter()
        self._stepped: set[NamedParameter] = set()
        self._local: list[str] = []
        self._not_reduced = ""
        self._local_notes: dict[str, None] = {}

    def begin_step(self) -> None:
        self._backwards.clear()
        self._stepped.clear()

    def begin_with_gradients(self) -> None:
        """A step begins whose gradients are there already: what has become of them since backward still holds."""
        self._stepped.clear()

    def end_turn(self, held: ParameterSubset) -> None:
        """An optimizer has had its turn, and others have not. What a later backward leaves in ``held`` is of no step yet: of
        the next, or of none, as the gradients that a generator leaves in its critic.
        """
        self._stepped.update(self._unreduced.parameters if held is None else held)

    def pause(self) -> None:
        """A step that is not collected begins."""
        self._backwards.clear()

    @abstractmethod
    def forward_begins(self, root: Any) -> None:
        """A forward of training begins, in a step that is collected."""

    @abstractmethod
    def forward_ends(self) -> None:
        """It has ended, or one that was no training."""

    def hook_thawed(self) -> None:
        """Hook what can be hooked now, and could not before: a frozen parameter can once it is thawed."""
        for parameter in [frozen for frozen in self._frozen if self._can_be_hooked(frozen)]:
            self._hooks.add(self._hook(parameter))
            self._frozen.remove(parameter)

    @abstractmethod
    def may_be_unscaled(self) -> None:
        """From now on gradients are no longer what backward left."""

    @abstractmethod
    def are_still_scaled(self) -> None:
        """The optimizer has been left to unscale them, inside its step."""

    @abstractmethod
    def before_step(self, held: ParameterSubset) -> None:
        """Aggregation is done: read what the optimizer of ``held`` is given."""

    def remove(self) -> None:
        self._hooks.remove()

    @abstractmethod
    def is_reduced(self, parameter: NamedParameter, gradient: Any) -> bool:
        """Whether a gradient is known to lack no rank's part, when the optimizer's step begins."""

    def _read_reduced(self, held: ParameterSubset) -> None:
        """Read the gradients of ``held`` that are reduced. Of the others the row is missing, and that is said."""
        self._local = []
        self._reduced.record_all(self._if_reduced, held)
        if self._local:
            self._warn_not_reduced(self._local)

    def _if_reduced(self, parameter: NamedParameter) -> Any:
        gradient = self._framework.reduced(parameter)
        if self.is_reduced(parameter, gradient):
            return gradient
        if gradient is not None:
            self._local.append(parameter.name)
        return None

    def _warn_not_reduced(self, names: Sequence[str]) -> None:
        listed = ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")
        if not self._not_reduced:
            self._not_reduced = NOT_REDUCED.format(step=self._clock.step, count=len(names), names=listed)
        self._failures.warn(
            "gradients that are not reduced",
            f"No reduction of {len(names)} gradients over the data-parallel ranks was seen before the optimizer's step "
            f"{self._clock.step} ({listed}): their grad_reduced is missing. An optimizer that reduces inside its step leaves "
            "them local. If they are complete all the same, pass the groups: dp_group (which may be of one rank) and tp_group "
            "to set_monitor, process_group to TrainerMon.",
        )

    def note_local_gradients(self, said: str) -> None:
        """Note what a reader of ``grad_unreduced`` must know, beside what was noted before."""
        self._local_notes[said] = None
        self._note("grad_unreduced", "; ".join(self._local_notes))

    def _can_be_hooked(self, parameter: NamedParameter) -> bool:
        return bool(parameter.tensor.requires_grad)

    @abstractmethod
    def _register(self, parameter: NamedParameter, read: Callable[[Any], None]) -> Removable:
        """Have ``read``, which does not raise, called with what the framework tells when a backward comes to a parameter."""

    @abstractmethod
    def _found(self, parameter: NamedParameter, told: Any) -> None:
        """A backward has come to a parameter."""

    def _hook(self, parameter: NamedParameter) -> Removable:
        # Python's garbage collector does not see into these hooks: one that held the model would keep it for ever.
        collector, known = weakref.ref(self), weakref.ref(parameter)

        def read(told: Any) -> None:
            living, watched = collector(), known()
            if living is not None and watched is not None:
                living._found(watched, told)

        return self._register(parameter, self._failures.guarded("reading the gradient", read, of=parameter.name))

    def _micro_step(self, parameter: NamedParameter) -> int:
        """The micro-step of this backward: where no root forward was seen (compiled, scripted, or only parts of the model are
        called), as many as reached the parameter before.
        """
        if self._clock.forward[parameter.chunk] >= 0:
            return self._clock.backward_micro_step(parameter.chunk)
        self._backwards[parameter] += 1
        return self._backwards[parameter] - 1
