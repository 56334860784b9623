"""The calls of one module in a step: their numbers, what is known of each, and who takes their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Final, NamedTuple, Protocol, final

from monitor.failures import Failures
from monitor.recording.backend import Start, Target
from monitor.recording.recorder import RecordedSeries, Recorder
from monitor.recording.step_clock import Clock
from monitor.series import Placement

ADVICE = "The rows of this module are missing."


@final
class OpenCalls:
    """An entry for each call that has begun and not ended."""

    def __init__(self) -> None:
        self._by_thread: dict[int, list[Any]] = {}

    @property
    def mine(self) -> list[Any]:
        """The open calls of this thread, one within another."""
        return self._by_thread.setdefault(get_ident(), [])

    def __iter__(self) -> Iterator[Any]:
        """All, the innermost of each thread first."""
        return (entry for entries in list(self._by_thread.values()) for entry in reversed(entries))

    def clear(self) -> None:
        self._by_thread.clear()


class CallIndex(NamedTuple):
    """The index of a module's call in its step.

    Attributes:
        micro_step: The micro-step of the call's forward.
        call: Number of earlier calls of the module in that micro-step.
    """

    micro_step: int
    call: int


class Repetitions(Protocol):
    """Recognises the calls of one module that activation checkpointing repeats in one step. An adapter of ``Calls``."""

    @property
    def began(self) -> Callable[[CallIndex], None] | None:
        """Receives each call that begins in forward; None if they need no memory."""

    def repeated(self, counts: Mapping[int, int]) -> CallIndex | None:
        """The call that a recomputation repeats; None if that call has a graph, or is unknown.

        Args:
            counts: Number of calls by micro-step.
        """

    def restart(self, micro_step: int) -> None:
        """Reset the micro-step, whose forward failed."""

    def forget_step(self) -> None:
        """Drop the data of the step that has ended."""


@final
class Calls:
    """Counts the calls of one module in the step in progress.

    It lives as long as the module's hooks: objects made in every step would make Python collect garbage.
    """

    def __init__(self, repetitions: Repetitions) -> None:
        self._counts: dict[int, int] = {}
        self._repetitions = repetitions
        self._began = repetitions.began

    def begin(self, micro_step: int) -> CallIndex:
        """The index of a call that begins in forward."""
        earlier = self._counts.get(micro_step, 0)
        self._counts[micro_step] = earlier + 1
        place = CallIndex(micro_step, earlier)
        if self._began is not None:
            self._began(place)
        return place

    def begun(self, micro_step: int) -> int:
        """Number of calls of a micro-step that have begun."""
        return self._counts.get(micro_step, 0)

    def repeat(self) -> CallIndex | None:
        """The index of the call that a recomputation in backward repeats, if it is known."""
        return self._repetitions.repeated(self._counts)

    def restart(self, micro_step: int) -> None:
        """Reset the micro-step, whose forward failed."""
        self._counts.pop(micro_step, None)
        self._repetitions.restart(micro_step)

    def forget_step(self) -> None:
        """Drop the data of the step that has ended."""
        self._counts.clear()
        self._repetitions.forget_step()


@dataclass(slots=True)
class ModuleCall:
    """One call of a module, between its pre-hook and its forward hook.

    Attributes:
        start: The beginning of the call in the graph.
        targets: The targets of the recorded input gradients, and their series; None or empty without gradients.
    """

    place: CallIndex
    records_forward: bool
    start: Start = 0
    targets: Mapping[Target, RecordedSeries] | None = None


class Left(NamedTuple):
    """What a ``CallPlans`` has left to do for a call.

    Attributes:
        rows: The rows of forward: arguments or results.
        gradients: The gradients of results, or before the call the targets of the arguments' gradients.
        inputs: The gradients of the inputs.
    """

    rows: bool = True
    gradients: bool = True
    inputs: bool = True


ALL: Final = Left()
NOTHING: Final = Left(rows=False, gradients=False, inputs=False)
GRADIENTS: Final = Left(rows=False)


class CallPlans(Protocol):
    """Does what ``ModuleWatcher`` does for one module, faster, where a call is like an earlier one.

    Both methods return what is left to do.
    """

    def begin(self, call: ModuleCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, graph: bool) -> Left:
        """Record the arguments of a call, and set ``call.targets``.

        Args:
            graph: Whether gradients of the call are recorded.
        """

    def end(self, call: ModuleCall, result: Any, *, graph: bool) -> Left:
        """Record the result of a call. Have its gradients and those of the inputs recorded when they come."""


@final
class GradientGate:
    """Takes gradients of activations while their step lasts.

    Hooks on a graph exist as long as the graph, which may outlive the model: so the gate refers to no module.

    Attributes:
        attached: Whether gradients are still recorded.
        take: Records a gradient, from its series, the gradient, its step and micro-step. Does not raise.
    """

    def __init__(self, recorder: Recorder, clock: Clock, failures: Failures, placement: Callable[[Any], Placement]) -> None:
        self.attached = True
        self.recorder, self._due = recorder, recorder.due("xy_distribution")
        self.clock = clock
        self._failures = failures
        self._placement = placement

    def belongs(self, step: int) -> bool:
        """Whether a gradient of ``step`` arrives in time. After its step was sealed, a gradient has no row."""
        if self.clock.step != step:
            self._failures.warn("late gradients", "A backward ran after its optimizer step. Its gradients are not recorded.")
            return False
        return self._due.now

    def take(self, watched: RecordedSeries, gradient: Any, step: int, micro_step: int) -> None:
        """Record a gradient that belongs to ``step``. Does not raise."""
        take = self._failures.guarded("reading gradients of activations", self._take, ADVICE, of=watched.series.name)
        take(watched, gradient, step, micro_step)

    def place(self, watched: RecordedSeries, seen: Any) -> None:
        """Set the placement of a series that has no rows yet, as a tensor shows it."""
        if not watched.slots:
            self.recorder.table.series.place(watched.series, self._placement(seen))

    def _take(self, watched: RecordedSeries, gradient: Any, step: int, micro_step: int) -> None:
        if self.belongs(step):
            self.place(watched, gradient)
            self.recorder.record(watched, gradient, micro_step)
