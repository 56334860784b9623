"""Which weights have no gradients, or have none any more. It is no fault by itself: a training may freeze weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from monitor.query.sources import RowChoice
from monitor.report.facts import Facts, regular_steps
from monitor.report.findings import GOOD, NOT_LOOKED_AT, CheckFinding, first_names
from monitor.report.history import ROUNDING_SHARE
from monitor.report.kind_reader import GLOBAL_NAME, KindReader
from monitor.series import PARAMETER_KINDS
from monitor.terminal import counted

LOOKED_AT: Final = ("grad_reduced", "grad_unreduced")
"""Kinds of gradients. One is looked at, the first that was recorded."""

SILENT_STEPS: Final = 16
"""Recorded steps without a gradient after which a weight is named. Our choice: an expert may have no token for a few steps."""

_IF_FROZEN: Final = "That is right if they were frozen; if not, look for what cut them off from the loss."


def trained_weights(facts: Facts) -> CheckFinding:
    """Whether every weight had a gradient in the last steps."""
    last, steps = _last_steps(facts)
    if len(steps) < SILENT_STEPS:
        return CheckFinding(NOT_LOOKED_AT, f"There are not {SILENT_STEPS} steps of which gradients are known to be recorded.")
    weights = {name for one in PARAMETER_KINDS if one in facts.kinds for name in facts.kinds[one].names}
    never = sorted(weights - last.keys()) if weights >= last.keys() else []
    every = len(last) + len(never)
    ended = [*without_gradients(facts)]
    says, noted = "", ""
    if ended:
        since = sorted({next(step for step in steps if step > last[name]) for name in ended})
        when = f"steps {since[0]} to {since[-1]}" if len(since) > 1 else f"step {since[0]}"
        says = f"Since {when}, no gradient was recorded of {_some(ended, every)}. "
        noted = says + _IF_FROZEN
    if never:
        says += f"No gradient at all was recorded of {_some(never, every)}."
    every_one = f"{'All ' if every > 1 else ''}{counted(every, 'weight')}"
    says = says.strip() or f"{every_one} had a gradient in the last {SILENT_STEPS} steps."
    still = _no_rate(facts)
    return CheckFinding(GOOD, f"{says} {still}".strip(), then=f"{noted} {still}".strip())


def _no_rate(facts: Facts) -> str:
    """What is said of learning rates that are all 0 in the last steps: schedules may end too early."""
    moving = max((int(steps[greatest != 0].max(initial=-1)) for steps, greatest in facts.rates.values()), default=-1)
    after = sorted({step for steps, _ in facts.rates.values() for step in steps.tolist() if step > moving})
    if len(after) < SILENT_STEPS:
        return ""
    return f"The learning rate has been 0 since step {after[0]}, so weights do not change. Look at its schedule if they should."


def without_gradients(facts: Facts) -> dict[str, int]:
    """The weights whose gradients ended, each with the last step in which it had one, in order of execution."""
    last, steps = _last_steps(facts)
    return {name: step for name, step in last.items() if step < steps[-SILENT_STEPS]} if len(steps) >= SILENT_STEPS else {}


def lacked_gradient(facts: Facts, updates: KindReader, series: int, step: int) -> bool:
    """Whether a weight had no gradient in a step, as far as that is known, or one of rounding. Then the optimizer may leave it.

    Args:
        updates: The rows of ``update_ratio``. ``series`` is a number among them.
    """
    if not _kind_of_gradients(facts):
        return False
    there = _gradients(facts, step)
    if there:
        return updates.series[series][1] not in there or is_of_rounding(facts, updates, series, step)
    name = updates.names[series]
    return step > without_gradients(facts).get(name, step)


def is_of_rounding(facts: Facts, rows: KindReader, series: int, step: int) -> bool:
    """Whether the gradient of a weight in a step is so small beside the greatest one that it may be rounding alone, as that of
    a bias in front of a BatchNorm is.

    Args:
        rows: Rows of weights. ``series`` is a number among them.
    """
    return _gradients(facts, step).get(rows.series[series][1], np.nan) < ROUNDING_SHARE


def _gradients(facts: Facts, step: int) -> Mapping[str, float]:
    """By weight, the norm of its gradient in a step as a share of the greatest one; NaN if it is not known."""
    kind = _kind_of_gradients(facts)
    if step not in facts.gradients:
        columns = "name", GLOBAL_NAME, *(("norm",) if kind and "norm" in facts.kinds[kind].ops else ())
        rows = facts.source.rows(RowChoice(kind, steps=range(step, step + 1), columns=columns)).to_pylist() if kind else []
        norms = np.array([one.get("norm") for one in rows], dtype=np.float64)  # None becomes NaN
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = norms / np.fmax.reduce(norms, initial=np.nan)
        facts.gradients[step] = dict(zip((one[GLOBAL_NAME] or one["name"] for one in rows), shares.tolist(), strict=True))
    return facts.gradients[step]


def _kind_of_gradients(facts: Facts) -> str:
    """The one of ``LOOKED_AT`` that is looked at; empty if none was recorded."""
    return next((one for one in LOOKED_AT if one in facts.kinds), "")


def _last_steps(facts: Facts) -> tuple[dict[str, int], list[int]]:
    """The last step of any rank with a gradient of each weight, in order of execution; and the steps that should have some.
    There are none if the configuration was changed, which may have left weights out.
    """
    kind = _kind_of_gradients(facts)
    if not kind or any(len(one.configurations) > 1 for one in facts.manifests.values()):
        return {}, []
    names, history = facts.kinds[kind].names, facts.histories[kind]
    series, of_pair = np.unique(history.pair_series, return_inverse=True)
    latest = np.full(len(series), -1, np.int64)
    np.maximum.at(latest, of_pair, history.last)
    last = {names[one]: step for one, step in zip(series.tolist(), latest.tolist(), strict=True)}
    return last, regular_steps(facts, kind).tolist()


def _some(names: Sequence[str], every: int) -> str:
    return f"{len(names):,} of {counted(every, 'weight')} ({first_names(names)})"
