"""What every collector of rows of parameters is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.parameter_series import NamedParameter, ParameterSeries, SeriesOf
from monitor.pytorch.recorder import Recorder


@dataclass(frozen=True, slots=True)
class WatchedParameters:
    """The parameters of one attachment, where their numbers are, and where these go."""

    parameters: Sequence[NamedParameter]
    recorder: Recorder
    series_of: SeriesOf
    failures: Failures
    framework: Framework

    def series(self, kind: str) -> ParameterSeries:
        """The series of one kind."""
        return ParameterSeries(kind, self.parameters, self.recorder, self.series_of, self.failures)
