"""Rows made ready for SQLite, by any process: columns of the values that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.convert.recorded import Record
from monitor.convert.rows import ops_of, read_record
from monitor.merge.discovery import SetAside
from monitor.stats.ops import INTEGER_OPS, TEXT_OPS

NAN: Final = "nan"
"""A measured NaN. SQLite has none, and would make null of it, which is what was not measured."""

Cell = float | int | str | None
Target = tuple[str, int, int | None]
"""What is measured: name, chunk, and micro-step where it has one."""


@dataclass(frozen=True, slots=True)
class CellTask:
    """Some records of one kind and rank."""

    kind: str
    rank: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of a record, in order of steps. All columns have an entry a row.

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
    """What came of a task: its rows, and the files that have none to give."""

    kind: str
    rank: int
    blocks: list[Block]
    set_aside: list[SetAside]


def prepare(task: CellTask) -> Cells:
    """Read the records of a task."""
    cells = Cells(task.kind, task.rank, [], [])
    for record in task.records:
        rows, aside = read_record(record)
        cells.set_aside.extend(aside)
        if len(rows):
            cells.blocks.append(_block(rows))
    return cells


def _block(rows: pa.Table) -> Block:
    targets, target = _targets(rows)
    ops = {op: _cells(op, rows[op]) for op in ops_of(rows)}
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
