"""The load of the experts of routers, from rows of ``moe_router_load_hook``.

A router has a row of its own, and each of its experts has one with the number of assignments to it. Counts add over calls,
micro-steps and ranks. What compares experts with each other, such as a percentile, does not: it is computed from the rows of
the experts, after these were added.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.series import Series, SeriesTable
from monitor.stats.features import ASSIGNED, ROUTERS, SUMMARY
from monitor.stats.partials import Floats, Partials

Index = NDArray[np.int64]

LOAD_KIND: Final = "moe_router_load_hook"
NO_EXPERT: Final = -1
"""The number in a row of a router as a whole."""

SHARES: Final = (0.05, 0.5, 0.95)
"""The percentiles over the experts, interpolated linearly."""

_NAME: Final = re.compile(r"(?P<router>.*\.experts)(?:\.(?P<expert>\d+))?(?P<call>#\d+)?", re.DOTALL)


def expert_name(router: str, expert: int) -> str:
    """The name of an expert's row: ``mlp.gate.experts.3#1`` for the router's row ``mlp.gate.experts#1``."""
    found = _NAME.fullmatch(router)
    assert found is not None
    return f"{found['router']}.{expert}{found['call'] or ''}"


def router_and_expert(name: str) -> tuple[str, int]:
    """The name of the router's row and the expert's number, for the name of a row."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name, NO_EXPERT
    expert = NO_EXPERT if found["expert"] is None else int(found["expert"])
    return f"{found['router']}{found['call'] or ''}", expert


def summaries(router: Index, expert: Index, assigned: Floats) -> Floats:
    """What compares the experts of each router, shape ``(len(SUMMARY), routers)``, in the order of ``SUMMARY``.

    NaN for a router without assignments, or of which the rows of some experts are missing.

    Args:
        router: Number of each row's router, from 0 on.
        expert: Number of each row's expert, ``NO_EXPERT`` for the row of the router itself.
        assigned: Number of assignments to the expert, or of all assignments of the router.
    """
    routers = int(router.max()) + 1 if len(router) else 0
    found, whole = np.full((len(SUMMARY), routers), np.nan), np.full(routers, np.nan)
    own = expert == NO_EXPERT
    whole[router[own]] = assigned[own]
    rows = np.flatnonzero(~own)
    rows = rows[np.argsort(router[rows], kind="stable")]
    sizes = np.bincount(router[rows], minlength=routers)
    starts = np.cumsum(sizes) - sizes
    for experts in np.unique(sizes[sizes > 0]).tolist():
        alike = np.flatnonzero(sizes == experts)
        counts = assigned[rows[starts[alike][:, None] + np.arange(experts)]]
        total = counts.sum(axis=1)
        known = (total == whole[alike]) & (total > 0)
        found[:, alike[known]] = _of_counts(counts[known], total[known])
    return found


def _of_counts(counts: Floats, total: Floats) -> Floats:
    """In the order of ``SUMMARY``, for counts of shape ``(routers, experts)``."""
    percentiles = np.quantile(counts, SHARES, axis=1) / total
    imbalance = counts.max(axis=1) * counts.shape[1] / total
    summary: Floats = np.array([*percentiles, imbalance, (counts == 0).sum(axis=1)])
    return summary


class ExpertIndex:
    """The router and the expert of each series of a table, which only grows."""

    def __init__(self) -> None:
        self._known: Index = np.zeros((2, 0), dtype=np.int64)

    def of(self, series: SeriesTable) -> Index:
        """The number of the router's series, and the number of the expert; shape ``(2, series)``."""
        first = self._known.shape[1]
        if len(series) > first:
            new = [self._of_one(series, number) for number in range(first, len(series))]
            self._known = np.concatenate([self._known, np.array(new, dtype=np.int64).T], axis=1)
        return self._known

    def _of_one(self, series: SeriesTable, number: int) -> tuple[int, int]:
        one = series[number]
        if one.kind != LOAD_KIND:
            return number, NO_EXPERT
        router, expert = router_and_expert(one.name)
        return (
            (number, NO_EXPERT) if expert == NO_EXPERT else (series.index_of(Series(LOAD_KIND, one.vpp_stage, router)), expert)
        )


def with_summaries(index: Index, series: Index, micro_step: Index, partials: Partials) -> Partials:
    """The rows of a step, with ``SUMMARY`` in the rows of routers.

    Args:
        index: Of ``ExpertIndex``.
        series, micro_step: Those of each row.
    """
    router, expert = index[:, series]
    micro_steps = int(micro_step.max()) + 2 if len(micro_step) else 1
    _, number = np.unique(router * micro_steps + micro_step + 1, return_inverse=True)
    found = summaries(number, expert, partials.columns[ASSIGNED])
    rows = np.flatnonzero((expert == NO_EXPERT) & ~np.isnan(found[0, number]))
    columns = partials.columns.copy()
    columns[ROUTERS, rows] = 1.0  # of all micro-steps that were combined
    for column, values in zip(SUMMARY, found, strict=True):
        columns[column, rows] = values[number[rows]]
    return Partials(columns, partials.histogram)
