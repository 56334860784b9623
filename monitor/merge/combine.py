"""One piece of the work: all rows of one kind in a range of steps, from all ranks, to two files and what there is to report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow.compute import binary_join  # type: ignore[attr-defined]

from monitor.coordinator.ownership import OF_PARAMETERS
from monitor.merge.arrow_tables import Texts, order_by, read_file, same, starts_of_runs
from monitor.merge.catalogue import Catalogue
from monitor.merge.discovery import SetAside
from monitor.merge.gather import Source, Told, of_piece, read
from monitor.merge.output import GLOBAL, PER_RANK, Columns, columns_of, write_table
from monitor.merge.replicas import Disagreement, compare, not_compared, references
from monitor.merge.rows import Rows, counts_elements, gathered
from monitor.merge.statistics import WEIGHTED, WHOLE_ONLY, Flags, Index, Statistics, combined
from monitor.merge.survey import UNKNOWN
from monitor.series import NO_MICRO_STEP, REPLICA_KIND
from monitor.sinks.files import StepSpan
from monitor.stats.features import FEATURES
from monitor.stats.histograms import MAGNITUDES, histogram_text
from monitor.stats.ops import CALLS

# --- Which ops of whole tensors have no value because of what was recorded, and why.

NOT_RECORDED: Final = "not in the shards"
NOT_COUNTED: Final = "how many elements the parts have is not known: record the op shape, or the format hdf5"
NOT_WEIGHTED: Final = "how much each part weighs is not known: record the format hdf5"
OF_A_WHOLE: Final = "of a matrix that is cut no rank knows it, and what ranks know of their parts does not make it up"


def missing_ops(tensors: Statistics, several: Flags) -> Counter[tuple[str, str]]:
    """How often an op has no value, by op and reason.

    Args:
        several: Whether a tensor is of several parts, shape ``(rows,)``.
    """
    found: Counter[tuple[str, str]] = Counter()
    rounded = ~tensors.exact & ~(tensors.count == 0)
    for op, known in zip(tensors.ops, tensors.known, strict=True):
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
        yield NOT_RECORDED, lacking & rounded & ~uncounted


TERMS: Final = "each rank has a term of a sum over ranks, and no rank has recorded the sum"
UNLIKE: Final = (
    "the ranks have tensors of this name, nothing says how they belong together, and their numbers differ: they are terms of a "
    "sum, tensors of their own, or replicas that have come apart. If they are replicas, pass dp_group or tp_group"
)
"""Why there is no number of a whole tensor."""

ROLES: Final = ("dp", "tp", "pp")

RUNS: Final = pa.schema([("rank", pa.int64()), *((role, pa.int64()) for role in ROLES)])
"""A row for each directory of the job: its rank, and that rank's places in its groups, null where it is in none."""


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
    """

    columns: Columns
    steps: StepSpan
    sources: tuple[Source, ...]
    shares: tuple[Path, ...]
    number: int
    catalogue: Path | None
    others: Path | None
    runs: Path
    outputs: tuple[Path, Path]
    ndigits: int

    @property
    def kind(self) -> str:
        return self.columns.kind


@dataclass
class Outcome:
    """What came of a piece.

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
    """

    rows: int = 0
    tensors: int = 0
    steps: list[int] = field(default_factory=list)
    gaps: dict[int, list[int]] = field(default_factory=dict)
    duplicates: dict[int, list[int]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    set_aside: list[SetAside] = field(default_factory=list)
    disagreements: list[Disagreement] = field(default_factory=list)
    incomplete: dict[str, list[int]] = field(default_factory=dict)
    without_global: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)
    unplaced: Counter[int] = field(default_factory=Counter)
    not_compared: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of_reading(cls, told: Told) -> Outcome:
        return cls(duplicates=told.duplicates, newest=told.newest, set_aside=told.set_aside)


def reduce(piece: Piece) -> Outcome:
    """Do one piece. What it writes does not depend on who does it.

    Raises:
        OSError: a file cannot be written.
    """
    catalogue, told = Catalogue.read(piece.catalogue, piece.kind, piece.others), Told()
    runs = read_file(piece.runs)
    tables = of_piece(piece.shares, piece.number) or read(piece.sources, piece.steps, piece.columns, catalogue, told)
    rows, statistics = gathered(tables, runs["rank"].to_numpy(), catalogue, piece.columns)
    outcome = Outcome.of_reading(told)
    tables.clear()
    _combine(piece, rows, statistics, runs, outcome)
    return outcome


def _combine(piece: Piece, rows: Rows, statistics: Statistics, runs: pa.Table, outcome: Outcome) -> None:
    own: Index | slice = np.flatnonzero(~rows.replica) if rows.replica.any() else slice(None)
    written = rows.only(own)
    outcome.rows = len(written)
    outcome.steps, outcome.gaps = _steps_and_gaps(written)
    outcome.unplaced = Counter(written.rank[written.series == UNKNOWN].tolist()) if piece.kind != REPLICA_KIND else Counter()
    if outcome.rows:
        write_table(_per_rank(piece.columns, runs, written, statistics.take(own)), piece.outputs[0])
    del written
    if outcome.rows and piece.kind != REPLICA_KIND:
        tensors = _tensors(piece, rows, statistics, outcome)
        outcome.tensors = len(tensors)
        write_table(tensors, piece.outputs[1])


def _steps_and_gaps(rows: Rows) -> tuple[list[int], dict[int, list[int]]]:
    """The steps, and by rank those that some rank has rows of and this one has not, though it measures this kind."""
    step, rank, writers = rows.column("step"), rows.rank, rows.catalogue.writers
    starts = starts_of_runs([step, rank])
    steps, place = np.unique(step[starts], return_inverse=True)
    who = np.searchsorted(writers, rank[starts])
    known = np.append(writers, UNKNOWN)[who] == rank[starts]
    there = np.zeros((len(writers), len(steps)), dtype=np.bool_)
    there[who[known], place[known]] = True
    lacking = np.flatnonzero(~there.all(axis=1))
    return steps.tolist(), {int(writers[which]): steps[~there[which]].tolist() for which in lacking.tolist()}


def _per_rank(kept: Columns, runs: pa.Table, rows: Rows, statistics: Statistics) -> pa.Table:
    texts = {
        "kind": same(kept.kind, len(rows)),
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
    return _table(columns, texts, columns_of(kept, PER_RANK))


def _tensors(piece: Piece, rows: Rows, statistics: Statistics, outcome: Outcome) -> pa.Table:
    """One row for each tensor of which every part is there."""
    order, copies, key = _copies(rows)
    differ = _compare_copies(piece, rows, statistics, order, copies, outcome)
    chosen = copies[~rows.replica[order[copies]]]  # the first copy of each part
    starts = starts_of_runs([column[chosen] for column in key])
    tensors = combined(statistics, order[chosen], starts)
    rows = rows.only(order[chosen])
    terms, unlike = _terms(rows, starts), _any(differ[chosen], starts)
    complete = _complete(rows, tensors, starts) | terms | unlike
    outcome.incomplete = _by_name(rows, starts[~complete])
    for reason, which in ((TERMS, terms), (UNLIKE, unlike & ~terms)):
        found = _by_name(rows, starts[which])
        outcome.without_global |= {(name, reason): steps for name, steps in found.items()}
    whole = complete & ~terms & ~unlike
    made, several = _global(piece.columns, rows, starts, tensors), np.diff(starts, append=len(rows)) > 1
    if not whole.all():
        made, tensors, several = made.filter(whole), tensors.take(whole), several[whole]
    outcome.missing = missing_ops(tensors, several)
    return made


def _copies(rows: Rows) -> tuple[Index, Index, list[Index]]:
    """The rows that the catalogue knows in order of tensors and parts, and of one part as the ranks stand, replicas last.

    Returns:
        The rows' numbers; where in these the copies of each part begin; step, micro-step and tensor of each.
    """
    known = np.flatnonzero(rows.series != UNKNOWN)
    columns = [rows.column("step"), rows.micro_step(), rows.known("tensor"), rows.known("part"), rows.replica.astype(np.int64)]
    order = order_by(columns if len(known) == len(rows) else [column[known] for column in columns])
    order = known if order is None else known[order]
    key = [column[order] for column in columns[:4]]
    return order, starts_of_runs(key), key[:3]


def _compare_copies(piece: Piece, rows: Rows, statistics: Statistics, order: Index, copies: Index, outcome: Outcome) -> Flags:
    """Whether, at the first of the copies of a part, copies that are only assumed to be such differ."""
    differ = np.zeros(len(order), dtype=np.bool_)
    if len(copies) == len(order) and not rows.replica.any():
        return differ
    of_copy = np.repeat(copies, np.diff(copies, append=len(order)))
    rows, statistics = rows.only(order), statistics.take(order)
    held_against = references(rows, of_copy)
    outcome.not_compared = not_compared(rows, held_against)
    found = compare(piece.kind, rows, statistics, held_against, piece.ndigits)
    assumed = rows.catalogue.is_assumed(rows.series)
    outcome.disagreements = [one for row, one in found.items() if not assumed[row]]
    differ[held_against[[row for row in found if assumed[row]]]] = True
    return differ


def _terms(rows: Rows, starts: Index) -> Flags:
    """The tensors of parameters whose numbers are terms of a sum. Of an activation every rank's own is what people look for."""
    terms = _any(rows.catalogue.is_term(rows.series), starts)
    return terms if rows.catalogue.kind in OF_PARAMETERS else np.zeros_like(terms)


def _any(flags: Flags, starts: Index) -> Flags:
    """Of each run of rows."""
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


def _global(kept: Columns, rows: Rows, starts: Index, tensors: Statistics) -> pa.Table:
    series = rows.series[starts]
    texts = {
        "kind": same(kept.kind, len(starts)),
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
    return _table(columns, texts, columns_of(kept, GLOBAL))


def _joined(ranks: Index, starts: Index) -> Texts:
    """The ranks of each run, as text."""
    each, which = np.unique(ranks, return_inverse=True)
    texts = pa.array(map(str, each.tolist()), type=pa.string())
    if len(starts) == len(ranks):
        return Texts(which.astype(np.int32), texts)
    lists = pa.ListArray.from_arrays(pa.array(np.append(starts, len(ranks)).astype(np.int32)), texts.take(pa.array(which)))
    return Texts.of([binary_join(lists, " ").dictionary_encode()])


def _numbers(statistics: Statistics) -> dict[str, pa.Array]:
    unknown = np.isnan(statistics.count)
    count = np.where(unknown, 0, statistics.count).astype(np.int64)
    made = {op: _spelled(statistics) if op == MAGNITUDES else statistics.op(op) for op in statistics.ops}
    return {"count": pa.array(count, mask=unknown if unknown.any() else None), **made}


def _spelled(statistics: Statistics) -> pa.Array:
    """Histograms as text."""
    there, counts = statistics.known[statistics.ops.index(MAGNITUDES)].tolist(), statistics.partials.histogram
    texts = [histogram_text(counts[row]) if counts is not None and it_is else None for row, it_is in enumerate(there)]
    return pa.array(texts, type=pa.string()).dictionary_encode()


def _calls_together(calls: Index, starts: Index) -> Index:
    """Of each run of parts; 0 where one of them does not say."""
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


def _table(columns: dict[str, pa.Array], texts: dict[str, Texts], schema: pa.Schema) -> pa.Table:
    chosen_texts = {name: text.in_use() for name, text in texts.items()}
    return pa.table([{**columns, **chosen_texts}[one.name] for one in schema], schema=schema)
