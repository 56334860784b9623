"""The tables of the database."""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import Final

from monitor.convert.cells import Block, Cells, Target
from monitor.stats.ops import INTEGER_OPS, TEXT_OPS

MOST_JOINED: Final = 500
"""Tables in one view: more SQLite does not take."""

CACHE_KB: Final = 32768

_SCHEMA: Final = """
CREATE TABLE monitoring_metrics (metric_id INTEGER PRIMARY KEY, metric_name TEXT NOT NULL UNIQUE);
CREATE TABLE metric_stats (
    metric_id INTEGER NOT NULL REFERENCES monitoring_metrics, stat_name TEXT NOT NULL, PRIMARY KEY (metric_id, stat_name)
) WITHOUT ROWID;
CREATE TABLE monitoring_targets (
    target_id INTEGER PRIMARY KEY, target_name TEXT NOT NULL, vpp_stage INTEGER NOT NULL, micro_step INTEGER
);
CREATE TABLE global_stats (stat_name TEXT PRIMARY KEY, stat_value INTEGER NOT NULL) WITHOUT ROWID;
"""


class _Metric:
    """A kind: its number, its columns, and the first steps of its tables."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ops: list[str] = []
        self.partitions: list[int] = []


class MetricTables:
    """A database in the making, which nobody reads before it is closed: were it torn, it would be thrown away.

    Args:
        path: Where nothing is yet.
        step_partition: Steps that share a table.

    Raises:
        sqlite3.Error: from every method, if the database cannot be written.
    """

    def __init__(self, path: Path, step_partition: int) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._width = step_partition
        self._metrics: dict[str, _Metric] = {}
        self._targets: dict[Target, int] = {}
        self._ranks: set[int] = set()
        self._first: int | None = None
        self._last = 0

    def __enter__(self) -> MetricTables:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KB}"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.executescript(_SCHEMA)
        self._connection.execute("BEGIN")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._connection.close()

    def insert(self, cells: Cells) -> int:
        """Add rows: of a kind and rank in order of steps, so that those of a step stand as they were measured.

        Returns:
            How many there were.
        """
        for block in cells.blocks:
            self._insert(self._metrics.get(cells.kind) or self._new(cells.kind), cells.rank, block)
        return sum(len(block.steps) for block in cells.blocks)

    def _insert(self, metric: _Metric, rank: int, block: Block) -> None:
        self._add_columns(metric, block.ops)
        ids = [self._target(one) for one in block.targets]
        for first, start, end in _runs(block.steps, self._width):
            table = self._table(metric, first)
            cells = [column[start:end] for column in block.ops.values()]
            rows = zip(
                repeat(rank), block.steps[start:end], map(ids.__getitem__, block.target[start:end]), *cells, strict=False
            )
            names = ", ".join(("rank", "step", "target_id", *map(_quoted, block.ops)))
            values = ", ".join("?" * (3 + len(cells)))
            self._connection.executemany(f"INSERT INTO {_quoted(table)} ({names}) VALUES ({values})", rows)
        self._ranks.add(rank)
        self._first = block.steps[0] if self._first is None else min(self._first, block.steps[0])
        self._last = max(self._last, block.steps[-1])

    def indices(self) -> list[str]:
        """What makes them: of each table one for a tensor over steps, and one for all tensors at a step."""
        tables = [self._name(metric, first) for metric in self._metrics.values() for first in metric.partitions]
        of = {"by_target": "target_id, rank, step", "by_step": "step, rank"}
        return [
            f"CREATE INDEX {_quoted(f'{table}_{name}')} ON {_quoted(table)} ({columns})"
            for table in tables
            for name, columns in of.items()
        ]

    def make(self, index: str) -> None:
        """Execute one of ``indices``, when all rows are in."""
        self._connection.execute(index)

    def _finish(self) -> None:
        execute = self._connection.execute
        execute("CREATE INDEX monitoring_targets_by_name ON monitoring_targets (target_name, vpp_stage, micro_step)")
        for kind, metric in self._metrics.items():
            stats = [(metric.number, op) for op in metric.ops]
            self._connection.executemany("INSERT INTO metric_stats VALUES (?, ?)", stats)
            if len(metric.partitions) <= MOST_JOINED:
                execute(f"CREATE VIEW {_quoted(kind)} AS {self._joined(metric)}")
        facts = {
            "max_rank": max(self._ranks, default=0),
            "min_step": self._first or 0,
            "max_step": self._last,
            "step_partition_size": self._width,
        }
        self._connection.executemany("INSERT INTO global_stats VALUES (?, ?)", facts.items())
        execute("COMMIT")

    def _joined(self, metric: _Metric) -> str:
        """All rows of a kind, with the names of what was measured."""
        ops = "".join(f", {_quoted(op)}" for op in metric.ops)
        columns = f"rank, vpp_stage, target_name AS name, step, micro_step{ops}"
        tables = [_quoted(self._name(metric, first)) for first in sorted(metric.partitions)]
        return " UNION ALL ".join(
            f"SELECT {columns} FROM {table} JOIN monitoring_targets USING (target_id)" for table in tables
        )

    def _new(self, kind: str) -> _Metric:
        metric = self._metrics[kind] = _Metric(len(self._metrics) + 1)
        self._connection.execute("INSERT INTO monitoring_metrics VALUES (?, ?)", (metric.number, kind))
        return metric

    def _add_columns(self, metric: _Metric, ops: Iterable[str]) -> None:
        for op in ops:
            if op not in metric.ops:
                metric.ops.append(op)
                for first in metric.partitions:
                    self._connection.execute(f"ALTER TABLE {_quoted(self._name(metric, first))} ADD COLUMN {_column(op)}")

    def _target(self, target: Target) -> int:
        number = self._targets.get(target)
        if number is None:
            number = self._targets[target] = len(self._targets) + 1
            self._connection.execute("INSERT INTO monitoring_targets VALUES (?, ?, ?, ?)", (number, *target))
        return number

    def _table(self, metric: _Metric, first: int) -> str:
        """The name of the table whose steps begin with ``first``, which is made if it is missing."""
        table = self._name(metric, first)
        if first not in metric.partitions:
            metric.partitions.append(first)
            ops = "".join(f", {_column(op)}" for op in metric.ops)
            self._connection.execute(
                f"CREATE TABLE {_quoted(table)} (rank INTEGER NOT NULL, step INTEGER NOT NULL, "
                f"target_id INTEGER NOT NULL REFERENCES monitoring_targets{ops})"
            )
        return table

    def _name(self, metric: _Metric, first: int) -> str:
        return f"metric_{metric.number}_step_{first}_{first + self._width - 1}"


def _runs(steps: list[int], width: int) -> Iterable[tuple[int, int, int]]:
    """Of steps in order: the first step of each table that they fall in, and where its rows start and end."""
    start = 0
    while start < len(steps):
        first = steps[start] - steps[start] % width
        end = bisect_left(steps, first + width, lo=start)
        yield first, start, end
        start = end


def _column(op: str) -> str:
    kind = "TEXT" if op in TEXT_OPS else "INTEGER" if op in INTEGER_OPS else "REAL"
    return f"{_quoted(op)} {kind}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
