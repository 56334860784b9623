"""The rows of a record, each step once, in order of steps and as they were measured within a step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.convert.recorded import RankFiles, Record
from monitor.merge.discovery import SetAside
from monitor.merge.read_shards import ForeignError, csv_rows
from monitor.stats.ops import INTEGER_OPS, TEXT_OPS

IDENTITY: Final = {"vpp_stage": pa.int64(), "name": pa.string(), "step": pa.int64(), "micro_step": pa.int64()}
"""What a row is of. ``micro_step`` is null in a row that is about the whole step."""

MOST_COLUMNS: Final = 100
"""Of a file: there are a dozen ops, and fewer features."""

_EMPTY: Final = pa.scalar("", type=pa.string())

_OP: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TAKEN: Final = frozenset({*IDENTITY, "rank", "target_id"})
"""Names that mean something else in what is written."""


def read_record(record: Record) -> tuple[pa.Table, list[SetAside]]:
    """The rows in the columns ``IDENTITY`` and those of every op that a file has; null where there is no value.

    Returns:
        The rows, and the files that are torn or not ours.
    """
    tables, aside = [], []
    seen: set[int] = set()
    for directory, shard in reversed(record.files):
        try:
            table = _typed(csv_rows(shard))
        except ForeignError as error:
            aside.append(SetAside(str(shard.path), str(error)))
            continue
        tables.append(_counting(table, directory, seen))
    if not tables:
        return pa.schema(IDENTITY).empty_table(), aside
    return _in_order(pa.concat_tables(reversed(tables), promote_options="default")), aside


def steps_of(rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Each step with its rows, of a table in order of steps."""
    steps = rows["step"].to_numpy()
    starts = np.flatnonzero(np.diff(steps, prepend=-1)).tolist()
    for start, end in itertools.pairwise([*starts, len(steps)]):
        yield int(steps[start]), rows.slice(start, end - start)


def ops_of(rows: pa.Table) -> list[str]:
    return [name for name in rows.column_names if name not in IDENTITY]


def numbers_of(column: pa.ChunkedArray) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Values, anything where there is none, and which are there."""
    valid: NDArray[np.bool_] = column.is_valid().to_numpy()
    values = column.fill_null(0) if column.null_count else column
    return values.to_numpy().astype(np.float64), valid


def _counting(table: pa.Table, directory: RankFiles, seen: set[int]) -> pa.Table:
    """The rows of steps that count and that no later file has."""
    column = table["step"].to_numpy()
    there = np.unique(column).tolist()
    fresh = [step for step in there if step not in seen and directory.counts(step)]
    seen.update(fresh)
    return table if fresh == there else table.filter(np.isin(column, fresh))


def _in_order(rows: pa.Table) -> pa.Table:
    step = rows["step"].to_numpy()
    return rows if (step[1:] >= step[:-1]).all() else rows.take(np.argsort(step, kind="stable"))


def _typed(table: pa.Table) -> pa.Table:
    """With the columns in one order and of one type each, whatever the file makes them look like.

    Raises:
        ForeignError: a column is neither identity nor op, or does not hold numbers.
    """
    names = table.column_names
    ops = [name for name in names if name not in IDENTITY]
    wrong = [name for name in ops if not _OP.fullmatch(name) or name in _TAKEN]
    if wrong or len(set(names)) < len(names) or len(names) > MOST_COLUMNS:
        raise ForeignError(f"its columns are not those of a shard: {', '.join(wrong or names)[:200]!r}")
    identity = [
        table[name] if name in names else pa.chunked_array([pa.nulls(len(table), kind)]) for name, kind in IDENTITY.items()
    ]
    return pa.table([*identity, *(_op(name, table[name]) for name in ops)], names=[*IDENTITY, *ops])


def _op(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    if name in TEXT_OPS:
        return _without_empty(column)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
        raise ForeignError(f"its column {name} does not hold numbers")
    return column.cast(pa.int64() if name in INTEGER_OPS else pa.float64(), safe=False)


def _without_empty(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """With null in place of empty text, which was not measured."""
    return call_function("if_else", [call_function("equal", [column, _EMPTY]), pa.scalar(None, pa.string()), column])
