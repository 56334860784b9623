"""A run to SQLite: all rows of a job in tables by kind and range of steps."""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.convert import conversion
from monitor.merge.discovery import SetAside
from monitor.merge.execution import draft_of, engine, run_in_order
from monitor.query.batches import Batch, ops_in, runs_in
from monitor.stats.ops import INTEGER_OPS, TEXT_OPS

# --- Rows made ready for SQLite, by any process: columns of the values that it takes.

NAN: Final = "nan"
"""A measured NaN. SQLite has none, and would make null of it, which is what was not measured."""

Cell = float | int | str | None
Target = tuple[str, int, int | None]
"""What is measured: name, chunk, and micro-step where it has one."""


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of a batch on one rank, in order of steps. All columns have an entry a row.

    Attributes:
        targets: What is measured, in the order of first appearance.
        target: Index in ``targets``.
        ops: By name.
    """

    steps: list[int]
    targets: list[Target]
    target: list[int]
    ops: dict[str, list[Cell]]


@dataclass(frozen=True, slots=True)
class Cells:
    """The rows of a batch by rank, and its files without any."""

    kind: str
    blocks: dict[int, Block]
    set_aside: list[SetAside]


def prepare(batch: Batch) -> Cells:
    """Read a batch."""
    rows, aside = batch.read()
    return Cells(batch.kind, {rank: _block(of_rank) for rank, of_rank in runs_in(rows, "rank")}, aside)


def _block(rows: pa.Table) -> Block:
    targets, target = _targets(rows)
    ops = {op: _cells(op, rows[op]) for op in ops_in(rows)}
    return Block(rows["step"].to_numpy().tolist(), targets, target.tolist(), ops)


def _targets(rows: pa.Table) -> tuple[list[Target], NDArray[np.int64]]:
    coded = [
        rows[name].dictionary_encode(null_encoding="encode").combine_chunks() for name in ("name", "vpp_stage", "micro_step")
    ]
    shape = [len(one.dictionary) for one in coded]
    codes = np.ravel_multi_index([one.indices.to_numpy() for one in coded], shape)
    each, first, place = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    chosen = np.unravel_index(each[order], shape)
    columns = [one.dictionary.take(pa.array(code)).to_pylist() for one, code in zip(coded, chosen, strict=True)]
    target: NDArray[np.int64] = np.argsort(order)[place]  # the inverse of a permutation
    return list(zip(*columns, strict=True)), target


def _cells(op: str, column: pa.ChunkedArray) -> list[Cell]:
    if op in TEXT_OPS or op in INTEGER_OPS:
        texts: list[Cell] = column.to_pylist()
        return texts
    values = column.to_numpy()  # null is NaN here
    cells: list[Cell] = values.tolist()
    for row in np.flatnonzero(np.isnan(values)).tolist():
        cells[row] = NAN
    for row in np.flatnonzero(~column.is_valid().to_numpy()).tolist():
        cells[row] = None
    return cells


# --- The tables of the database.

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
    """A database that is being written. It is read only after it is closed; a torn one is deleted.

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._connection.close()

    def insert(self, cells: Cells) -> dict[int, int]:
        """Add rows: of a kind and rank in order of steps, so that those of a step stand as they were measured.

        Returns:
            How many there were, by rank.
        """
        for rank, block in cells.blocks.items():
            self._insert(self._metrics.get(cells.kind) or self._new(cells.kind), rank, block)
        return {rank: len(block.steps) for rank, block in cells.blocks.items()}

    def _insert(self, metric: _Metric, rank: int, block: Block) -> None:
        self._add_columns(metric, block.ops)
        ids = [self._target(one) for one in block.targets]
        for first, start, end in _runs(block.steps, self._width):
            table = self._table(metric, first)
            cells = [column[start:end] for column in block.ops.values()]
            targets = [ids[number] for number in block.target[start:end]]
            rows = zip([rank] * (end - start), block.steps[start:end], targets, *cells, strict=True)
            names = ", ".join(("rank", "step", "target_id", *map(_quoted, block.ops)))
            values = ", ".join("?" * (3 + len(cells)))
            self._connection.executemany(f"INSERT INTO {_quoted(table)} ({names}) VALUES ({values})", rows)
        self._ranks.add(rank)
        self._first = block.steps[0] if self._first is None else min(self._first, block.steps[0])
        self._last = max(self._last, block.steps[-1])

    def indices(self) -> list[str]:
        """Statements that make the indices: for each table one for a tensor over steps, and one for all tensors at a step."""
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
    """For steps in order, the first step of each table that they fall in, and where its rows start and end."""
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


ENDING: Final = "csv2db"
DATABASE: Final = "monitor_metrics.db"

BATCH_ROWS: Final = 100_000
"""What a process reads before it hands it on, about, unless a single file has more."""


@dataclass(frozen=True, slots=True)
class CSV2DBConfig:
    """What ``csv2db`` is to convert.

    Attributes:
        monitor_path: The directory that the ranks' directories lie in, or a merged set.
        time_start: Only directories from this timestamp on (``Dec03_21-34-40``); None: from the first.
        time_end: Only directories up to this timestamp, itself included; None: to the last. Where it lies before
            ``time_start``, New Year lies between them.
        process_num: How many processes read. One writes.
        data_type_list: Only these kinds; None: all.
        step_partition: Steps that share a table.
        output_dirpath: Directory of the database; None: ``{time}_csv2db`` in ``monitor_path``.
        job: Beginning of the job's id, where there are several in that range of time.
    """

    monitor_path: conversion.AnyPath
    time_start: str | None = None
    time_end: str | None = None
    process_num: int = 1
    data_type_list: Sequence[str] | None = None
    step_partition: int = 500
    output_dirpath: conversion.AnyPath | None = None
    job: str | None = None


def csv2db(config: CSV2DBConfig) -> conversion.Converted:
    """Write the rows of a run as a database, ``monitor_metrics.db``. ``docs/converting.md`` describes its tables.

    It appears whole or not at all, and is the same, byte for byte, for any number of processes.

    Returns:
        What was written, and the files that were set aside, which are also logged.

    Raises:
        ConversionError: nothing was converted, because of what the message says.
        OSError: the disk does not allow it.
    """
    steps = conversion.natural("step_partition", config.step_partition)
    asked = (config.time_start, config.time_end, config.process_num, config.data_type_list, config.output_dirpath, config.job)
    return to_database(conversion.Conversion.of(config.monitor_path, *asked, ENDING), steps).log()


def to_database(made: conversion.Conversion, step_partition: int) -> conversion.Converted:
    """Convert as ``csv2db`` does, without logging."""
    with conversion.plainly():
        batches = made.batches(BATCH_ROWS)
        with _draft(made.output) as draft, conversion.bar() as shown:
            processes = min(made.workers, len(batches) or 1)
            with MetricTables(draft, step_partition) as tables, engine(processes) as (executor, workers):
                results = run_in_order(executor, workers, prepare, batches)
                for cells in shown.track(results, len(batches), description="converting"):
                    made.add(tables.insert(cells), cells.set_aside)
                for index in shown.track(tables.indices(), description="indexing"):
                    tables.make(index)
            return made.converted(made.output / DATABASE)


@contextmanager
def _draft(directory: Path) -> Iterator[Path]:
    """The path to write the database at. It joins what is in ``directory``, or appears with it."""
    other = "another output directory"
    if directory.is_dir():
        with draft_of(directory / DATABASE, "conversion", other) as draft:
            yield draft
    else:
        with draft_of(directory, "conversion", other) as draft:
            draft.mkdir()
            yield draft / DATABASE
