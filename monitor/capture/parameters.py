"""Weights, before and after the optimizer's step: master weights where the optimizer steps those."""

from __future__ import annotations

from monitor.capture.optimizer_turns import Stepping
from monitor.capture.watched_parameters import WatchedParameters


class WeightCollector:
    """``param_origin`` and ``param_updated``."""

    def __init__(self, watched: WatchedParameters) -> None:
        self._origin = watched.series("param_origin")
        self._updated = watched.series("param_updated")
        self._framework = watched.framework

    def before_step(self, stepping: Stepping) -> None:
        self._origin.record_all(self._framework.weight, stepping.held)

    def after_step(self, stepping: Stepping) -> None:
        self._updated.record_all(self._framework.weight, stepping.held)
