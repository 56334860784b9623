"""Collectors of weights and optimizer moments around the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monitor.failures import Failures
from monitor.recording.optimizer_turns import OptimizerTurn
from monitor.recording.parameter_series import NamedParameter, ParameterSeries, SeriesOf, Tensors
from monitor.series import MOMENT_KINDS


@dataclass(frozen=True, slots=True)
class ParameterContext:
    """What the collectors of one attachment share: parameters, framework adapter and recorder.

    Attributes:
        is_reduced: Whether a gradient is known to contain every rank's part when the optimizer's step begins.
        kinds: The kinds that this rank records for at least one parameter.
    """

    parameters: Sequence[NamedParameter]
    recorder: Any
    series_of: SeriesOf
    failures: Failures
    framework: Any
    tensors: Tensors
    note: Callable[[str, str], None]
    is_reduced: Callable[[NamedParameter, Any], bool]
    kinds: set[str] = field(default_factory=set)

    def series(self, kind: str) -> ParameterSeries:
        """The series of one kind."""
        found = ParameterSeries(kind, self.parameters, self.recorder, self.series_of, self.failures, self.tensors)
        self.kinds.update([kind] if found.is_recorded else [])
        return found


class WeightCollector:
    """``param_origin`` and ``param_updated``: weights before and after the step; master weights if the optimizer has them."""

    def __init__(self, watched: ParameterContext) -> None:
        self._origin = watched.series("param_origin")
        self._updated = watched.series("param_updated")
        self._framework = watched.framework

    def before_step(self, stepping: OptimizerTurn) -> None:
        self._origin.record_all(self._framework.weight, stepping.held)

    def after_step(self, stepping: OptimizerTurn) -> None:
        self._updated.record_all(self._framework.weight, stepping.held)


class MomentCollector:
    """``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq``, read before the step: a new optimizer has none in its first step."""

    def __init__(self, watched: ParameterContext) -> None:
        self._series = {kind: watched.series(kind) for kind in MOMENT_KINDS}
        self._framework = watched.framework
        self._note = watched.note
        self._noted = 0

    def before_step(self, stepping: OptimizerTurn) -> None:
        """Record the moments of the optimizer that is about to step."""
        stepped = self._framework.held(stepping.optimizer)
        for kind, series in self._series.items():

            def moment(parameter: NamedParameter, kind: str = kind) -> Any:
                if stepped is not None and id(parameter.tensor) not in stepped:
                    return None  # frozen: its state is from earlier steps
                return self._framework.moment(kind, parameter, stepping.optimizer)

            series.record_all(moment, stepping.held)
        self._note_absences()

    def _note_absences(self) -> None:
        """Note in the manifest which optimizer state has no rows, because it is not a moment of one parameter."""
        absent = self._framework.unusable_state
        if len(absent) > self._noted:
            self._noted = len(absent)
            self._note("optimizer_state", "; ".join(absent))
