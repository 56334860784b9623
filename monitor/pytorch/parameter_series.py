"""What every kind of parameter row shares: the parameters that are watched, and their series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from monitor.failures import Failures
from monitor.pytorch.recorder import Recorder, Watched
from monitor.series import NO_MICRO_STEP, Series


@dataclass(frozen=True, eq=False)
class NamedParameter:
    """A watched parameter.

    Attributes:
        chunk: Virtual pipeline stage.
        name: As it stands in rows.
    """

    chunk: int
    name: str
    tensor: nn.Parameter


class SeriesOf(Protocol):
    """Says what this rank records of a kind of a parameter."""

    def __call__(self, kind: str, parameter: NamedParameter) -> Series | None:
        """The series; None where the rank leaves it to another one that holds the same numbers."""


class ParameterSeries:
    """The series of one kind: one for each parameter that this rank records."""

    def __init__(
        self,
        kind: str,
        parameters: Iterable[NamedParameter],
        recorder: Recorder,
        series_of: SeriesOf,
        failures: Failures,
        micro_steps: tuple[int, ...] = (NO_MICRO_STEP,),
    ) -> None:
        self._kind = kind
        self._recorder = recorder
        self._failures = failures
        self._watched = {
            parameter: Watched(series, micro_steps if series.kind == kind else (NO_MICRO_STEP,))
            for parameter in parameters
            if (series := series_of(kind, parameter)) is not None
        }

    @property
    def parameters(self) -> Sequence[NamedParameter]:
        return tuple(self._watched)

    def __len__(self) -> int:
        return len(self._watched)

    def record(self, parameter: NamedParameter, x: Tensor, micro_step: int = 0) -> None:
        """Record one parameter's tensor, if this rank does. Of a replica the last micro-step stands for all."""
        watched = self._watched.get(parameter)
        if watched is None:
            return
        if watched.micro_steps == (NO_MICRO_STEP,):
            micro_step = 0
        try:
            self._recorder.record(watched, x, micro_step, aliases=False)
        except Exception as error:
            self._failed(watched, error)

    def record_all(self, tensor_of: Callable[[NamedParameter], Tensor | None]) -> None:
        """Record what ``tensor_of`` finds for each parameter; where it finds nothing there is no row."""
        found: list[tuple[Watched, Tensor]] = []
        for parameter, watched in self._watched.items():
            try:
                x = tensor_of(parameter)
            except Exception as error:
                self._failed(watched, error)
                continue
            if x is not None:
                found.append((watched, x))
        self._recorder.record_all(found, self._failed)

    def _failed(self, watched: Watched | None, error: Exception) -> None:
        """One tensor that cannot be read does not hide the others."""
        if watched is None:
            self._failures.report("reading small tensors together", error, "Each is read alone.")
            return
        self._failures.report(f"reading {self._kind}", error, "This row is missing.", of=watched.series.name)
