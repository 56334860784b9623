"""What every collector of rows of parameters is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monitor.capture.parameter_series import NamedParameter, ParameterSeries, SeriesOf, Tensors
from monitor.failures import Failures


@dataclass(frozen=True, slots=True)
class WatchedParameters:
    """The parameters of one attachment, where their numbers are, and where these go.

    Attributes:
        is_reduced: Whether a gradient is known to lack no rank's part, when the optimizer's step begins.
        kinds: Those that this rank is to record of any of the parameters.
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
