"""The scanner: applies every rule to every step, kind by kind, and passes the findings to listeners."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import ClassVar, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.events import Signal
from monitor.series import NO_MICRO_STEP, REPLICA_KIND, Series, SeriesTable, is_input, underlying_series
from monitor.stats.features import own_columns
from monitor.stats.ops import derive
from monitor.stats.partials import MAX, NANS, NEGINFS, POSINFS, Floats, KindRows, Partials
from monitor.stats.table import StepRows

# --- The rules' state of rows, aligned with the rows of the current step.

MOST_ABSENT: Final = 200_000
"""The state of absent rows is kept up to this number, or twice the rows of the step: names may be new in every step."""


class RowStates:
    """The state of each seen (series, micro-step) of a kind, in columns.

    The rows of the last step come first, in their order; absent rows follow, the longest absent last. A step with the same
    rows as the last, the usual case, costs one comparison; a step with other rows rearranges all columns.
    """

    def __init__(self, fields: int) -> None:
        self._series = self._micro_step = np.zeros(0, np.int64)
        self._columns = np.zeros((fields, 0))
        self._present = 0

    def with_rows(self, rows: KindRows) -> Floats:
        """The state of these rows, shape ``(fields, rows)``, to be changed in place; zeros for new rows."""
        here = slice(0, self._present)
        if not (np.array_equal(rows.series, self._series[here]) and np.array_equal(rows.micro_step, self._micro_step[here])):
            self._rearrange(rows)
        return self._columns[:, : self._present]

    def _rearrange(self, rows: KindRows) -> None:
        known = len(self._series)
        series, micro_step = np.append(self._series, rows.series), np.append(self._micro_step, rows.micro_step)
        keys = series * (micro_step.max(initial=NO_MICRO_STEP) + 2) + micro_step + 1
        source = _places(keys[:known], keys[known:])
        absent = np.ones(known + 1, np.bool_)
        absent[source] = absent[known] = False
        rest = np.flatnonzero(absent)[: max(MOST_ABSENT, 2 * len(rows))]
        new = np.zeros((len(self._columns), 1))
        self._columns = np.append(self._columns, new, axis=1).take(np.append(source, rest), axis=1)
        self._series = np.append(rows.series, self._series[rest])
        self._micro_step = np.append(rows.micro_step, self._micro_step[rest])
        self._present = len(rows)


def _places(known: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The index of each wanted key among the known ones; ``len(known)`` if it is not known."""
    order = np.argsort(known, kind="stable")  # fast, since call order is nearly sorted
    place = np.searchsorted(known, wanted, sorter=order)
    found = np.append(order, len(known))[place]
    found[np.append(known, -1)[found] != wanted] = len(known)
    return found


# --- Input and output of a rule: whole columns, never single rows.

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class KindColumns:
    """The rows of one kind in one step: the input of rules.

    Attributes:
        names: Returns the name of the series of each row.
    """

    kind: str
    partials: Partials
    names: Callable[[], Sequence[str]]

    @cached_property
    def nonfinite(self) -> Flags | None:
        """Which rows are of tensors that hold a NaN or an Inf; None if no row is, the usual case."""
        counts = self.partials.columns[NANS : NEGINFS + 1]
        if not counts.size or counts.max() <= 0:
            return None
        flags: Flags = np.logical_or.reduce(counts, axis=0)
        return flags

    @cached_property
    def faulty(self) -> Flags | None:
        """Those of ``nonfinite`` that are no additive mask, as attention is given; None if no row is. A mask is an input of a
        module, its greatest element is 0, and others are -Inf.
        """
        bad = self.nonfinite
        if bad is None or self.kind != "actv":
            return bad
        of = self.partials.columns
        masks = np.flatnonzero((of[NEGINFS] > 0) & (of[NANS] + of[POSINFS] == 0) & (of[MAX] == 0))
        names = self.names() if len(masks) else ()
        flags = bad.copy()
        flags[[row for row in masks.tolist() if is_input(names[row])]] = False
        return flags if flags.any() else None


@dataclass(frozen=True, slots=True)
class Fired:
    """The rows that a rule fired on because of one statistic.

    Attributes:
        op: The statistic.
        rows: Indices of the rows, ascending.
        means: The running mean that each value was compared with; None for a rule without running means.
        nonfinite: Whether the rule fired because of a NaN or an Inf.
    """

    op: str
    rows: NDArray[np.int64]
    means: Floats | None = None
    nonfinite: bool = False

    def among(self, chosen: Flags) -> Fired:
        """The rows for which ``chosen``, aligned with ``rows``, is true."""
        means = None if self.means is None else self.means[chosen]
        return Fired(self.op, self.rows[chosen], means, self.nonfinite)


class AnomalyRule(Protocol):
    """An alert rule. The state of each row is outside, in ``state``, so that one object judges every kind.

    Attributes:
        name: Its name in the configuration.
        fields: The number of state values per row.
        judges_features: Whether it judges kinds with columns of their own, too.
        advice: What to look at next if an event of this rule is an origin. Empty: the ranking derives it from the place of the
            fault, as for a NaN or a deviation.
    """

    name: ClassVar[str]
    fields: ClassVar[int]
    judges_features: ClassVar[bool]
    advice: ClassVar[str]

    def judge(self, columns: KindColumns, state: Floats, /) -> Iterable[Fired]:
        """Judge the rows. Fires at most once on a row of a tensor that holds a NaN or an Inf.

        Args:
            state: Shape ``(fields, rows)``, aligned with the rows, changed in place; zeros for new rows.
        """


# --- The findings of one step, in columns. Only findings that are shown or kept become events.


class RuleFinding(NamedTuple):
    """One statistic of one row that a rule fired on.

    Attributes:
        series: Index in the rank's ``SeriesTable``.
    """

    call_id: int
    series: int
    micro_step: int
    signal: Signal
    nonfinite: bool


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """The findings of one rule and one statistic in the rows of one kind, in call order."""

    rule: str
    kind: str
    rows: KindRows
    fired: Fired

    def __len__(self) -> int:
        return len(self.fired.rows)

    @property
    def cause(self) -> tuple[str, str]:
        """Rule and statistic."""
        return self.rule, self.fired.op

    def first(self, most: int, table: SeriesTable) -> Iterator[RuleFinding]:
        """The first ``most`` findings in the order of ``time_of``."""
        fired, order = self.fired, self._order(table)[:most]
        rows = fired.rows[order]
        values, _ = derive(fired.op, self.rows.partials.take(rows))
        columns = (column[rows].tolist() for column in (self.rows.call_id, self.rows.series, self.rows.micro_step))
        means = [None] * len(rows) if fired.means is None else fired.means[order].tolist()
        for call_id, series, micro_step, value, mean in zip(*columns, values.tolist(), means, strict=True):
            yield RuleFinding(call_id, series, micro_step, Signal(self.rule, fired.op, value, mean), fired.nonfinite)

    def _order(self, table: SeriesTable) -> NDArray[np.intp]:
        """The order of the rows. Replicas are of several kinds; weights that the step began with come first."""
        order = np.arange(len(self))
        if self.kind != REPLICA_KIND:
            return order
        later = [not _began_with(table[one]) for one in self.rows.series[self.fired.rows].tolist()]
        return order[np.argsort(later, kind="stable")]


@dataclass(frozen=True, slots=True)
class StepFindings:
    """The findings of one step. Only the first rule that fires on a row counts; it has one finding for each statistic.

    Attributes:
        judged: By kind, the series of each row that the rules judged. The arrays are valid until the listeners return.
    """

    step: int
    groups: tuple[FindingGroup, ...]
    judged: Mapping[str, NDArray[np.int64]]

    @property
    def rows(self) -> int:
        """The number of rows that the rules judged."""
        return sum(map(len, self.judged.values()))

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def by_rule(self) -> Counter[str]:
        """The number of findings of each rule."""
        counts: Counter[str] = Counter()
        for group in self.groups:
            counts[group.rule] += len(group)
        return counts


def earliest(groups: Iterable[FindingGroup], most: int, series: SeriesTable) -> list[RuleFinding]:
    """The first findings in the order of ``time_of``; those of one row in the order of the groups."""
    in_order = heapq.merge(*(group.first(most, series) for group in groups), key=partial(time_of, series=series))
    return list(islice(in_order, most))


def time_of(finding: RuleFinding, series: SeriesTable) -> tuple[bool, int]:
    """A sort key that orders the findings of a step by time.

    The weights that a step begins with come first: they are measured when the optimizer steps, but forward used them before.
    """
    return not _began_with(series[finding.series]), finding.call_id


def _began_with(series: Series) -> bool:
    return underlying_series(series).kind == "param_origin"


class FindingListener(Protocol):
    """Receives the findings of the rules."""

    def judged(self, findings: StepFindings) -> None:
        """Every rule has judged the step, whether or not one fired."""

    def not_judged(self, step: int, reason: str) -> None:
        """No rule will see the step."""

    def save(self) -> None:
        """Write out everything received so far."""

    def close(self) -> None:
        """The run has ended; nothing follows."""


class Scanner:
    """Judges the rows of each step on the writer thread. Rows of features are not statistics of a tensor: few rules judge them.

    Args:
        rules: The most important first: only the first rule that fires on a row of a step counts.
        series: The series of the rank.
        listeners: Called in this order. If one fails, the others are still called.
    """

    def __init__(self, rules: Sequence[AnomalyRule], series: SeriesTable, listeners: Sequence[FindingListener]) -> None:
        self._rules = tuple(rules)
        self._rules_of_features = [rule for rule in rules if rule.judges_features]
        self._series = series
        self._listeners = tuple(listeners)
        self._known: dict[str, RowStates] = defaultdict(lambda: RowStates(sum(rule.fields for rule in self._rules)))

    def look(self, rows: StepRows) -> None:
        """Judge the step."""
        try:
            judged = {kind: part for kind, part in rows.kinds.items() if len(part) and self._rules_of(kind)}
            groups = tuple(group for kind, part in judged.items() for group in self._groups(kind, part))
        except Exception as error:
            self.dropped(rows.step, f"the rules failed: {error!r}")
            raise
        series = {kind: part.series for kind, part in judged.items()}
        findings = StepFindings(rows.step, groups, series)
        self._notify(lambda listener: listener.judged(findings))

    def dropped(self, step: int, reason: str) -> None:
        """The step was lost before the rules could judge it."""
        self._notify(lambda listener: listener.not_judged(step, reason))

    def save(self) -> None:
        """Have the listeners save. Like the other methods, raises the first listener error after calling all listeners."""
        self._notify(lambda listener: listener.save())

    def close(self) -> None:
        """The run has ended."""
        self._notify(lambda listener: listener.close())

    def _notify(self, call: Callable[[FindingListener], None]) -> None:
        errors: list[Exception] = []
        for listener in self._listeners:
            try:
                call(listener)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _rules_of(self, kind: str) -> Sequence[AnomalyRule]:
        """The rules that judge a kind."""
        return self._rules_of_features if own_columns(kind) else self._rules

    def _groups(self, kind: str, rows: KindRows) -> Iterator[FindingGroup]:
        names = partial(_names, self._series, rows.series)
        columns, known = KindColumns(kind, rows.partials, names), self._known[kind].with_rows(rows)
        claims, begin = _Claims(len(rows)), 0
        for rule in self._rules_of(kind):
            state = known[begin : begin + rule.fields]
            begin += rule.fields
            for fired in claims.of(list(rule.judge(columns, state))):
                yield FindingGroup(rule.name, kind, rows, fired)


def _names(series: SeriesTable, numbers: NDArray[np.int64]) -> Sequence[str]:
    return [series[number].name for number in numbers.tolist()]


class _Claims:
    """The rows that an earlier rule fired on. A later rule may still fire on the other rows of the step."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._claimed: Flags | None = None

    def of(self, fired: Sequence[Fired]) -> list[Fired]:
        """The findings of a rule on rows that no earlier rule fired on. Its rows are then claimed."""
        claimed = self._claimed
        left = [one if claimed is None else one.among(~claimed[one.rows]) for one in fired if len(one.rows)]
        left = [one for one in left if len(one.rows)]
        if left:
            self._claimed = np.zeros(self._rows, np.bool_) if claimed is None else claimed
            for one in left:
                self._claimed[one.rows] = True
        return left
