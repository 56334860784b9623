"""What every kind of parameter row shares: the parameters that are watched, and their series."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from monitor.failures import Failures
from monitor.recording.recorder import RecordedSeries, Recorder
from monitor.series import GRADIENT_KINDS, NO_MICRO_STEP, Series


@dataclass(frozen=True, eq=False)
class NamedParameter:
    """A watched parameter.

    Attributes:
        chunk: Virtual pipeline stage.
        name: As it stands in rows.
    """

    chunk: int
    name: str
    tensor: Any


ParameterSubset = Collection[NamedParameter] | None
"""Some of the watched parameters, in their order: those that an optimizer steps. None for all."""


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row that was computed by whoever measures.

    Attributes:
        numbers: By column of partials, as ``Recorder.record_numbers`` takes them.
        x: What it is of, on the device where its numbers are.
        histogram: Elements in each bin, int64.
    """

    numbers: Mapping[int, Any]
    x: Any
    histogram: Any = None


class SeriesOf(Protocol):
    """Says what this rank records of a kind of a parameter."""

    def __call__(self, kind: str, parameter: NamedParameter, seen: Any = None) -> Series | None:
        """The series; None where the rank leaves it to another one that holds the same numbers.

        Args:
            seen: A tensor that says itself what other ranks hold, where the parameter does not tell.
        """


class Tensors(Protocol):
    """What is to be known of a framework's tensors."""

    def layout_of(self, x: Any) -> object | None:
        """How a tensor that knows it is laid out over ranks; compares. None for any other tensor."""

    def computing(self) -> AbstractContextManager[object]:
        """What is computed inside is recorded by no graph, and changes nothing of the user's."""


@dataclass(frozen=True, slots=True)
class _FirstSeen:
    """What became of a series when its first tensor was seen."""

    layout: object
    watched: RecordedSeries | None


class ParameterSeries:
    """The series of one kind: one for each parameter that this rank records.

    Attributes:
        kind: Which.
    """

    def __init__(
        self,
        kind: str,
        parameters: Iterable[NamedParameter],
        recorder: Recorder,
        series_of: SeriesOf,
        failures: Failures,
        tensors: Tensors,
        micro_steps: tuple[int, ...] = (NO_MICRO_STEP,),
    ) -> None:
        self.kind = kind
        self._tensors = tensors
        self._recorder = recorder
        self._series_of = series_of
        self._failures = failures
        self._micro_steps = micro_steps
        every = list(parameters)
        self._undecided = {one for one in every if self._shows_when_seen(one)}
        self._seen: dict[NamedParameter, _FirstSeen] = {}
        decided = {one: watched for one in every if one not in self._undecided and (watched := self._watch(one)) is not None}
        self._watched = decided
        self._parameters = tuple(one for one in every if one in decided or one in self._undecided)
        self._recorded = frozenset(self._parameters)

    @property
    def parameters(self) -> Sequence[NamedParameter]:
        """Those whose tensors this rank records, or may: what the gradient of a DTensor is shows when it is there."""
        return self._parameters

    def __len__(self) -> int:
        return len(self._parameters)

    @property
    def is_recorded(self) -> bool:
        """Whether this rank is to record the kind of any parameter that is trained, and not only compare replicas of it."""
        return any(one.tensor.requires_grad and watched.series.kind == self.kind for one, watched in self._watched.items())

    def record(self, parameter: NamedParameter, x: Any, micro_step: int = 0) -> None:
        """Record one parameter's tensor, if this rank does. Of a replica the last micro-step stands for all."""
        try:
            watched = self._series_for(parameter, x) if self._undecided else self._watched.get(parameter)
            if watched is not None:
                place = 0 if watched.micro_steps == (NO_MICRO_STEP,) else micro_step
                self._recorder.record(watched, x, place, aliases=False)
        except Exception as error:
            self._missing(parameter.name, error)

    def record_all(self, tensor_of: Callable[[NamedParameter], Any], among: ParameterSubset = None) -> None:
        """Record what ``tensor_of`` finds for each parameter ``among`` those; where it finds nothing there is no row."""
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
        """Look at each parameter ``among`` those. One that cannot be read does not hide the others."""
        with self._tensors.computing():
            for parameter in self._of(among):
                try:
                    look(parameter)
                except Exception as error:
                    self._missing(parameter.name, error)

    def record_computed(self, compute: Callable[[NamedParameter], ComputedRow | None], among: ParameterSubset = None) -> None:
        """Record what ``compute`` finds for each parameter ``among`` those; where it finds nothing there is no row."""

        def record(parameter: NamedParameter) -> None:
            watched = self._watched.get(parameter)
            # A replica is there to have its norm compared, and this is none.
            computed = compute(parameter) if watched is not None and watched.series.kind == self.kind else None
            if watched is not None and computed is not None:
                self._recorder.record_numbers(watched, computed.numbers, computed.x, histogram=computed.histogram)

        self.each(record, among)

    def _of(self, among: ParameterSubset) -> Iterable[NamedParameter]:
        """Those of this rank's; some of many are looked up, since there may be an optimizer for each of them."""
        return self._parameters if among is None else filter(self._recorded.__contains__, among)

    def _watch(self, parameter: NamedParameter, seen: Any = None) -> RecordedSeries | None:
        series = self._series_of(self.kind, parameter, seen)
        if series is None:
            return None
        return RecordedSeries(series, self._micro_steps if series.kind == self.kind else (NO_MICRO_STEP,))

    def _series_for(self, parameter: NamedParameter, x: Any) -> RecordedSeries | None:
        """The series that ``x`` belongs to; None where this rank has none of it."""
        if parameter not in self._undecided:
            return self._watched.get(parameter)
        layout = self._tensors.layout_of(x)
        if parameter not in self._seen:
            self._seen[parameter] = _FirstSeen(layout, self._watch(parameter, x))
        if self._seen[parameter].layout == layout:
            return self._seen[parameter].watched
        said = f"{self.kind} of {parameter.name!r} is laid out over the ranks in another way than when it was first seen"
        self._failures.warn(f"layout of {self.kind}", f"{said}. The rows of such tensors are missing.")
        return None

    def _failed(self, watched: RecordedSeries, error: Exception) -> None:
        """One tensor that cannot be read does not hide the others."""
        self._missing(watched.series.name, error)

    def _missing(self, name: str, error: Exception) -> None:
        self._failures.report(f"reading {self.kind}", error, "This row is missing.", of=name)

    def _shows_when_seen(self, parameter: NamedParameter) -> bool:
        """Whether only the tensor tells what other ranks hold: the gradient of a replicated parameter may be a term of a sum,
        and that of one that is cut may be whole on every rank.
        """
        return self.kind in GRADIENT_KINDS and self._tensors.layout_of(parameter.tensor) is not None
