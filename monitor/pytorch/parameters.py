"""Weights, before and after the optimizer's step, and what every kind of parameter row shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from monitor.failures import Failures
from monitor.pytorch.recorder import Recorder, Watched
from monitor.series import NO_MICRO_STEP, Series

Owns = Callable[[str, "NamedParameter"], bool]
"""Whether this rank writes a kind of a parameter, or leaves it to the rank that holds the same numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedParameter:
    """A watched parameter.

    Attributes:
        chunk: Virtual pipeline stage.
        name: As it stands in rows.
    """

    chunk: int
    name: str
    tensor: nn.Parameter


class ParameterSeries:
    """The series of one kind: one for each parameter that this rank writes."""

    def __init__(
        self,
        kind: str,
        parameters: Iterable[NamedParameter],
        recorder: Recorder,
        owns: Owns,
        failures: Failures,
        micro_steps: tuple[int, ...] = (NO_MICRO_STEP,),
    ) -> None:
        self._kind = kind
        self._recorder = recorder
        self._failures = failures
        self._watched = {
            parameter: Watched(Series(kind, parameter.chunk, parameter.name), micro_steps)
            for parameter in parameters
            if owns(kind, parameter)
        }

    @property
    def parameters(self) -> Sequence[NamedParameter]:
        return tuple(self._watched)

    def __len__(self) -> int:
        return len(self._watched)

    def record(self, parameter: NamedParameter, x: Tensor, micro_step: int = 0) -> None:
        """Record one parameter's tensor, if this rank writes it."""
        watched = self._watched.get(parameter)
        if watched is None:
            return
        try:
            self._recorder.record(watched, x, micro_step, aliases=False)
        except Exception as error:
            self._failed(watched, error)

    def record_all(self, tensor_of: Callable[[NamedParameter], Tensor | None]) -> None:
        """Record what ``tensor_of`` finds for each parameter; where it finds nothing there is no row."""
        found = ((watched, tensor_of(parameter)) for parameter, watched in self._watched.items())
        self._recorder.record_all([(watched, x) for watched, x in found if x is not None], self._failed)

    def _failed(self, watched: Watched | None, error: Exception) -> None:
        """One tensor that cannot be read does not hide the others."""
        if watched is None:
            self._failures.report("reading small tensors together", error, "Each is read alone.")
            return
        self._failures.report(f"reading {self._kind}", error, "This row is missing.", of=watched.series.name)


class WeightCollector:
    """``param_origin`` and ``param_updated``."""

    def __init__(self, parameters: Sequence[NamedParameter], recorder: Recorder, owns: Owns, failures: Failures) -> None:
        self._origin = ParameterSeries("param_origin", parameters, recorder, owns, failures)
        self._updated = ParameterSeries("param_updated", parameters, recorder, owns, failures)

    def before_step(self) -> None:
        self._origin.record_all(_weight)

    def after_step(self) -> None:
        self._updated.record_all(_weight)


def _weight(parameter: NamedParameter) -> Tensor:
    return parameter.tensor
