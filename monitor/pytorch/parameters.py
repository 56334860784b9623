"""Weights, before and after the optimizer's step: master weights where the optimizer steps those."""

from __future__ import annotations

from collections.abc import Sequence

from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.parameter_series import NamedParameter, ParameterSeries, SeriesOf
from monitor.pytorch.recorder import Recorder


class WeightCollector:
    """``param_origin`` and ``param_updated``."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        recorder: Recorder,
        series_of: SeriesOf,
        failures: Failures,
        framework: Framework,
    ) -> None:
        self._origin = ParameterSeries("param_origin", parameters, recorder, series_of, failures)
        self._updated = ParameterSeries("param_updated", parameters, recorder, series_of, failures)
        self._framework = framework

    def before_step(self) -> None:
        self._origin.record_all(self._framework.weight)

    def after_step(self) -> None:
        self._updated.record_all(self._framework.weight)
