"""``ur_distribution``: what Adam makes of its moments, as histograms.

The update as the optimizer applies it, before the learning rate, and the ratio of the moments, corrected for their bias where
the optimizer corrects it. See ``monitor.mindspore.frameworks.adam`` for what each of MindSpore's Adams does.
"""

from __future__ import annotations

from monitor.mindspore.features.reading import is_floating_point
from monitor.mindspore.frameworks.adam import Moments
from monitor.recording.optimizer_turns import Stepping
from monitor.recording.parameter_series import Computed, NamedParameter
from monitor.recording.parameters import WatchedParameters
from monitor.recording.updates import UpdateCollector
from monitor.stats.mindspore.updates import Signed, adam_vectors


class AdamCollector(UpdateCollector):
    """``adam_update`` and ``adam_ratio``."""

    def __init__(self, watched: WatchedParameters, eps: float) -> None:
        self._update = watched.series("adam_update")
        self._ratio = watched.series("adam_ratio")
        self._framework = watched.framework
        self._failures = watched.failures
        self._eps = eps

    def after_step(self, stepping: Stepping) -> None:
        if not self._framework.is_adam(stepping.optimizer):
            name = type(stepping.optimizer).__name__
            said = f"ur_distribution records what Adam makes of its moments, and {name} is no Adam"
            self._failures.warn("ur_distribution", f"{said} that is known here: no rows.")
            return
        counted: dict[NamedParameter, Computed] = {}

        def update(parameter: NamedParameter) -> Computed | None:
            moments = self._framework.adam_of(parameter)
            given = self._framework.reduced(parameter)
            if moments is None or given is None or not is_floating_point(moments.mean):
                return None
            updates, ratios = self._vectors(moments)
            counted[parameter] = _computed(ratios, moments)
            return _computed(updates, moments)

        self._update.record_computed(update, stepping.held)
        self._ratio.record_computed(lambda parameter: counted.pop(parameter, None), stepping.held)

    def _vectors(self, moments: Moments) -> tuple[Signed, Signed]:
        return adam_vectors(
            moments.mean,
            moments.square,
            moments.mean_correction,
            moments.square_correction,
            moments.eps,
            self._eps,
            eps_on_root=moments.eps_on_root,
        )


def _computed(vector: Signed, moments: Moments) -> Computed:
    return Computed(vector.numbers(), moments.mean, vector.histogram())
