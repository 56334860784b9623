"""The recorded parameters, and the series of one kind for each of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monitor.recording.recorder import RecordedSeries
from monitor.series import GRADIENT_KINDS, NO_MICRO_STEP

if TYPE_CHECKING:
    from monitor.recording.attachment_spec import Attached


@dataclass(frozen=True, eq=False)
class NamedParameter:
    """A recorded parameter.

    Attributes:
        chunk: Virtual pipeline stage.
        name: Name in rows.
    """

    chunk: int
    name: str
    tensor: Any


ParameterSubset = Collection[NamedParameter] | None
"""The recorded parameters that an optimizer steps, in their order. None for all."""


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row whose numbers a collector computed.

    Attributes:
        numbers: By column of partials, as for ``Recorder.record_numbers``.
        x: The measured tensor, on the device of the numbers.
        histogram: Number of elements in each bin, int64.
    """

    numbers: Mapping[int, Any]
    x: Any
    histogram: Any = None


@dataclass(frozen=True, slots=True)
class _FirstSeen:
    """The layout and the series of a parameter's first tensor."""

    layout: object
    watched: RecordedSeries | None


class ParameterSeries:
    """The series of one kind: one for each parameter that this rank records.

    Attributes:
        kind: The kind of all of them.
    """

    def __init__(self, kind: str, attached: Attached, micro_steps: tuple[int, ...]) -> None:
        self.kind = kind
        self._tensors = attached.backend.tensors
        self._recorder = attached.recorder
        self._series_of = attached.series_of
        self._failures = attached.failures
        self._micro_steps = micro_steps
        every = attached.parameters
        self._undecided = {one for one in every if self._shows_when_seen(one)}
        self._seen: dict[NamedParameter, _FirstSeen] = {}
        decided = {one: watched for one in every if one not in self._undecided and (watched := self._watch(one)) is not None}
        self._watched = decided
        self._parameters = tuple(one for one in every if one in decided or one in self._undecided)
        self._recorded = frozenset(self._parameters)

    @property
    def parameters(self) -> Sequence[NamedParameter]:
        """The parameters that this rank records or may record: the placement of a DTensor's gradient shows when it exists."""
        return self._parameters

    def __len__(self) -> int:
        return len(self._parameters)

    @property
    def is_recorded(self) -> bool:
        """Whether this rank records the kind for at least one trained parameter, not counting compared replicas."""
        return any(one.tensor.requires_grad and watched.series.kind == self.kind for one, watched in self._watched.items())

    def record(self, parameter: NamedParameter, x: Any, micro_step: int = 0) -> None:
        """Record one parameter's tensor, if this rank records it. Of a replica only the last micro-step is kept."""
        try:
            watched = self._series_for(parameter, x) if self._undecided else self._watched.get(parameter)
            if watched is not None:
                place = 0 if watched.micro_steps == (NO_MICRO_STEP,) else micro_step
                self._recorder.record(watched, x, place, aliases=False)
        except Exception as error:
            self._missing(parameter.name, error)

    def record_all(self, tensor_of: Callable[[NamedParameter], Any], among: ParameterSubset = None) -> None:
        """Record the tensor that ``tensor_of`` returns for each parameter in ``among``. For None there is no row."""
        found: list[tuple[RecordedSeries, Any]] = []
        for parameter in self._of(among):
            try:
                x = tensor_of(parameter)
                watched = None if x is None else self._series_for(parameter, x)
            except Exception as error:
                self._missing(parameter.name, error)
                continue
            if x is not None and watched is not None:
                found.append((watched, x))
        self._recorder.record_all(found, self._failed)

    def each(self, look: Callable[[NamedParameter], object], among: ParameterSubset = None) -> None:
        """Call ``look`` for each parameter in ``among``. If it raises for one, the others are still read."""
        with self._tensors.computing():
            for parameter in self._of(among):
                try:
                    look(parameter)
                except Exception as error:
                    self._missing(parameter.name, error)

    def record_computed(self, compute: Callable[[NamedParameter], ComputedRow | None], among: ParameterSubset = None) -> None:
        """Record the row that ``compute`` returns for each parameter in ``among``. For None there is no row."""

        def record(parameter: NamedParameter) -> None:
            watched = self._watched.get(parameter)
            # Replicas are compared by their norm, and a computed row has none.
            computed = compute(parameter) if watched is not None and watched.series.kind == self.kind else None
            if watched is not None and computed is not None:
                self._recorder.record_numbers(watched, computed.numbers, computed.x, histogram=computed.histogram)

        self.each(record, among)

    def _of(self, among: ParameterSubset) -> Iterable[NamedParameter]:
        """The parameters of this rank in ``among``. Looked up in a set, since each parameter may have its own optimizer."""
        return self._parameters if among is None else filter(self._recorded.__contains__, among)

    def _watch(self, parameter: NamedParameter, seen: Any = None) -> RecordedSeries | None:
        series = self._series_of(self.kind, parameter, seen)
        if series is None:
            return None
        return RecordedSeries(series, self._micro_steps if series.kind == self.kind else (NO_MICRO_STEP,))

    def _series_for(self, parameter: NamedParameter, x: Any) -> RecordedSeries | None:
        """The series that ``x`` belongs to; None if this rank does not record it."""
        if parameter not in self._undecided:
            return self._watched.get(parameter)
        layout = self._tensors.layout_of(x)
        if parameter not in self._seen:
            self._seen[parameter] = _FirstSeen(layout, self._watch(parameter, x))
        if self._seen[parameter].layout == layout:
            return self._seen[parameter].watched
        said = f"The layout of {self.kind} of {parameter.name!r} over the ranks has changed since it was first recorded"
        self._failures.warn(f"layout of {self.kind}", f"{said}. The rows of such tensors are missing.")
        return None

    def _failed(self, watched: RecordedSeries, error: Exception) -> None:
        """Report one tensor that cannot be read. The others are still recorded."""
        self._missing(watched.series.name, error)

    def _missing(self, name: str, error: Exception) -> None:
        self._failures.report(f"reading {self.kind}", error, "This row is missing.", of=name)

    def _shows_when_seen(self, parameter: NamedParameter) -> bool:
        """Whether only the tensor shows the placement: the gradient of a replicated parameter may be a term of a sum, and the
        gradient of a sharded one may be whole on every rank.
        """
        return self.kind in GRADIENT_KINDS and self._tensors.layout_of(parameter.tensor) is not None
