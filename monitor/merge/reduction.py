"""One piece of the work: all rows of one kind in a range of steps, from all ranks, to two files and what there is to report."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import binary_join  # type: ignore[attr-defined]

from monitor.merge.catalogue import SCHEMA as SERIES
from monitor.merge.catalogue import UNKNOWN, of_rank, read_catalogue
from monitor.merge.copies import Disagreement, compare
from monitor.merge.discovery import SetAside
from monitor.merge.output import GLOBAL, PER_RANK, write_table
from monitor.merge.shards import COLUMNS, ForeignError, Shard
from monitor.merge.statistics import Index, Statistics, combined
from monitor.ranks.records import StepsRecord
from monitor.series import NO_MICRO_STEP, REPLICA_KIND
from monitor.sinks.measurements import TEXT
from monitor.sinks.shard_names import Steps
from monitor.stats.ops import NUMERIC_OPS

Flags = NDArray[np.bool_]

NOT_RECORDED: Final = "not in the shards"
NOT_COUNTED: Final = "how many elements the parts have is not known: record the op shape, or the format hdf5"


@dataclass(frozen=True, slots=True)
class Source:
    """What one directory has of the piece.

    Attributes:
        coordinates: Of the rank in its data-, tensor- and pipeline-parallel group; None where it is in none.
        end: Steps from here on do not count.
        abandoned: Nor do these.
        shards: Of the kind.
        replicas: To be compared with it.
        ndigits: Decimals of its CSV files.
    """

    rank: int
    coordinates: tuple[int | None, int | None, int | None]
    end: int
    abandoned: StepsRecord
    written: StepsRecord
    shards: tuple[Shard, ...]
    replicas: tuple[Shard, ...]
    ndigits: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one worker does at a time.

    Attributes:
        sources: In order of ranks.
        catalogue: The file of the kind's catalogue; None where no manifest knows of it.
        outputs: The files to write, of all rows and of the tensors.
    """

    kind: str
    steps: Steps
    sources: tuple[Source, ...]
    catalogue: Path | None
    outputs: tuple[Path, Path]


@dataclass
class Outcome:
    """What came of a piece.

    Attributes:
        rows: Of the ranks.
        tensors: Rows of whole tensors.
        steps: Of which there are rows.
        gaps: By rank, the steps that others have rows of.
        duplicates: By rank, steps that stood in several files.
        incomplete: By tensor, the steps at which a part is missing.
        missing: How often an op has no value, by op and reason.
        unplaced: By rank, how many rows no manifest knows the placement of.
    """

    rows: int = 0
    tensors: int = 0
    steps: list[int] = field(default_factory=list)
    gaps: dict[int, list[int]] = field(default_factory=dict)
    duplicates: dict[int, list[int]] = field(default_factory=dict)
    set_aside: list[SetAside] = field(default_factory=list)
    disagreements: list[Disagreement] = field(default_factory=list)
    incomplete: dict[str, list[int]] = field(default_factory=dict)
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)
    unplaced: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of all ranks, with what the catalogue knows of each.

    Attributes:
        table: In the columns of ``monitor.merge.shards``.
        rank: Of each row.
        series: Its row in the catalogue, ``UNKNOWN`` where it has none.
        replica: Whether it is there to be compared alone.
        catalogue: See ``monitor.merge.catalogue.SCHEMA``.
    """

    table: pa.Table
    rank: Index
    series: Index
    replica: Flags
    catalogue: pa.Table

    def known(self, column: str) -> Index:
        """A column of the catalogue, for each row; ``UNKNOWN`` for those that are not in it."""
        values = np.append(self.catalogue[column].to_numpy(), UNKNOWN)
        taken: Index = values[self.series]
        return taken

    def text(self, column: str, rows: Index) -> pa.Array:
        return self.catalogue[column].take(pa.array(self.series[rows])).combine_chunks()

    def column(self, name: str) -> Index:
        values: Index = self.table[name].to_numpy()
        return values

    def micro_step(self) -> Index:
        values: Index = self.table["micro_step"].fill_null(NO_MICRO_STEP).to_numpy()
        return values

    def statistics(self) -> Statistics:
        shape = self.table["shape"].combine_chunks()
        counts = np.array([*map(_elements, shape.dictionary.to_pylist()), UNKNOWN], dtype=np.int64)
        own = counts[shape.indices.fill_null(-1).to_numpy()]
        return Statistics.of(self.table, np.where(own == UNKNOWN, self.known("elements"), own))

    def only(self, rows: Index | Flags) -> Rows:
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Rows(self.table.take(pa.array(index)), self.rank[index], self.series[index], self.replica[index], self.catalogue)


def reduce(piece: Piece) -> Outcome:
    """Do one piece. What it writes does not depend on who does it.

    Raises:
        OSError: a file cannot be written.
    """
    outcome = Outcome()
    rows = _read(piece, outcome)
    own = rows.only(~rows.replica)
    outcome.rows = len(own.rank)
    outcome.steps = np.unique(own.column("step")).tolist()
    outcome.gaps = _gaps(own)
    outcome.unplaced = Counter(own.rank[own.series == UNKNOWN].tolist()) if piece.kind != REPLICA_KIND else Counter()
    if outcome.rows:
        write_table(_per_rank(piece, own), piece.outputs[0])
    if outcome.rows and piece.kind != REPLICA_KIND:
        tensors = _tensors(piece, rows, outcome)
        outcome.tensors = len(tensors)
        write_table(tensors, piece.outputs[1])
    return outcome


def _read(piece: Piece, outcome: Outcome) -> Rows:
    catalogue = read_catalogue(piece.catalogue) if piece.catalogue is not None else SERIES.empty_table()
    tables, ranks, series, replica = [], [], [], []
    for source in piece.sources:
        numbers = of_rank(catalogue, source.rank)
        for shards, of in ((source.shards, ""), (source.replicas, piece.kind)):
            table = _read_source(source, shards, piece.steps, outcome)
            found = _numbered(table, numbers, of)
            if of:  # a file of replicas holds those of every kind
                table, found = table.filter(found != UNKNOWN), found[found != UNKNOWN]
            tables.append(table)
            ranks.append(np.full(len(table), source.rank))
            series.append(found)
            replica.append(np.full(len(table), bool(of)))
    table = pa.concat_tables([COLUMNS.empty_table(), *tables]).unify_dictionaries().combine_chunks()
    rank, numbered = (np.concatenate([np.empty(0, np.int64), *columns]) for columns in (ranks, series))
    rows = Rows(table, rank, numbered, np.concatenate([np.empty(0, np.bool_), *replica]), catalogue)
    return rows.only(np.lexsort((rank, rows.column("step"))))


def _read_source(source: Source, shards: Iterable[Shard], steps: Steps, outcome: Outcome) -> pa.Table:
    """The rows of a directory, each step once: from the file that has partials, and of several the last."""
    tables = [COLUMNS.empty_table()]
    seen: dict[int, bool] = {}
    for shard in sorted(shards, key=lambda one: (one.exact, one.steps, one.path.name), reverse=True):
        if not shard.exact and _has_all(source.written, shard, steps, seen):
            continue  # the same rows with less in them
        try:
            table = shard.read(steps)
        except ForeignError as error:
            outcome.set_aside.append(SetAside(str(shard.path), str(error)))
            continue
        column = table["step"].to_numpy()
        there = np.unique(column).tolist()
        outcome.duplicates.setdefault(source.rank, []).extend(step for step in there if seen.get(step) == shard.exact)
        fresh = [step for step in there if step not in seen and step < source.end and not source.abandoned.holds(step)]
        seen |= dict.fromkeys(fresh, shard.exact)
        tables.append(table if fresh == there else table.filter(np.isin(column, fresh)))
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _has_all(written: StepsRecord, shard: Shard, steps: Steps, seen: Mapping[int, bool]) -> bool:
    """Whether every step that the manifest puts into a file of CSV was found with its partials."""
    if not any(seen.values()):
        return False
    first, last = max(shard.steps.first, steps.first), min(shard.steps.last, steps.last)
    within = [step for step in written.steps() if first <= step <= last]
    return bool(within) and all(seen.get(step, False) for step in within)


def _numbered(table: pa.Table, numbers: dict[tuple[str, int, str], int], of: str) -> Index:
    """Of each row the number of its series."""
    name = table["name"].combine_chunks()
    names, codes = name.dictionary.to_pylist(), name.indices.to_numpy()
    chunks, chunk = np.unique(table["vpp_stage"].to_numpy(), return_inverse=True)
    pairs, each = np.unique(chunk * len(names) + codes, return_inverse=True)
    places = [(int(chunks[pair // len(names)]), names[pair % len(names)]) for pair in pairs.tolist()]
    known = [numbers.get((of, *place), UNKNOWN) for place in places]
    found: Index = np.array(known, dtype=np.int64)[each]
    return found


def _elements(shape: str) -> int:
    try:
        return math.prod(map(int, json.loads(shape)))
    except (ValueError, TypeError):
        return UNKNOWN


def _gaps(rows: Rows) -> dict[int, list[int]]:
    """By rank, the steps that some rank has rows of and this one has not, though it measures this kind."""
    own_kind = [not of for of in rows.catalogue["of"].to_pylist()]
    writers = set(rows.catalogue["rank"].to_numpy()[own_kind].tolist())
    step = rows.column("step")
    every = np.unique(step)
    own = {rank: np.setdiff1d(every, step[rows.rank == rank]).tolist() for rank in sorted(writers)}
    return {rank: steps for rank, steps in own.items() if steps}


def _per_rank(piece: Piece, rows: Rows) -> pa.Table:
    statistics = rows.statistics()
    coordinates = {source.rank: source.coordinates for source in piece.sources}
    ranks, each = np.unique(rows.rank, return_inverse=True)
    stage = rows.known("stage")
    names = pa.array([*rows.catalogue["global_name"].to_pylist(), None], type=pa.string()).dictionary_encode()
    columns = {
        "kind": _same(piece.kind, len(rows.rank)),
        "rank": pa.array(rows.rank),
        **{
            role: pa.array([coordinates[rank][which] for rank in ranks.tolist()], type=pa.int64()).take(pa.array(each))
            for which, role in enumerate(("dp", "tp", "pp"))
        },
        "stage": pa.array(stage, mask=stage == UNKNOWN),
        "global_name": names.take(pa.array(np.where(rows.series == UNKNOWN, len(names) - 1, rows.series))),
        **{name: rows.table[name] for name in ("vpp_stage", "name", "step", "micro_step", "call_id", "shape", "dtype")},
        **_numbers(statistics),
    }
    return _table(columns, PER_RANK)


def _tensors(piece: Piece, rows: Rows, outcome: Outcome) -> pa.Table:
    """One row for each tensor of which every part is there."""
    rows = rows.only(rows.series != UNKNOWN)
    keys = [rows.rank, rows.replica, rows.known("part"), rows.known("tensor"), rows.micro_step(), rows.column("step")]
    rows = rows.only(np.lexsort(keys))
    statistics = rows.statistics()
    key = np.stack([rows.column("step"), rows.micro_step(), rows.known("tensor"), rows.known("part")])
    copies = _starts(key)  # the first of the copies of a part stands for all
    of_copy = np.repeat(np.arange(len(copies)), np.diff(copies, append=len(rows.rank)))
    outcome.disagreements = compare(piece.kind, rows, statistics, copies[of_copy], min(one.ndigits for one in piece.sources))
    chosen = copies[~rows.replica[copies]]
    parts, tensor_key = statistics.take(chosen), key[:3, chosen]
    rows = rows.only(chosen)
    starts = _starts(tensor_key)
    tensors = combined(parts, starts)
    complete = _complete(rows, tensors, starts)
    _report_incomplete(rows, starts[~complete], outcome)
    _report_missing(tensors.take(complete), outcome)
    return _global(piece.kind, rows, starts, tensors).filter(complete)


def _starts(key: Index) -> Index:
    """Where something changes in keys of shape ``(fields, rows)``."""
    changes = np.ones(key.shape[1], dtype=np.bool_)
    changes[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    return np.flatnonzero(changes)


def _complete(rows: Rows, tensors: Statistics, starts: Index) -> Flags:
    """Whether all parts are there: by their elements where it is known how many there must be, or by their number."""
    whole, parts = rows.known("whole")[starts], rows.known("parts")[starts]
    here = np.diff(starts, append=len(rows.rank))
    countable = (whole != UNKNOWN) & ~np.isnan(tensors.count)
    complete: Flags = np.where(countable, tensors.count == whole, here == parts)
    return complete


def _report_incomplete(rows: Rows, starts: Index, outcome: Outcome) -> None:
    steps = rows.column("step")[starts].tolist()
    for name, step in zip(rows.text("global_name", starts).to_pylist(), steps, strict=True):
        known = outcome.incomplete.setdefault(name, [])
        if known[-1:] != [step]:
            known.append(step)


def _report_missing(tensors: Statistics, outcome: Outcome) -> None:
    there = ~tensors.exact & ~(tensors.count == 0)
    for index, op in enumerate(NUMERIC_OPS):
        missing = there & ~tensors.known[index]
        uncounted = missing & np.isnan(tensors.count) & (op in ("mean", "zeros", "std"))
        for reason, which in ((NOT_COUNTED, uncounted), (NOT_RECORDED, missing & ~uncounted)):
            if which.any():
                outcome.missing[op, reason] += int(which.sum())


def _global(kind: str, rows: Rows, starts: Index, tensors: Statistics) -> pa.Table:
    micro_step, stage = rows.micro_step()[starts], rows.known("stage")[starts]
    columns = {
        "kind": _same(kind, len(starts)),
        "stage": pa.array(stage, mask=stage == UNKNOWN),
        "name": rows.text("global_name", starts).dictionary_encode(),
        "step": pa.array(rows.column("step")[starts]),
        "micro_step": pa.array(micro_step, mask=micro_step == NO_MICRO_STEP),
        "ranks": _joined(rows.rank, starts),
        "term": rows.text("term", starts),
        **_numbers(tensors),
    }
    return _table(columns, GLOBAL)


def _joined(ranks: Index, starts: Index) -> pa.Array:
    """The ranks of each run, as text."""
    lists = pa.ListArray.from_arrays(
        pa.array([*starts.tolist(), len(ranks)], type=pa.int32()), pa.array(ranks).cast(pa.string())
    )
    return binary_join(lists, " ").dictionary_encode()


def _numbers(statistics: Statistics) -> dict[str, pa.Array]:
    unknown = np.isnan(statistics.count)
    count = pa.array(np.where(unknown, 0, statistics.count).astype(np.int64), mask=unknown)
    return {"count": count, **{op: statistics.op(op) for op in NUMERIC_OPS}}


def _same(text: str, rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=np.int32)), pa.array([text]))


def _table(columns: dict[str, pa.Array | pa.ChunkedArray], schema: pa.Schema) -> pa.Table:
    return pa.table([_plain(columns[one.name], one) for one in schema], schema=schema)


def _plain(column: pa.Array | pa.ChunkedArray, of: pa.Field) -> pa.Array | pa.ChunkedArray:
    """Text with a dictionary of what is in use, in order of first use: equal rows make equal files."""
    if of.type != TEXT:
        return column
    return column.cast(pa.string()).dictionary_encode().cast(TEXT)


def planned(shards: Sequence[Shard], limit: Steps, rows: int) -> list[Steps]:
    """Cut the steps of some shards into ranges of about ``rows`` rows, where possible between shards."""
    inside = [one for one in shards if one.steps.meets(limit)]
    if not inside:
        return []
    first = {max(one.steps.first, limit.first) for one in inside}
    end = min(max(one.steps.last for one in inside), limit.last) + 1
    bounds = np.array(sorted({*first, *(one.steps.last + 1 for one in inside if one.steps.last < end), end}))
    rate = np.zeros(len(bounds))  # rows a step that begin, less those that end
    for one in inside:
        density = one.rows / (one.steps.last - one.steps.first + 1)
        rate[np.searchsorted(bounds, max(one.steps.first, limit.first))] += density
        rate[np.searchsorted(bounds, min(one.steps.last + 1, end))] -= density
    return _cut(bounds.tolist(), np.cumsum(rate).tolist(), rows)


def _cut(bounds: Sequence[int], density: Sequence[float], rows: int) -> list[Steps]:
    ranges: list[Steps] = []
    held = 0.0
    for first, end, each in zip(bounds, bounds[1:], density, strict=False):
        here = each * (end - first)
        if ranges and held + here <= rows:
            ranges[-1], held = Steps(ranges[-1].first, end - 1), held + here
            continue
        pieces = min(max(1, math.ceil(here / rows)), end - first)
        edges = [first + (end - first) * number // pieces for number in range(pieces + 1)]
        ranges += [Steps(one, other - 1) for one, other in itertools.pairwise(edges)]
        held = here / pieces
    return ranges
