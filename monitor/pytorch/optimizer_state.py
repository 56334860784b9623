"""Moments of the optimizer, read before its step: the first step of a fresh optimizer has none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.parameter_series import NamedParameter, ParameterSeries, SeriesOf
from monitor.pytorch.recorder import Recorder
from monitor.series import MOMENT_KINDS


class MomentCollector:
    """``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq``."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        recorder: Recorder,
        series_of: SeriesOf,
        failures: Failures,
        framework: Framework,
    ) -> None:
        self._series = {kind: ParameterSeries(kind, parameters, recorder, series_of, failures) for kind in MOMENT_KINDS}
        self._framework = framework

    def before_step(self, optimizer: Optimizer) -> None:
        """Read the state of the torch optimizer that is about to step."""
        for kind, series in self._series.items():

            def moment(parameter: NamedParameter, kind: str = kind) -> Tensor | None:
                return self._framework.moment(kind, parameter, optimizer)

            series.record_all(moment)
