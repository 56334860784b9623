"""The rows of one kind on both sides, one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import pyarrow as pa

from monitor.bars import Progress, silent
from monitor.compare.sides import ALL_RANKS, Side, rank_name
from monitor.compare.tolerances import ELEMENTS, Rounding
from monitor.compare.values import Difference, Finding, of_numbers
from monitor.query.batches import IDENTITY, SHOWN_KINDS, ops_in, place_of
from monitor.series import GRADIENT_KINDS, Series, underlying_series
from monitor.sinks.csv import rounded
from monitor.stats.ops import LAYOUT_OPS, TEXT_OPS

Row = dict[str, Any]
Key = tuple[int, int, str]
"""A rank, a step, and what the row is of."""

MOST_ROWS: Final = 1 << 40
"""Most rows of a kind in a step. If rows do not say in which order they were measured, each kind has so many places."""

USED, CALLS, REDUCED, STEPPED = (phase * MOST_ROWS * len(SHOWN_KINDS) for phase in range(4))
PHASES: Final = {
    **dict.fromkeys(("param_origin", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "linear_hook"), USED),
    **dict.fromkeys(("grad_reduced", "run"), REDUCED),
    **dict.fromkeys(("update_ratio", "optimizer_health", "adam_update", "adam_ratio"), STEPPED),
    **dict.fromkeys(("param_updated", "exp_avg_updated", "exp_avg_sq_updated", "max_exp_avg_sq_updated"), STEPPED),
}
"""The order of a step, where it is not that of measuring: what the step uses, its calls forward and backward (all other kinds),
the gradients that the optimizer is given, and what it makes of them."""


class RowWatcher(Protocol):
    """Sees all rows that are compared. They have the columns ``IDENTITY`` and the ops of both sides."""

    def equal(self, kind: str, rows: pa.Table) -> None:
        """See rows that are the same on both sides."""

    def pair(self, kind: str, order: int, left: Row | None, right: Row | None) -> None:
        """See the two rows of the same thing, made comparable; None: the other side alone has it."""


@dataclass
class RowComparison:
    """Compares rows, and keeps what it has found.

    Attributes:
        sides: Left and right.
        rounding: None to find everything that is not the same.
        watcher: Is shown the rows; None: nothing is.
        alike: Makes two rows of a kind comparable.
        progress: Told how many pieces of a kind are compared.
        compared: How many rows were on both sides.
        kinds: The kinds that have such rows.
        not_judged: By kind, rows that differ in nothing that can be judged, or have no op in common.
    """

    sides: tuple[Side, Side]
    rounding: Rounding | None
    watcher: RowWatcher | None = None
    alike: Callable[[str, Row, Row], tuple[Row, Row]] = lambda _kind, left, right: (left, right)
    progress: Progress = silent
    compared: int = 0
    kinds: dict[str, None] = field(default_factory=dict)
    not_judged: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, kind: str, tables: Sequence[pa.Table], ndigits: Sequence[int]) -> None:
        """Compare the same steps of a kind, in the columns ``IDENTITY`` and ops, in steps that a rank has on both sides.

        Args:
            ndigits: Decimals of each side, if its rows are from CSV.
        """
        if kind == GRADIENT_KINDS[0] and self.sides[0].is_of_another_framework(self.sides[1]):
            tables = [_of_first_micro_step(table) for table in tables]
        for side, table in zip(self.sides, tables, strict=True):
            side.begins(kind, table)
        recorded = [[op for op in ops_in(table) if table[op].null_count < len(table)] for table in tables]
        shared = [op for op in recorded[0] if op in recorded[1]]
        if all(map(len, tables)):
            self._say_ops(kind, [[op for op in own if op != ELEMENTS] for own in recorded], tables)
            if not set(shared) <= {ELEMENTS}:
                self.kinds[kind] = None
        tables = [table.select([*IDENTITY, *shared]) for table in tables]
        unlike = self.rounding is not None and any(series[0] == kind for series in self.rounding.unlike)
        if tables[0].equals(tables[1]) and not unlike:
            self.compared += len(tables[0]) if not set(shared) <= {ELEMENTS} else 0
            if self.watcher is not None:
                self.watcher.equal(kind, tables[0])
            return
        left, right = (_rows(table.to_pylist(), kind) for table in tables)
        places = [{key[:2] for key in side} for side in (left, right)]
        both = places[0] & places[1]
        for side, own in zip(self.sides, places, strict=True):
            side.add(kind, own - both)
        self._compare(kind, left, {key: row for key, row in right.items() if key[:2] in both}, both, shared, ndigits)

    def _compare(
        self,
        kind: str,
        left: Mapping[Key, Row],
        right: Mapping[Key, Row],
        both: set[tuple[int, int]],
        ops: list[str],
        ndigits: Sequence[int],
    ) -> None:
        largest = {} if self.rounding is None else self.rounding.largest(kind, itertools.chain(left.values(), right.values()))
        last: dict[tuple[int, int], int] = {}
        for key, row in left.items():
            position = last.get(key[:2], place_of(kind) * MOST_ROWS) if row["call_id"] is None else row["call_id"]
            last[key[:2]] = position + 1
            order = phase_of(kind, row["name"]) + position
            if key in right:
                rows = self.alike(kind, *_alike(row, right[key], ndigits))
                numbers = [op for op in ops if op != ELEMENTS]
                lost = any((row[op], right[key][op]) != (None, None) for op in numbers)
                is_compared = any((rows[0][op], rows[1][op]) != (None, None) for op in numbers) or not lost
                self.compared += bool(numbers) and is_compared
                self.not_judged[kind] += not is_compared
                self._watch(kind, order, *rows)
                decimals = min(ndigits) if _is_of_csv(row, right[key]) else None
                self.findings += self._differing(kind, _Pair(key, order, *rows, ops), largest.get(key[1], 0.0), decimals)
            elif key[:2] in both:
                self._watch(kind, order, row, None)
                self.findings.append(_finding(key, order, "missing", "there", ""))
        for key, row in right.items():
            if key not in left:
                order = phase_of(kind, row["name"]) + last[key[:2]]
                self._watch(kind, order, None, row)
                self.findings.append(_finding(key, order, "added", "", "there"))

    def _watch(self, kind: str, order: int, left: Row | None, right: Row | None) -> None:
        if self.watcher is not None:
            self.watcher.pair(kind, order, left, right)

    def _differing(self, kind: str, pair: _Pair, largest: float, decimals: int | None) -> Iterator[Finding]:
        found = list(pair.differing())
        if self.rounding is None:
            yield from found
            return
        name = pair.left["name"]
        share, op = self.rounding.share(kind, pair.rows, pair.numbers, largest, decimals) if found else (0.0, "")
        for one in found:
            if one.what in LAYOUT_OPS:
                yield one  # other bits explain other check sums and histograms
            elif one.what == "values" and not op:
                self.not_judged[kind] += 1  # shares of vectors that may be rounding alone
            elif one.what == "values" and not self.rounding.explains(share, kind, name, one.step):
                limited = self.rounding.allowed(kind, name, one.step) is not None
                own = of_numbers([(pair.left[op], pair.right[op])])
                yield replace(one, difference=own, rounding=share, op=op, is_limited=limited)
        series = self.rounding.unlike_of(kind, pair.left)
        yield from (_finding(pair.key, pair.order, *one) for one in series if one[0] not in pair.ops)

    def _say_ops(self, kind: str, recorded: Sequence[Sequence[str]], tables: Sequence[pa.Table]) -> None:
        """Name the ops that only one side has, and the texts that cannot be judged because the kind has no numbers."""
        shared = [op for op in recorded[0] if op in recorded[1]]
        for side, own, table in zip(self.sides, recorded, tables, strict=True):
            derives = side.derives_ops and table["call_id"].null_count < len(table)  # rows of CSV have what was recorded
            side.has_ops(kind, [op for op in own if op not in shared] if not (derives and shared) else [])
        if self.rounding is not None and shared and all(op in TEXT_OPS for op in shared):
            self.sides[0].is_not_judged(kind, shared)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The row of the same thing on both sides.

    Attributes:
        order: Its place in the step.
        ops: Those that both sides have.
    """

    key: Key
    order: int
    left: Row
    right: Row
    ops: Sequence[str]

    @property
    def rows(self) -> tuple[Row, Row]:
        return self.left, self.right

    @property
    def numbers(self) -> list[str]:
        return [op for op in self.ops if op not in TEXT_OPS]

    def differing(self) -> Iterator[Finding]:
        """Everything that is not the same."""
        for op in self.ops:
            if op in TEXT_OPS and _without_framework(op, self.left[op]) != _without_framework(op, self.right[op]):
                yield _finding(self.key, self.order, op, str(self.left[op]), str(self.right[op]))
        numbers = self.numbers
        difference = of_numbers([(self.left[op], self.right[op]) for op in numbers]) if numbers else None
        if difference is not None and not difference.same:
            left, right = (_shown(row, numbers) for row in self.rows)
            yield _finding(self.key, self.order, "values", left, right, difference)


def _without_framework(op: str, text: str | None) -> str | None:
    """``float32`` of ``torch.float32`` and ``mindspore.float32``; other texts as they are."""
    return text.rpartition(".")[2] if op == "dtype" and text else text


def _of_first_micro_step(rows: pa.Table) -> pa.Table:
    """Later ones have the sum so far in PyTorch, and their own gradients in MindSpore."""
    return rows.filter(pa.array([(micro_step or 0) == 0 for micro_step in rows["micro_step"].to_pylist()], pa.bool_()))


def phase_of(kind: str, name: str) -> int:
    """Where in a step a kind begins. A replica's phase is that of the kind that is checked."""
    return PHASES.get(underlying_series(Series(kind, 0, name)).kind, CALLS)


def _rows(rows: list[Row], kind: str) -> dict[Key, Row]:
    """In the order in which they were measured."""
    found: dict[Key, Row] = {}
    for row in rows:
        micro_step = "" if row["micro_step"] is None else f", micro-step {row['micro_step']}"
        stage = "" if row["rank"] == ALL_RANKS else f"{row['vpp_stage']}:"
        found[row["rank"], row["step"], f"{kind}/{stage}{row['name']}{micro_step}"] = row
    return found


def _alike(left: Row, right: Row, ndigits: Sequence[int]) -> tuple[Row, Row]:
    """Both rows, with the numbers of one rounded if the other is from CSV."""
    if (left["call_id"] is None) == (right["call_id"] is None):
        return left, right
    return (left, _rounded(right, ndigits[0])) if left["call_id"] is None else (_rounded(left, ndigits[1]), right)


def _rounded(row: Row, ndigits: int) -> Row:
    return {name: rounded(value, ndigits) if isinstance(value, float) else value for name, value in row.items()}


def _is_of_csv(*rows: Row) -> bool:
    return any(row["call_id"] is None for row in rows)


def _finding(key: Key, order: int, what: str, left: str, right: str, difference: Difference | None = None) -> Finding:
    return Finding(key[1], rank_name(key[0]), order, key[2], what, left, right, difference)


def _shown(row: Mapping[str, Any], ops: Iterable[str]) -> str:
    return ", ".join(f"{op} {row[op]:.9g}" for op in ops if row[op] is not None)
