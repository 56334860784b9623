"""The rows of one kind that some directories have, each with its place in the job.

They are read from shards by whoever combines them. Where what is combined at a time is only a small part of each shard, that
would unpack every shard again and again; so there the shards are read once, some directories at a time, and their rows are put
down in order of steps, unpacked, where every piece finds its own in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from monitor.merge.arrow_files import read_batch, write_file
from monitor.merge.catalogue import Catalogue, Index
from monitor.merge.discovery import SetAside
from monitor.merge.ordering import order_by, starts_of_runs
from monitor.merge.shards import ForeignError, Shard
from monitor.merge.survey import UNKNOWN
from monitor.ranks.records import StepsRecord
from monitor.series import NO_MICRO_STEP
from monitor.sinks.measurements import PARTIALS, SUMS, TEXT
from monitor.sinks.shard_names import Steps
from monitor.stats.ops import CALLS, NUMERIC_OPS

IDENTITY: Final = [
    ("run", pa.int32()),  # place of the directory among those of the job
    ("series", pa.int32()),  # row of the catalogue, UNKNOWN where it has none
    ("vpp_stage", pa.int64()),
    ("name", TEXT),  # null where the catalogue knows it
    ("step", pa.int64()),
    ("micro_step", pa.int64()),
    ("call_id", pa.int64()),
    ("shape", TEXT),
    ("dtype", TEXT),
    (CALLS, pa.int64()),  # 0 where the row combines none
]
EXACT: Final = pa.schema([*IDENTITY, *((name, pa.float64() if name in SUMS else pa.int64()) for name in PARTIALS)])
"""A row of which the partials are known."""

ROUNDED: Final = pa.schema([*IDENTITY, *((op, pa.float64()) for op in NUMERIC_OPS)])
"""A row of which only ops are known; what was not recorded is null."""

_MOSTLY_ZERO: Final = {EXACT: ("nans", "posinfs", "neginfs", "smalls", "exponent", CALLS), ROUNDED: (CALLS,)}


@dataclass(frozen=True, slots=True)
class Source:
    """What one directory has of the steps at hand.

    Attributes:
        run: Place of the directory among those of the job.
        end: Steps from here on do not count.
        abandoned: Nor do these.
        shards: Of the kind.
        replicas: To be compared with it.
    """

    run: int
    rank: int
    end: int
    abandoned: StepsRecord
    written: StepsRecord
    shards: tuple[Shard, ...]
    replicas: tuple[Shard, ...]


@dataclass
class Told:
    """What reading has to tell.

    Attributes:
        duplicates: By rank, steps that stood in several files.
    """

    duplicates: dict[int, list[int]] = field(default_factory=dict)
    set_aside: list[SetAside] = field(default_factory=list)


def read(sources: Iterable[Source], steps: Steps, catalogue: Catalogue, told: Told) -> list[pa.Table]:
    """The rows that count, directory by directory, in tables of the columns ``EXACT`` or ``ROUNDED``."""
    tables = []
    for source in sources:
        for shards, replicas in ((source.shards, False), (source.replicas, True)):
            for table, exact in _rows_that_count(source, shards, steps, told):
                tables.append(_placed(table, exact, source, catalogue, replicas=replicas))
    return [table for table in tables if len(table)]


def _rows_that_count(source: Source, shards: Iterable[Shard], steps: Steps, told: Told) -> Iterator[tuple[pa.Table, bool]]:
    """Each step once: from the file that has partials, and of several the last."""
    seen: dict[int, bool] = {}
    for shard in sorted(shards, key=lambda one: (one.exact, one.steps, one.path.name), reverse=True):
        if not shard.exact and _has_all(source.written, shard, steps, seen):
            continue  # the same rows with less in them
        try:
            table = shard.read(steps)
        except ForeignError as error:
            told.set_aside.append(SetAside(str(shard.path), str(error)))
            continue
        column = table["step"].to_numpy()
        there = np.unique(column[starts_of_runs([column])]).tolist()
        told.duplicates.setdefault(source.rank, []).extend(step for step in there if seen.get(step) == shard.exact)
        fresh = [step for step in there if step not in seen and step < source.end and not source.abandoned.holds(step)]
        seen |= dict.fromkeys(fresh, shard.exact)
        yield (table if fresh == there else table.filter(np.isin(column, fresh))), shard.exact


def _has_all(written: StepsRecord, shard: Shard, steps: Steps, seen: Mapping[int, bool]) -> bool:
    """Whether every step that the manifest puts into a file of CSV was found with its partials."""
    if not any(seen.values()):
        return False
    within = written.between(max(shard.steps.first, steps.first), min(shard.steps.last, steps.last))
    return within.count > 0 and all(seen.get(step, False) for step in within.steps())


def _placed(table: pa.Table, exact: bool, source: Source, catalogue: Catalogue, *, replicas: bool) -> pa.Table:
    """With the directory and the series of each row."""
    series = _series(table, source.rank, catalogue, replicas=replicas)
    if replicas:  # a file of replicas holds those of every kind
        table, series = table.filter(series != UNKNOWN), series[series != UNKNOWN]
    columns = {
        **{name: table[name] for name in table.column_names},
        "run": pa.array(np.full(len(table), source.run, dtype=np.int32)),
        "series": pa.array(series.astype(np.int32)),
        "name": _unless_known(table["name"], series),
        "micro_step": table["micro_step"].fill_null(NO_MICRO_STEP),
        "call_id": table["call_id"].fill_null(UNKNOWN),
        CALLS: table[CALLS].fill_null(0),
    }
    schema = EXACT if exact else ROUNDED
    return pa.table([columns[one.name] for one in schema], schema=schema)


def _series(table: pa.Table, rank: int, catalogue: Catalogue, *, replicas: bool) -> Index:
    """Of each row."""
    name = table["name"].combine_chunks()
    series = np.full(len(table), UNKNOWN)
    chunk = table["vpp_stage"].to_numpy()
    for one in np.unique(chunk[starts_of_runs([chunk])]).tolist():
        numbers = catalogue.numbers(rank, one, name.dictionary, replicas=replicas)
        rows = chunk == one
        series[rows] = numbers[name.indices.to_numpy()[rows]]
    return series


def _unless_known(name: pa.ChunkedArray, series: Index) -> pa.Array:
    if (series != UNKNOWN).all():
        return pa.nulls(len(series), TEXT)
    texts = name.combine_chunks()
    return pa.DictionaryArray.from_arrays(pa.array(texts.indices.to_numpy(), mask=series != UNKNOWN), texts.dictionary)


@dataclass(frozen=True, slots=True)
class Share:
    """Directories whose rows one worker puts down in order of steps.

    Attributes:
        steps: All that the pieces need.
        pieces: Ascending.
        catalogue: The file of the kind's catalogue; None where no manifest knows of it.
        output: What the names of the files begin with.
    """

    kind: str
    steps: Steps
    pieces: tuple[Steps, ...]
    sources: tuple[Source, ...]
    catalogue: Path | None
    output: Path


def put_in_order(share: Share) -> Told:
    """Read the shards, and put the rows down so that those of each piece stand together.

    Raises:
        OSError: a file cannot be written.
    """
    told = Told()
    tables = read(share.sources, share.steps, Catalogue.read(share.catalogue, share.kind), told)
    for schema, path in zip((EXACT, ROUNDED), files_of(share.output), strict=True):
        columns = {one.name: [table[one.name] for table in tables if table.schema == schema] for one in schema}
        tables = [table for table in tables if table.schema != schema]
        if columns["step"]:
            _write(columns, schema, share.pieces, path)
    return told


def of_piece(shares: Sequence[Path], piece: int) -> list[pa.Table]:
    """What was put down for one piece, in tables of the columns ``EXACT`` or ``ROUNDED``; what is zero may be left out."""
    tables = (read_batch(path, piece) for share in shares for path in files_of(share) if path.exists())
    return [table for table in tables if len(table)]


def files_of(output: Path) -> tuple[Path, Path]:
    """Where the rows of a share stand, those that are exact and those that are not; each if there are any."""
    return output.with_name(f"{output.name}-exact.arrow"), output.with_name(f"{output.name}-rounded.arrow")


def _write(columns: dict[str, list[pa.ChunkedArray]], schema: pa.Schema, pieces: Sequence[Steps], path: Path) -> None:
    """A batch a piece.

    Args:
        columns: Each in parts. It is emptied, so that nothing is held twice but the column at hand.
    """
    step = np.concatenate([part.to_numpy() for part in columns["step"]])
    order = order_by([step])
    edges = np.searchsorted(step if order is None else step[order], [*(one.first for one in pieces), pieces[-1].last + 1])
    made = {one.name: _in_order(columns.pop(one.name), one.type, order) for one in schema}
    zero = _MOSTLY_ZERO[schema]
    made = {name: column for name, column in made.items() if name not in zero or column.to_numpy().any()}
    rows = pa.RecordBatch.from_arrays([*made.values()], names=[*made])
    write_file(path, (rows.slice(first, end - first) for first, end in pairwise(edges.tolist())), rows.schema)


def _in_order(parts: list[pa.ChunkedArray], kind: pa.DataType, order: Index | None) -> pa.Array:
    column = pa.chunked_array([chunk for part in parts for chunk in part.chunks], type=kind).unify_dictionaries()
    parts.clear()
    joined = column.combine_chunks()
    return joined if order is None else joined.take(pa.array(order))
