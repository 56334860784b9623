"""What a report says of the optimizer: how often gradients were clipped, whether a learning rate rose for a few steps, and
which updates leave the usual band of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.ranking.ranking import capitalized
from monitor.report.facts import Facts
from monitor.report.findings import BAD, GOOD, NOT_LOOKED_AT, CheckFinding, Place
from monitor.report.history import WARM_UP, Axis, Exempt, Ints, KindHistory, SuddenBound
from monitor.report.kind_reader import KindReader
from monitor.report.trained_weights import lacked_gradient
from monitor.series import RUN_KIND
from monitor.terminal import counted

# --- How often gradients were clipped.

CHANGED: Final = 1e-6
"""The least relative change of the norm that is clipping. Less is rounding."""
LAST: Final = 100
"""Steps that count as the last ones."""
OFTEN: Final = 0.5
"""The "Deep Learning Tuning Playbook" (Godbole et al. 2023) calls more than this extremely aggressive. It is no fault: of eight
healthy trainings of small transformers with the usual limit of 1, seven clipped more often."""
OFTEN_SAID: Final = (
    " So most gradients have the norm of the limit. For SGD that is a lower learning rate; Adam's steps hardly depend on it."
)
"""Adam divides by the root of its second moment, which the limit makes as much smaller as the gradient."""


def clipped_steps(facts: Facts) -> list[int]:
    """The steps at which clipping changed the total norm of gradients."""
    return [step for step, (norm, after) in facts.norms.items() if after < norm * (1 - CHANGED)]


def share_of_clipped(facts: Facts) -> dict[str, Any] | None:
    """How often gradients were clipped, for programs; None if it is not known."""
    steps, clipped = sorted(facts.norms), set(clipped_steps(facts))
    return {"steps": len(steps), "share": _share(steps, clipped), "last": _share(steps[-LAST:], clipped)} if steps else None


def _share(steps: Sequence[int], clipped: set[int]) -> float:
    return round(len(clipped.intersection(steps)) / len(steps), 4)


def clipping(facts: Facts) -> CheckFinding:
    """How often clipping changed the gradients. No share is a fault."""
    known = share_of_clipped(facts)
    if known is None:
        return CheckFinding(NOT_LOOKED_AT, "The norms of gradients before and after clipping were not recorded.")
    says = f"Gradients were clipped in {known['share']:.0%} of {counted(known['steps'], 'step')}"
    says += f", and in {known['last']:.0%} of the last {LAST}." if known["steps"] > LAST else "."
    return CheckFinding(GOOD, says + (OFTEN_SAID if known["last"] > OFTEN else ""))


# --- A learning rate that rises for a few steps.

PEAK: Final = 10.0
"""Times all rates before. The limit is our choice."""
PEAK_STEPS: Final = 4
"""Steps after which it is back at less than twice the rate before. What takes longer may be a plan."""
_OF_PEAK: Final = "Schedules do not do this: look at what set the learning rate there."


def peak_of_rate(facts: Facts) -> CheckFinding | None:
    """The first learning rate that rose far above all rates before it, only once and for a few steps; None if there is none."""
    found = [
        (int(steps[at]), name, values, at, end)
        for name, (steps, values) in facts.rates.items()
        for at, end in _peaks(steps, values)
    ]
    if not found:
        return None
    step, name, values, at, end = min(found, key=lambda one: one[:2])
    what = name if len(facts.rates) > 1 else "the learning rate"
    says = f"{what} rose from {values[at - 1]:.3g} to {values[at:end].max():.3g} in step {step}, and fell to {values[end]:.3g}"
    return CheckFinding(BAD, f"{capitalized(says)} soon after.", Place(step, None, RUN_KIND, name), _OF_PEAK)


def _peaks(steps: Ints, values: NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Where peaks begin and end. A rate that is as high once more is planned."""
    most = np.maximum.accumulate(values)
    for at in (np.flatnonzero(values[1:] > PEAK * most[:-1]) + 1).tolist():
        near = steps[at + 1 :] <= steps[at] + PEAK_STEPS
        is_back = np.flatnonzero(near & (values[at + 1 :] < 2 * values[at - 1]))
        end = at + 1 + int(is_back[0]) if len(is_back) else 0
        if at >= WARM_UP and end and values[end:].max() < values[at] / 2:
            yield at, end


# --- The ratio of update to weight of a layer, beside the other layers.
#
# Learning rates change by plan, and the ratios of all layers with them. So each ratio is divided by the median of the ratios
# of its step, and then judged by the history of its layer: the median and the quartiles of the logarithm.

FEWEST: Final = 4
"""Tensors of which a median says how far all have changed."""
OUT_OF_BAND: Final = 10.0
"""The least factor between a ratio and the median of its history. It must also leave the band, by ``SUDDEN`` deviations."""
UPDATES_KIND: Final = "update_ratio"
_THEN: Final = "Look at the gradient and the learning rate of this layer, and whether rounding swallows its updates."


class _BesideOthers:
    """Divides the values of a step by their median, and passes them on (``RowTaker``).

    Steps with fewer than ``FEWEST`` positive values are left out, such as the last one of a schedule that ends at 0.
    """

    def __init__(self, history: KindHistory) -> None:
        self._history = history

    def add(self, step: Ints, micro_step: Ints, series: Ints, rank: Ints, values: NDArray[np.float64]) -> None:
        relative = np.full(len(values), np.nan)
        begins = np.flatnonzero(np.diff(step, prepend=step[:1] - 1))
        for first, end in zip(begins, [*begins[1:], len(step)], strict=True):
            of = values[first:end]
            positive = of[np.isfinite(of) & (of > 0)]
            if len(positive) >= FEWEST:
                relative[first:end] = of / np.median(positive)
        kept = np.isfinite(relative)  # other checks name what is not finite
        self._history.add(step[kept], micro_step[kept], series[kept], rank[kept], relative[kept])


def updates_of_layers(facts: Facts) -> CheckFinding:
    """Whether the update of a layer rises above its usual band, or stops, while others stay in theirs."""
    if UPDATES_KIND not in facts.kinds:
        return CheckFinding(NOT_LOOKED_AT, "They were not recorded.")
    rows = KindReader(facts.source, UPDATES_KIND, UPDATES_KIND)
    bound = SuddenBound(OUT_OF_BAND, of_few=math.inf)
    history = KindHistory(Axis(facts.axis.steps, 1), len(facts.ranks), bound=bound, exempt=Exempt(rows.of_few))
    rows.feed(_BesideOthers(history))
    if not history.judged:
        return CheckFinding(NOT_LOOKED_AT, f"There are not {FEWEST} tensors with more than {WARM_UP} recorded values.")
    # A weight that began at 0 has ever smaller ratios.
    found = [
        event
        for event in history.events
        if event.value > event.typical or (not event.value and not lacked_gradient(facts, rows, event.series, event.step))
    ]
    if not found:
        return CheckFinding(GOOD, f"{history.judged:,} ratios of update to weight are in the usual band of their layer.")
    one = min(found, key=lambda event: (event.step, event.series))
    name, rank = rows.series[one.series][1], facts.ranks[one.rank]
    changed = f"{one.value / one.typical:.3g} times its usual share of the update of all layers"
    says = f"{UPDATES_KIND} {name} on rank {rank} in step {one.step}: it is {changed}."
    return CheckFinding(BAD, says, Place(one.step, rank, UPDATES_KIND, facts.shown_name(UPDATES_KIND, name)), _THEN)
