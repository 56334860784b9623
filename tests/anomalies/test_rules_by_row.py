"""Whole columns give the events that the rules give when they are followed row by row, number by number."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, strategies as st
from rule_parts import INF, NAN, Event, Watched
from sink_rows import Measured, partials_of

from monitor.stats.partials import COUNT, MAX, MIN, NANS, NEGINFS, POSINFS, SUM, SUMSQ

Row = list[float]
Said = tuple[str, float, float | None]
VALUES = st.sampled_from([0.0, 1.0, 1.0, 1.1, -1.0, -1.02, 3.0, -7.5, 1e-9, 1e150, NAN, INF, -INF])
TENSORS = st.lists(VALUES, max_size=3)
KEYS = st.tuples(st.sampled_from(["actv", "grad_reduced"]), st.sampled_from("abc"), st.integers(-1, 1))
STEPS = st.lists(st.dictionaries(KEYS, TENSORS, max_size=6), min_size=1, max_size=8)
RULES = st.lists(
    st.tuples(st.just("AnomalyNan"), st.sampled_from([None, 2.0]))
    | st.tuples(st.just("AnomalyTurbulence"), st.sampled_from([0.0, 0.3, 0.5, 2.0])),
    min_size=1,
    max_size=3,
)


def nonfinite(row: Row) -> bool:
    return row[NANS] + row[POSINFS] + row[NEGINFS] > 0


class NanByRow:
    """``AnomalyNan`` of one row."""

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold

    def judge(self, row: Row) -> list[Said]:
        if row[NANS]:
            return [("nans", row[NANS], None)]
        if row[POSINFS] + row[NEGINFS]:
            return [("infs", row[POSINFS] + row[NEGINFS], None)]
        largest = max(abs(row[MIN]), abs(row[MAX])) if row[COUNT] else 0.0
        return [("absmax", largest, None)] if self._threshold is not None and largest > self._threshold else []


class TurbulenceByRow:
    """``AnomalyTurbulence`` of one row."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._norm = self._mean = 0.0
        self._seen = 0

    def judge(self, row: Row) -> list[Said]:
        if nonfinite(row):
            return [("norm", NAN if row[NANS] else INF, None)]
        if not row[COUNT]:
            return []
        norm, mean = math.sqrt(row[SUMSQ]), row[SUM] / row[COUNT]
        if self._norm == 0:
            self._norm, self._mean, self._seen = norm, mean, 1
            return []
        scale = self._norm * (1 / math.sqrt(row[COUNT]))
        share = 1 / math.sqrt(row[COUNT])
        magnitude = scale if abs(self._mean) < self._norm * (share * max(0.1, 2 * share)) else abs(self._mean)
        self._seen = min(self._seen + 1, 100)
        before = self._norm, self._mean
        fired_norm, self._norm = self._moved(norm, self._norm, self._norm)
        fired_mean, self._mean = self._moved(mean, self._mean, magnitude)
        found = [("norm", norm, before[0])] if fired_norm else []
        return [*found, ("mean", mean, before[1])] if fired_mean else found

    def _moved(self, value: float, mean: float, magnitude: float) -> tuple[bool, float]:
        """Whether the value fires, and the mean with it."""
        bound, off = self._threshold * magnitude, value - mean
        return abs(off) > bound, mean + min(max(off, -bound), bound) * (1 / self._seen)


class ByRow:
    """All rules of all rows."""

    def __init__(self, rules: list[tuple[str, Any]]) -> None:
        self._rules = rules
        self._known: dict[Any, list[NanByRow | TurbulenceByRow]] = {}

    def step(self, rows: dict[Any, list[float]]) -> set[Event]:
        return {event for key, values in rows.items() for event in self._events(key, partials_of(values))}

    def _events(self, key: Any, row: Row) -> list[Event]:
        made = [TurbulenceByRow(t) if name == "AnomalyTurbulence" else NanByRow(t) for name, t in self._rules]
        judged = [rule.judge(row) for rule in self._known.setdefault(key, made)]  # each of them remembers the row
        said = ((name, found) for (name, _), found in zip(self._rules, judged, strict=True) if found)
        name, first = next(said, ("", []))
        return [Event(*key, name, op, float(value), mean and float(mean)) for op, value, mean in first]


def spelled(events: Any) -> list[str]:
    """NaN is not equal to itself; its spelling is."""
    return sorted(map(repr, events))


@given(RULES, STEPS)
def test_columns_and_rows_give_the_same_events(rules: list[tuple[str, Any]], steps: list[dict[Any, list[float]]]) -> None:
    watched, by_row = Watched(*rules), ByRow(rules)
    for rows in steps:
        kinds: dict[str, list[Measured]] = {}
        for (kind, name, micro_step), values in rows.items():
            kinds.setdefault(kind, []).append(Measured(name, values, micro_step))
        assert spelled(watched.step(kinds)) == spelled(by_row.step(rows))
