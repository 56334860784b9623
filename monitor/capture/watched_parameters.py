"""What every collector of rows of parameters is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monitor.capture.parameter_series import NamedParameter, ParameterSeries, SeriesOf, Tensors
from monitor.failures import Failures


@dataclass(frozen=True, slots=True)
class WatchedParameters:
    """The parameters of one attachment, where their numbers are, and where these go."""

    parameters: Sequence[NamedParameter]
    recorder: Any
    series_of: SeriesOf
    failures: Failures
    framework: Any
    tensors: Tensors

    def series(self, kind: str) -> ParameterSeries:
        """The series of one kind."""
        return ParameterSeries(kind, self.parameters, self.recorder, self.series_of, self.failures, self.tensors)
