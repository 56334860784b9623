"""One piece of the work: all rows of one kind in a range of steps, from all ranks, to two files and what there is to report."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import binary_join  # type: ignore[attr-defined]

from monitor.coordinator.manifest_format import StepRanges, StepsRecord
from monitor.coordinator.ownership import OF_PARAMETERS
from monitor.merge import outputs, tables
from monitor.merge.bits import BitDifference, compare_bits
from monitor.merge.discovery import SetAside
from monitor.merge.expert_loads import fill_loads
from monitor.merge.rows import Rows, Share, Source, Told, counts_elements, gathered, of_piece, put_in_order, read
from monitor.merge.statistics import FROM_EXPERTS, WEIGHTED, WHOLE_ONLY, Flags, Index, Statistics, combined
from monitor.merge.tensors import UNKNOWN, Catalogue
from monitor.series import CHECKED_KINDS, KINDS_OF_RANKS, NO_MICRO_STEP, REPLICA_KIND
from monitor.sinks.arrow import texts_of
from monitor.sinks.files import StepSpan
from monitor.stats.features import FEATURES, own_columns
from monitor.stats.histograms import MAGNITUDES
from monitor.stats.loads import LOAD_KIND
from monitor.stats.ops import CALLS, CHECKSUM
from monitor.stats.partials import Floats

# --- Which ops of whole tensors have no value because of what was recorded, and why.

NOT_RECORDED: Final = "not in the shards"
NOT_JOINED: Final = "a part has no value, or it does not follow from the parts' values in CSV: record hdf5 or parquet"
NOT_COUNTED: Final = "the parts' numbers of elements are not known: record the op shape, or hdf5 or parquet"
NOT_WEIGHTED: Final = "the weights of the parts in the mean are not known: record hdf5 or parquet"
OF_A_WHOLE: Final = "the matrix is split over ranks, and the value of the whole does not follow from those of its parts"


def missing_ops(tensors: Statistics, several: Flags, recorded: Flags) -> Counter[tuple[str, str]]:
    """How often an op has no value, by op and reason.

    Args:
        several: Whether a tensor is of several parts, shape ``(rows,)``.
        recorded: Whether any part has a value, shape ``(ops,)``.
    """
    found: Counter[tuple[str, str]] = Counter()
    rounded = ~tensors.exact & ~(tensors.count == 0)
    for op, known, there in zip(tensors.ops, tensors.known, recorded, strict=True):
        if op in (CHECKSUM, *FROM_EXPERTS) or (op in FEATURES and not there):
            continue  # of parts that are not ranges of the whole; of routers or of experts only; of no part
        if op in WHOLE_ONLY or rounded.any():
            found.update({(op, reason): int(which.sum()) for reason, which in _lacking(op, tensors, ~known, rounded, several)})
    return +found


def _lacking(op: str, tensors: Statistics, lacking: Flags, rounded: Flags, several: Flags) -> Iterator[tuple[str, Flags]]:
    """The reasons that there may be, and the rows that lack a value because of each."""
    if op in WHOLE_ONLY:
        yield OF_A_WHOLE, lacking & several
    elif op in FEATURES:  # a row that was recorded has what there is
        yield NOT_COUNTED if op in WEIGHTED else NOT_WEIGHTED, lacking & rounded & several
    else:
        uncounted = np.isnan(tensors.count) & (op in (*WEIGHTED, "std"))
        yield NOT_COUNTED, lacking & rounded & uncounted
        for reason, which in ((NOT_RECORDED, ~several), (NOT_JOINED, several)):
            yield reason, lacking & rounded & ~uncounted & which


TERMS: Final = "each rank has a term of a sum over ranks, and no rank has recorded the sum"
UNLIKE: Final = (
    "several ranks have a tensor of this name, nothing says how these belong together, and their numbers differ: they are "
    "terms of a sum, separate tensors, or replicas that have diverged. If they are replicas, pass dp_group or tp_group"
)
"""Why there is no number of a whole tensor."""

ROLES: Final = ("dp", "tp", "pp")

RUNS: Final = pa.schema([("rank", pa.int64()), *((role, pa.int64()) for role in ROLES)])
"""A row for each directory of the job: its rank, and that rank's places in its groups, null where it is in none."""


SCHEMA_VERSION: Final = 1
"""Version of the metadata of files, and of their columns."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one worker combines at a time.

    Attributes:
        sources: In order of ranks; where the rows were put in order before, none.
        shares: Where they were put, in order of ranks.
        number: Of the piece among those that they were put in order for.
        catalogue: The file of the kind's catalogue; None where no manifest knows of it.
        others: Of the kind whose rows stand in the same files of CSV, if there is one.
        runs: A file in the columns ``RUNS``.
        outputs: The files to write, of all rows and of the tensors.
        ndigits: The fewest decimals that a rank kept in its CSV files.
        job: Its id.
    """

    columns: tables.Columns
    steps: StepSpan
    sources: tuple[Source, ...]
    shares: tuple[Path, ...]
    number: int
    catalogue: Path | None
    others: Path | None
    runs: Path
    outputs: tuple[Path, Path]
    ndigits: int
    job: str

    @property
    def kind(self) -> str:
        return self.columns.kind

    @property
    def by_name(self) -> bool:
        """Whether rows stand in order of names in the files."""
        return self.outputs[0].suffix in outputs.SORTED

    def write(self, rows: pa.Table, facts: dict[str, Any], path: Path) -> None:
        """Write rows to one of the outputs.

        Args:
            facts: About the rows, besides what is known of all that the piece writes.
        """
        about = {"schema": SCHEMA_VERSION, "kind": self.kind, "folder": path.parent.name, "job_id": self.job, **facts}
        outputs.write_table(rows.replace_schema_metadata({outputs.METADATA: json.dumps(about)}), path)


@dataclass
class Outcome:
    """The result of combining a piece.

    Attributes:
        rows: Of the ranks.
        tensors: Rows of whole tensors.
        steps: Of which there are rows.
        gaps: By rank, the steps that others have rows of.
        duplicates: By rank, steps that stood in several files.
        newest: By directory, the last step of which rows were found.
        incomplete: By tensor, the steps at which a part is missing.
        without_global: By tensor and reason, the steps at which the ranks have rows that make no number of the whole.
        missing: How often an op has no value, by op and reason.
        unplaced: By rank, how many rows no manifest knows the placement of.
        not_compared: By rank, how many replicas there was nothing to compare with.
        bits_compared, bits_differing, bit_differences: See ``monitor.merge.bits.FoundBits``.
    """

    rows: int = 0
    tensors: int = 0
    steps: list[int] = field(default_factory=list)
    gaps: dict[int, list[int]] = field(default_factory=dict)
    duplicates: dict[int, list[int]] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    set_aside: list[SetAside] = field(default_factory=list)
    disagreements: list[Disagreement] = field(default_factory=list)
    incomplete: dict[str, list[int]] = field(default_factory=dict)
    without_global: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)
    unplaced: Counter[int] = field(default_factory=Counter)
    not_compared: Counter[int] = field(default_factory=Counter)
    bits_compared: Counter[int] = field(default_factory=Counter)
    bits_differing: Counter[int] = field(default_factory=Counter)
    bit_differences: list[BitDifference] = field(default_factory=list)

    @classmethod
    def of_reading(cls, told: Told) -> Outcome:
        return cls(duplicates=told.duplicates, newest=told.newest, set_aside=told.set_aside)


def worked(task: Piece | Share) -> Outcome:
    """Have one task done.

    Raises:
        OSError: a file cannot be written.
    """
    return reduce(task) if isinstance(task, Piece) else Outcome.of_reading(put_in_order(task))


def reduce(piece: Piece) -> Outcome:
    """Do one piece. What it writes does not depend on who does it.

    Raises:
        OSError: a file cannot be written.
    """
    catalogue, told = Catalogue.read(piece.catalogue, piece.kind, piece.others), Told()
    runs = tables.read_file(piece.runs)
    recorded = of_piece(piece.shares, piece.number) or read(piece.sources, piece.steps, piece.columns, catalogue, told)
    rows, statistics = gathered(recorded, runs["rank"].to_numpy(), catalogue, piece.columns, by_name=piece.by_name)
    outcome = Outcome.of_reading(told)
    recorded.clear()
    _combine(piece, rows, statistics, runs, outcome)
    return outcome


def _combine(piece: Piece, rows: Rows, statistics: Statistics, runs: pa.Table, outcome: Outcome) -> None:
    own: Index | slice = np.flatnonzero(~rows.replica) if rows.replica.any() else slice(None)
    written = rows.only(own)
    outcome.rows = len(written)
    outcome.steps, outcome.gaps = _steps_and_gaps(written)
    outcome.unplaced = Counter(written.rank[written.series == UNKNOWN].tolist()) if piece.kind != REPLICA_KIND else Counter()
    if outcome.rows:
        facts = _facts(written, outcome.steps)
        piece.write(per_rank_rows(piece.columns, runs, written, statistics.ops_of(own)), facts, piece.outputs[0])
    del written
    if outcome.rows and piece.kind not in KINDS_OF_RANKS:
        tensors = _tensors(piece, rows, statistics, outcome)
        outcome.tensors = len(tensors)
        piece.write(tensors, facts, piece.outputs[1])


def _steps_and_gaps(rows: Rows) -> tuple[list[int], dict[int, list[int]]]:
    """The steps, and by rank those that some rank has rows of and this one has not, though it measures this kind."""
    writers = rows.catalogue.writers
    step, rank = (
        column[tables.starts_of_runs([rows.column("step"), rows.rank])] for column in (rows.column("step"), rows.rank)
    )
    steps = tables.distinct(step)
    who = np.searchsorted(writers, rank)
    known = np.append(writers, UNKNOWN)[who] == rank
    there = np.zeros((len(writers), len(steps)), dtype=np.bool_)
    there[who[known], np.searchsorted(steps, step[known])] = True
    lacking = np.flatnonzero(~there.all(axis=1))
    return steps.tolist(), {int(writers[which]): steps[~there[which]].tolist() for which in lacking.tolist()}


def _facts(rows: Rows, steps: Sequence[int]) -> dict[str, Any]:
    """Which steps there are rows of, and of which tensors, in model order: a list for each fact of these, null where it is not
    known.
    """
    there = np.flatnonzero(np.bincount(rows.series[rows.series != UNKNOWN]))
    names = rows.catalogue.texts("global_name", there)
    columns = [names.codes.astype(np.int64), *(rows.catalogue.of(column, there) for column in ("stage", "whole", "tensor"))]
    order = tables.order_by(columns)
    columns = columns if order is None else [column[order] for column in columns]
    first = tables.starts_of_runs(columns[:3])
    first = first[np.argsort(columns[3][first], kind="stable")]
    texts = names.values.take(pa.array(columns[0][first])).to_pylist()
    stages, sizes = (_unless(column[first], UNKNOWN).to_pylist() for column in columns[1:3])
    return {"steps": _recorded(steps), "series": {"name": texts, "stage": stages, "elements": sizes}}


def _recorded(steps: Iterable[int]) -> dict[str, Any]:
    """Steps as a manifest has them."""
    found = StepRanges()
    for step in steps:
        found.add(step)
    return StepsRecord.of(found).model_dump(mode="json", exclude_none=True)


def per_rank_rows(kept: tables.Columns, runs: pa.Table, rows: Rows, statistics: Statistics) -> pa.Table:
    """Every row of every rank, with the ops of its kind.

    Args:
        runs: In the columns ``RUNS``.
    """
    texts = {
        "kind": tables.same(kept.kind, len(rows)),
        "global_name": rows.catalogue.texts("global_name", rows.series),
        **rows.texts,
    }
    columns = {
        "rank": pa.array(rows.rank),
        **{role: _of_each(runs[role], rows.run) for role in ROLES},
        "stage": _unless(rows.known("stage"), UNKNOWN),
        "vpp_stage": pa.array(rows.column("vpp_stage")),
        "step": pa.array(rows.column("step")),
        "micro_step": _unless(rows.micro_step(), NO_MICRO_STEP),
        "call_id": _unless(rows.column("call_id"), UNKNOWN),
        **_numbers(statistics),
        CALLS: _calls(rows.column(CALLS)),
    }
    return _table(columns, texts, outputs.columns_of(kept, outputs.PER_RANK))


def _tensors(piece: Piece, rows: Rows, statistics: Statistics, outcome: Outcome) -> pa.Table:
    """One row for each tensor of which every part is there."""
    order, copies, key = _copies(rows, by_name=piece.by_name)
    differ = _compare_copies(piece, rows, statistics, order, copies, outcome)
    chosen = copies[~rows.replica[order[copies]]]  # the first copy of each part
    starts = tables.starts_of_runs([column[chosen] for column in key])
    every = len(chosen) == len(rows) and bool((np.diff(order) == 1).all())
    firsts: Index | slice = slice(None) if every else order[chosen]
    begins = _begins(rows.catalogue, rows.series[firsts], statistics.count[firsts], starts) if piece.columns.checked else None
    tensors = combined(statistics, firsts, starts, begins)
    rows = rows.only(firsts)
    terms, unlike = _terms(rows, starts), _any(differ[chosen], starts)
    complete = _complete(rows, tensors, starts) | terms | unlike
    outcome.incomplete = _by_name(rows, starts[~complete])
    for reason, which in ((TERMS, terms), (UNLIKE, unlike & ~terms)):
        found = _by_name(rows, starts[which])
        outcome.without_global |= {(name, reason): steps for name, steps in found.items()}
    whole = complete & ~terms & ~unlike
    several = np.diff(starts, append=len(rows)) > 1
    if piece.kind == LOAD_KIND:
        several &= fill_loads(rows, starts, tensors)
    made = _global(piece.columns, rows, starts, tensors)
    if not whole.all():
        made, tensors, several = made.filter(whole), tensors.take(whole), several[whole]
    outcome.missing = missing_ops(tensors, several, np.logical_or.reduce(statistics.known, axis=1))
    return made


def _copies(rows: Rows, *, by_name: bool) -> tuple[Index, Index, list[Index]]:
    """The rows that the catalogue knows in order of tensors and parts, and of one part as the ranks stand, replicas last.

    Args:
        by_name: Names come before steps.

    Returns:
        The rows' numbers; where in these the copies of each part begin; step, micro-step and tensor of each.
    """
    known = np.flatnonzero(rows.series != UNKNOWN)
    columns = [rows.column("step"), rows.micro_step(), rows.known("tensor"), rows.known("part"), rows.replica.astype(np.int64)]
    by = [rows.catalogue.texts("global_name", rows.series).places(), *columns] if by_name else columns
    order = tables.order_by(by if len(known) == len(rows) else [column[known] for column in by])
    order = known if order is None else known[order]
    key = [column[order] for column in columns[:4]]
    return order, tables.starts_of_runs(key), key[:3]


def _compare_copies(piece: Piece, rows: Rows, statistics: Statistics, order: Index, copies: Index, outcome: Outcome) -> Flags:
    """Whether, at the first of the copies of a part, copies that are only assumed to be such differ."""
    differ = np.zeros(len(order), dtype=np.bool_)
    if len(copies) == len(order) and not rows.replica.any():
        return differ
    of_copy = np.repeat(copies, np.diff(copies, append=len(order)))
    rows, statistics = rows.only(order), statistics.ops_of(order)
    held_against = references(rows, of_copy)
    outcome.not_compared = not_compared(rows, held_against)
    found = compare(piece.kind, rows, statistics, held_against, piece.ndigits)
    assumed = rows.catalogue.is_assumed(rows.series)
    outcome.disagreements = [one for row, one in found.items() if not assumed[row]]
    if piece.columns.checked and piece.kind in CHECKED_KINDS:
        bits = compare_bits(rows, statistics.checksums, held_against, assumed)
        outcome.bits_compared, outcome.bits_differing, outcome.bit_differences = bits.compared, bits.differing, bits.first
    differ[held_against[[row for row in found if assumed[row]]]] = True
    return differ


def _begins(catalogue: Catalogue, series: Index, count: Floats, starts: Index) -> Index:
    """The word of the whole at which each part begins; ``UNKNOWN`` for parts that are not ranges side by side."""
    begin, words = np.where(count == 0, 0, catalogue.of("begin", series)), catalogue.of("words", series)
    sizes = np.diff(starts, append=len(series))
    run = np.repeat(np.arange(len(starts)), sizes)
    order = np.lexsort([count > 0, begin, run])  # empty parts first
    ends = np.cumsum(np.nan_to_num(count[order]))
    before = ends - np.nan_to_num(count[order])
    side_by_side = begin[order] == before - np.repeat(before[starts], sizes)
    known: Flags = np.logical_and.reduceat(side_by_side, starts)
    return np.where(known[run], begin * words, UNKNOWN)


def _terms(rows: Rows, starts: Index) -> Flags:
    """The tensors of parameters whose numbers are terms of a sum. Of an activation every rank's own is what people look for."""
    terms = _any(rows.catalogue.is_term(rows.series), starts)
    return terms if rows.catalogue.kind in OF_PARAMETERS else np.zeros_like(terms)


def _any(flags: Flags, starts: Index) -> Flags:
    """Whether a flag is set in each run of rows."""
    found: Flags = np.logical_or.reduceat(flags, starts) if len(starts) else np.zeros(0, dtype=np.bool_)
    return found


def _complete(rows: Rows, tensors: Statistics, starts: Index) -> Flags:
    """Whether all parts are there: by their elements where it is known how many there must be, or by their number."""
    whole, parts = (rows.catalogue.of(column, rows.series[starts]) for column in ("whole", "parts"))
    here = np.diff(starts, append=len(rows))
    of_several = np.logical_or.reduceat(rows.of_several(), starts)
    countable = (whole != UNKNOWN) & ~np.isnan(tensors.count) & ~of_several & counts_elements(rows.catalogue.kind)
    complete: Flags = np.where(countable, tensors.count == whole, here == parts)
    return complete


def _by_name(rows: Rows, starts: Index) -> dict[str, list[int]]:
    """The steps of these tensors."""
    found: dict[str, list[int]] = {}
    steps = rows.column("step")[starts].tolist()
    for name, step in zip(rows.text("global_name", starts).to_pylist(), steps, strict=True):
        known = found.setdefault(name, [])
        if known[-1:] != [step]:
            known.append(step)
    return found


def _global(kept: tables.Columns, rows: Rows, starts: Index, tensors: Statistics) -> pa.Table:
    series = rows.series[starts]
    texts = {
        "kind": tables.same(kept.kind, len(starts)),
        "name": rows.catalogue.texts("global_name", series),
        "ranks": _joined(rows.rank, starts),
    }
    columns = {
        "stage": _unless(rows.catalogue.of("stage", series), UNKNOWN),
        "step": pa.array(rows.column("step")[starts]),
        "micro_step": _unless(rows.micro_step()[starts], NO_MICRO_STEP),
        "term": pa.array(rows.catalogue.is_term(series)),
        **_numbers(tensors),
        CALLS: _calls(_calls_together(rows.column(CALLS), starts)),
    }
    return _table(columns, texts, outputs.columns_of(kept, outputs.GLOBAL))


def _joined(ranks: Index, starts: Index) -> tables.Texts:
    """The ranks of each run, as text."""
    texts = pa.array(map(str, range(ranks.max(initial=-1) + 1)), type=pa.string())
    if len(starts) == len(ranks):
        return tables.Texts(ranks.astype(np.int32), texts)
    lists = pa.ListArray.from_arrays(pa.array(np.append(starts, len(ranks)).astype(np.int32)), texts.take(pa.array(ranks)))
    return tables.Texts.of([binary_join(lists, " ").dictionary_encode()])


def _numbers(statistics: Statistics) -> dict[str, pa.Array]:
    unknown = np.isnan(statistics.count)
    count = np.where(unknown, 0, statistics.count).astype(np.int64)
    texts = {MAGNITUDES: _spelled, CHECKSUM: _checksums}
    made = {op: texts[op](statistics) if op in texts else statistics.op(op) for op in statistics.ops}
    return {"count": pa.array(count, mask=unknown if unknown.any() else None), **made}


def _spelled(statistics: Statistics) -> pa.Array:
    """Histograms as text."""
    there, counts = statistics.known[statistics.ops.index(MAGNITUDES)], statistics.partials.histogram
    if counts is None or not there.any():
        return pa.nulls(len(there), pa.string()).dictionary_encode()
    which = np.cumsum(there) - 1
    texts = texts_of(counts[there]).dictionary_encode()
    return texts.take(pa.array(which, mask=~there))


def _checksums(statistics: Statistics) -> pa.Array:
    """Checksums as text. As copies have the same, there are fewer texts than rows."""
    each, which = np.unique(statistics.checksums, return_inverse=True)
    codes = pa.array(which.reshape(-1).astype(np.int32), mask=statistics.checksums == 0)
    return pa.DictionaryArray.from_arrays(codes, _hexadecimal(each))


_DIGITS: Final = np.array([f"{byte:02x}".encode() for byte in range(256)]).view(np.uint16)
"""The two digits of each byte."""


def _hexadecimal(numbers: NDArray[np.uint64]) -> pa.Array:
    """The numbers with 16 digits each. Formatting them one by one would take a hundred times as long."""
    digits = _DIGITS[numbers.astype(">u8").view(np.uint8)]
    offsets = np.arange(0, 16 * len(numbers) + 1, 16, dtype=np.int32)
    return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(digits))


def _calls_together(calls: Index, starts: Index) -> Index:
    """The calls of all parts of each run; 0 where a part does not say its own."""
    together: Index = np.where(np.minimum.reduceat(calls, starts) > 0, np.add.reduceat(calls, starts), 0)
    return together


def _calls(calls: Index) -> pa.Array:
    """A column, null where no calls are combined."""
    return _unless(np.maximum(calls, 0), 0)


def _unless(values: Index, missing: int) -> pa.Array:
    """A column, null where it is ``missing``."""
    nothing = values == missing
    return pa.array(values, mask=nothing if nothing.any() else None)


def _of_each(places: pa.ChunkedArray, runs: Index) -> pa.ChunkedArray:
    return _unless(places.fill_null(UNKNOWN).to_numpy()[runs], UNKNOWN)


def _table(columns: dict[str, pa.Array], texts: dict[str, tables.Texts], schema: pa.Schema) -> pa.Table:
    chosen_texts = {name: text.column() for name, text in texts.items()}
    return pa.table([{**columns, **chosen_texts}[one.name] for one in schema], schema=schema)


# --- Copies of the same numbers that differ: a lost all-reduce, a corrupted memory, a seed that went wrong.

COMPARED: Final = ("norm", "min", "max", "nans", "infs")
_OF_FEATURES: Final = {"linear_hook": ("frobenius_norm",)}
"""A spectral norm is approached from step to step, and two ranks may be on different ways to it."""

TOLERANCE: Final = 1e-6
"""Relative. Replicas are read by the same code, but perhaps on other devices, which add in another order."""

NONE: Final = -1

_PLAIN_FROM: Final = 1e-3
_PLAIN_BELOW: Final = 1e15
"""Between these CSV keeps so many decimals, of smaller and larger magnitudes so many digits."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A copy that is not what another rank has.

    Attributes:
        difference: Of the values; NaN where one of them is.
    """

    kind: str
    name: str
    step: int
    micro_step: int
    rank: int
    other: int
    op: str
    value: float
    others_value: float

    @property
    def difference(self) -> float:
        return abs(self.value - self.others_value) if self.value != self.others_value else 0.0


def references(rows: Rows, first: Index) -> Index:
    """The row that each one is held against; its own number where there is none but itself.

    A replica is recorded once in a step. Its owner may have a row for every micro-step: the last one counts.

    Args:
        rows: In order of steps, and within a step of micro-steps.
        first: For each row the first one of the same step, micro-step and part, the owner's if there is one.
    """
    alone = np.flatnonzero(rows.replica[first])
    own = np.flatnonzero(~rows.replica)
    if not len(alone):
        return first
    key = np.stack([rows.column("step"), rows.known("tensor"), rows.known("part")])[:, np.concatenate([own, alone])]
    part = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
    last = np.full(part.max() + 1, NONE)
    np.maximum.at(last, part[: len(own)], first[own])
    found = first.copy()
    found[alone] = np.where(last[part[len(own) :]] == NONE, alone, last[part[len(own) :]])
    return found


def not_compared(rows: Rows, reference: Index) -> Counter[int]:
    """The number of replicas of each rank that have no row to be compared with."""
    return Counter(rows.rank[rows.replica[reference]].tolist())


def compare(kind: str, rows: Rows, statistics: Statistics, reference: Index, ndigits: int) -> dict[int, Disagreement]:
    """Find the copies that are not what most of the copies are, or if there is no such majority not what the first one is.

    Returns:
        By row.

    Args:
        reference: See ``references``.
        ndigits: Decimals of rows that come from CSV.
    """
    copies = np.flatnonzero((reference != np.arange(len(reference))) & ~rows.replica[reference])
    if not len(copies):
        return {}
    copies = copies[np.argsort(reference[copies], kind="stable")]
    found: dict[int, Disagreement] = {}
    for op in _OF_FEATURES.get(kind, own_columns(kind)) or COMPARED:
        values = _Values.of(op, statistics, ndigits)
        for row, other in _odd(values, copies, reference[copies]):
            found.setdefault(row, _disagreement(kind, rows, row, other, op, values))
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of an op, one for each row.

    Attributes:
        known: Whether a row has one.
        exact: Whether it was not rounded.
    """

    values: Floats
    known: Flags
    exact: Flags
    ndigits: int

    @classmethod
    def of(cls, op: str, statistics: Statistics, ndigits: int) -> _Values:
        column = statistics.op(op)
        known = column.is_valid().to_numpy(zero_copy_only=False)
        return cls(column.fill_null(0.0).to_numpy(), known, statistics.exact, ndigits)

    def differ(self, one: Index, other: Index | int) -> Flags:
        a, b = self.values[one], self.values[other]
        rounded = ~(self.exact[one] & self.exact[other])
        with np.errstate(invalid="ignore"):
            far = ~(np.abs(a - b) <= _allowed(np.maximum(np.abs(a), np.abs(b)), rounded, self.ndigits))
        alike = (a == b) | (np.isnan(a) & np.isnan(b))
        differ: Flags = self.known[one] & self.known[other] & far & ~alike
        return differ


def _odd(values: _Values, copies: Index, first: Index) -> Iterator[tuple[int, int]]:
    """Each row that differs, and the one that it differs from.

    Args:
        first: What each of the copies is held against, ascending.
    """
    for each in np.unique(first[values.differ(copies, first)]).tolist():
        group = np.append(each, copies[slice(*np.searchsorted(first, [each, each + 1]))])
        usual = _usual(values, group)
        yield from ((row, usual) for row in group[values.differ(group, usual)].tolist())


def _usual(values: _Values, group: Index) -> int:
    """The first of the copies that most of them agree with, if there is one; otherwise the first."""
    first = int(group[0])
    others = group[values.differ(group, first)]
    if 2 * len(others) > len(group):  # what more than half of all have is in the middle of these
        middle = others[np.argsort(values.values[others], kind="stable")[len(others) // 2]]
        alike = others[~values.differ(others, middle)]
        return int(alike[0]) if 2 * len(alike) > len(group) else first
    return first


def _allowed(scale: Floats, rounded: Flags, ndigits: int) -> Floats:
    """How far two values may be from each other. Half a unit in the last decimal is lost where one was rounded."""
    unit = math.pow(10.0, -min(ndigits, 16))
    finite = np.where(np.isfinite(scale), scale, 0.0)
    rounding = unit * np.where((finite < _PLAIN_FROM) | (finite >= _PLAIN_BELOW), finite, 1.0)
    allowed: Floats = TOLERANCE * finite + np.where(rounded, rounding, 0.0)
    return allowed


def _disagreement(kind: str, rows: Rows, row: int, other: int, op: str, values: _Values) -> Disagreement:
    name = rows.text("global_name", np.array([row]))[0].as_py()
    step, micro_step = int(rows.column("step")[row]), int(rows.micro_step()[row])
    value, others_value = values.values[[row, other]].tolist()
    return Disagreement(kind, name, step, micro_step, int(rows.rank[row]), int(rows.rank[other]), op, value, others_value)
