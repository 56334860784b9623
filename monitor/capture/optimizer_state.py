"""Moments of the optimizer, read before its step: the first step of a fresh optimizer has none."""

from __future__ import annotations

from typing import Any

from monitor.capture.parameter_series import NamedParameter
from monitor.capture.watched_parameters import WatchedParameters
from monitor.series import MOMENT_KINDS


class MomentCollector:
    """``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq``."""

    def __init__(self, watched: WatchedParameters) -> None:
        self._series = {kind: watched.series(kind) for kind in MOMENT_KINDS}
        self._framework = watched.framework

    def before_step(self, optimizer: Any) -> None:
        """Read the state of the optimizer that is about to step."""
        for kind, series in self._series.items():

            def moment(parameter: NamedParameter, kind: str = kind) -> Any:
                return self._framework.moment(kind, parameter, optimizer)

            series.record_all(moment)
