"""Moments of the optimizer, read before its step: the first step of a fresh optimizer has none."""

from __future__ import annotations

from typing import Any

from monitor.capture.optimizer_turns import Stepping
from monitor.capture.parameter_series import NamedParameter
from monitor.capture.watched_parameters import WatchedParameters
from monitor.series import MOMENT_KINDS


class MomentCollector:
    """``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq``."""

    def __init__(self, watched: WatchedParameters) -> None:
        self._series = {kind: watched.series(kind) for kind in MOMENT_KINDS}
        self._framework = watched.framework
        self._note = watched.note
        self._noted = 0

    def before_step(self, stepping: Stepping) -> None:
        """Read the state of the optimizer that is about to step."""
        stepped = self._framework.held(stepping.optimizer)
        for kind, series in self._series.items():

            def moment(parameter: NamedParameter, kind: str = kind) -> Any:
                if stepped is not None and id(parameter.tensor) not in stepped:
                    return None  # frozen: state that was left of earlier steps is of no step now
                return self._framework.moment(kind, parameter, stepping.optimizer)

            series.record_all(moment, stepping.held)
        self._note_absences()

    def _note_absences(self) -> None:
        """Say in the manifest which state of an optimizer is no moment of one parameter, and so has no rows."""
        absent = self._framework.unusable_state
        if len(absent) > self._noted:
            self._noted = len(absent)
            self._note("optimizer_state", "; ".join(absent))
