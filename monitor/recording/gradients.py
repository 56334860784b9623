"""Records weight gradients before and after the data-parallel ranks reduce them: the part common to all frameworks."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from monitor.coordinator.ownership import Ownership
from monitor.failures import Failures
from monitor.recording.backend import HookSet, Removable
from monitor.recording.parameter_series import NamedParameter, ParameterSeries, ParameterSubset, SeriesOf, Tensors
from monitor.recording.step_clock import Clock

NOT_ACCUMULATED: Final = "gradients are taken away after each micro-batch: a row holds the last micro-batch's alone"
EACH_MICRO_BATCH: Final = "gradients are aggregated after every micro-batch: a row holds the last micro-batch's alone"
AGGREGATED_EARLY: Final = (
    "gradients are aggregated after every micro-batch: a row holds the mean over the ranks so far and the last micro-batch of "
    "this rank; no_sync would keep them apart"
)
NOT_REDUCED: Final = (
    "missing for gradients of which no reduction over the data-parallel ranks was seen before the optimizer's step: in step "
    "{step} for {count} parameters, {names}"
)
SUMMED_EARLY: Final = (
    "missing where data-parallel ranks may have summed a gradient before it was accumulated, or between two micro-batches"
)
MAX_LISTED: Final = 3
"""Maximum number of names in a message."""

NOT_OF_THE_STEP: Final = frozenset({NOT_ACCUMULATED, EACH_MICRO_BATCH, AGGREGATED_EARLY})
"""Notes on ``grad_unreduced`` if it is not the sum over this rank's micro-batches."""


class GradientCollector(ABC):
    """``grad_unreduced`` and ``grad_reduced``.

    Attributes:
        kinds: The kinds that this rank records for at least one parameter.
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
        """Create the series. ``hook_thawed`` registers the hooks."""
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
        """Begin a step whose gradients exist already, and keep what is known about them."""
        self._stepped.clear()

    def end_turn(self, held: ParameterSubset) -> None:
        """An optimizer has had its turn, but others have not. Gradients that a later backward leaves in ``held`` do not belong
        to this step. They belong to the next step or to none, such as the gradients that a generator leaves in its critic.
        """
        self._stepped.update(self._unreduced.parameters if held is None else held)

    def pause(self) -> None:
        """Begin a step that is not collected."""
        self._backwards.clear()

    @abstractmethod
    def forward_begins(self, root: Any) -> None:
        """A training forward begins in a collected step."""

    @abstractmethod
    def forward_ends(self) -> None:
        """A forward has ended, in training or not."""

    def hook_thawed(self) -> None:
        """Hook the parameters that could not be hooked before: a frozen parameter takes hooks once it is trained."""
        for parameter in [frozen for frozen in self._frozen if self._can_be_hooked(frozen)]:
            self._hooks.add(self._hook(parameter))
            self._frozen.remove(parameter)

    @abstractmethod
    def may_be_unscaled(self) -> None:
        """The loss scaler may change gradients from now on."""

    @abstractmethod
    def are_still_scaled(self) -> None:
        """The optimizer itself unscales the gradients, inside its step."""

    @abstractmethod
    def before_step(self, held: ParameterSubset) -> None:
        """Reduction is done: read the gradients of ``held``, which an optimizer is about to use."""

    def remove(self) -> None:
        self._hooks.remove()

    @abstractmethod
    def is_reduced(self, parameter: NamedParameter, gradient: Any) -> bool:
        """Whether a gradient is known to contain every rank's part when the optimizer's step begins."""

    def _read_reduced(self, held: ParameterSubset) -> None:
        """Read the gradients of ``held`` that are reduced. The others have no row, and a warning says so."""
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
            f"{self._clock.step} ({listed}): their grad_reduced is missing. If the optimizer reduces inside its step, they are "
            "local before it. If they are reduced, pass the groups: dp_group (possibly of one rank) and tp_group to "
            "set_monitor, process_group to TrainerMon.",
        )

    def note_local_gradients(self, said: str) -> None:
        """Add a note on ``grad_unreduced`` to the manifest, after earlier ones."""
        self._local_notes[said] = None
        self._note("grad_unreduced", "; ".join(self._local_notes))

    def _can_be_hooked(self, parameter: NamedParameter) -> bool:
        return bool(parameter.tensor.requires_grad)

    @abstractmethod
    def _register(self, parameter: NamedParameter, read: Callable[[Any], None]) -> Removable:
        """Call ``read``, which does not raise, with the framework's argument when a backward reaches a parameter."""

    @abstractmethod
    def _found(self, parameter: NamedParameter, argument: Any) -> None:
        """A backward has reached a parameter."""

    def _hook(self, parameter: NamedParameter) -> Removable:
        # Python's garbage collector does not see references inside these hooks: a strong one would keep the model forever.
        collector, known = weakref.ref(self), weakref.ref(parameter)

        def read(argument: Any) -> None:
            living, watched = collector(), known()
            if living is not None and watched is not None:
                living._found(watched, argument)

        return self._register(parameter, self._failures.guarded("reading the gradient", read, of=parameter.name))

    def _micro_step(self, parameter: NamedParameter) -> int:
        """The micro-step of this backward. Without a root forward (compiled, scripted, or only parts of the model are called)
        it is the number of earlier backwards of the parameter.
        """
        if self._clock.forward[parameter.chunk] >= 0:
            return self._clock.backward_micro_step(parameter.chunk)
        self._backwards[parameter] += 1
        return self._backwards[parameter] - 1
