"""The rows of ranks as their files show them, in batches that fit in memory: what conversions and comparisons read.

Files show each kind with the ops that were configured, and shares of agreeing signs as scalars of kind ``other``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.merge.discovery import SetAside
from monitor.merge.tables import Shard, order_by
from monitor.query.sources import MergedScan, QueryError, RankScan, RowChoice, RunSource
from monitor.series import DIRECTION_KIND, KINDS, REPLICA_KIND, shown_kind
from monitor.sinks.files import StepSpan
from monitor.stats.features import COLUMNS_OF, as_scalar
from monitor.stats.ops import CALLS, CHECKSUM, INTEGER_OPS, NUMERIC_OPS, OPS, TEXT_OPS, derive_all, has_op
from monitor.stats.partials import COLUMNS, COUNT, SUM, Floats, Partials
from monitor.stats.table import REPLICA_OPS

IDENTITY: Final = {
    "rank": pa.int64(),
    "vpp_stage": pa.int64(),
    "name": pa.string(),
    "step": pa.int64(),
    "micro_step": pa.int64(),
    "call_id": pa.int64(),
}
"""The columns that say what a row is about. ``micro_step`` is null if that is the whole step, ``call_id`` in rows from CSV."""

SHOWN_KINDS: Final = tuple(dict.fromkeys(map(shown_kind, KINDS)))
"""The kinds that files are named after."""

_EMPTY: Final = pa.scalar("", type=pa.string())


@dataclass(frozen=True, slots=True)
class Batch:
    """Some steps of a kind on some ranks, which any process can read.

    Attributes:
        kind: As files show it.
        scans: With the kind of each.
        ops: As configured; None where that is not known.
        shards: The files that may have rows of these steps.
    """

    kind: str
    ranks: tuple[int, ...]
    steps: StepSpan
    scans: tuple[tuple[str, RankScan | MergedScan], ...]
    ops: tuple[str, ...] | None
    shards: tuple[Shard, ...] = ()

    def read(self) -> tuple[pa.Table, list[SetAside]]:
        """The rows by rank and step, and within a step as they were measured, as far as files say; and the files that have none
        to give.

        The columns are ``IDENTITY`` and the ops that the files show; null where there is no value.

        Raises:
            QueryError: A file of a merged set is damaged.
        """
        tables: list[pa.Table] = [pa.schema(IDENTITY).empty_table()]
        set_aside: list[SetAside] = []
        for kind, scan in self.scans:
            try:
                rows, torn = scan.read()
            except pa.ArrowException as error:
                raise QueryError(str(error)) from error
            set_aside += torn
            if len(rows):
                tables.append(_shown(rows, kind, self.ops))
        rows = pa.concat_tables(tables, promote_options="default")
        order = order_by([rows["rank"].to_numpy(), rows["step"].to_numpy()])
        return (rows if order is None else rows.take(pa.array(order))), set_aside

    def times(self) -> Callable[[int], float]:
        """When the rows of a step were written: about when they were measured, which they do not say."""
        written = [(one.steps, one.path.stat().st_mtime) for one in self.shards]
        return lambda step: max(time for steps, time in written if steps.first <= step <= steps.last)


def kinds_in(source: RunSource) -> list[str]:
    """The kinds of a run, as files show them, in the order in which a step has them."""
    return sorted({shown_kind(kind) for kind in source.kinds(whole=False)}, key=place_of)


def place_of(kind: str) -> int:
    """The place of a kind within a step."""
    return SHOWN_KINDS.index(kind) if kind in SHOWN_KINDS else len(SHOWN_KINDS)


def files_of(source: RunSource, kind: str) -> Iterator[tuple[tuple[int, ...], list[Shard]]]:
    """The files that have rows of a kind, as files show it, for some ranks at a time."""
    return source.recorded(_shown_as(source, kind))


def batches(source: RunSource, kind: str, rows: int) -> Iterator[Batch]:
    """All rows of a kind: by ranks, and those of the same ranks in order of steps.

    Args:
        kind: As files show it.
        rows: Of a batch, about. A single file may have more.
    """
    for ranks, shards in files_of(source, kind):
        for some in _lots(sorted(shards, key=lambda one: (one.steps, one.path.name)), rows):
            steps = StepSpan(some[0].steps.first, max(one.steps.last for one in some))
            yield batch_of(source, kind, ranks, steps, some)


def batch_of(source: RunSource, kind: str, ranks: Collection[int], steps: StepSpan, shards: Iterable[Shard] = ()) -> Batch:
    """The rows of a kind, as files show it, in these steps and on these ranks."""
    wanted = range(steps.first, steps.last + 1)
    scans = [(one, source.scan(RowChoice(one, steps=wanted, ranks=frozenset(ranks)))) for one in _shown_as(source, kind)]
    return Batch(kind, tuple(ranks), steps, tuple(scans), _configured(source, ranks), tuple(shards))


def runs_in(rows: pa.Table, column: str) -> Iterator[tuple[int, pa.Table]]:
    """The runs of adjacent rows with the same value in a column of whole numbers."""
    values = rows[column].to_numpy()
    starts = np.flatnonzero(np.diff(values, prepend=-1)).tolist()
    for start, end in itertools.pairwise([*starts, len(values)]):
        yield int(values[start]), rows.slice(start, end - start)


def ops_in(rows: pa.Table) -> list[str]:
    """The columns of a batch that are ops."""
    return [name for name in rows.column_names if name not in IDENTITY]


def numbers_in(column: pa.ChunkedArray) -> tuple[Floats, NDArray[np.bool_]]:
    """Values, anything where there is none, and which are there."""
    valid: NDArray[np.bool_] = column.is_valid().to_numpy()
    values = column.fill_null(0) if column.null_count else column
    return values.to_numpy().astype(np.float64), valid


def _shown_as(source: RunSource, kind: str) -> list[str]:
    """The kinds that files show as this one, itself first."""
    found = [one for one in source.kinds(whole=False) if shown_kind(one) == kind]
    return sorted(found, key=lambda one: one != kind)


def _lots(shards: Iterable[Shard], rows: int) -> Iterator[list[Shard]]:
    """Files in order of steps, some at a time: those that may have the same step together."""
    lot: list[Shard] = []
    last, held = -1, 0
    for one in shards:
        if lot and one.steps.first > last and held + one.rows > rows:
            yield lot
            lot, held = [], 0
        lot.append(one)
        last, held = max(last, one.steps.last), held + one.rows
    if lot:
        yield lot


def _configured(source: RunSource, ranks: Collection[int]) -> tuple[str, ...] | None:
    """The ops that were, at any time."""
    words = re.findall(r"\w+", " ".join(map(str, source.configured("ops", ranks))))
    return tuple(dict.fromkeys(word for word in words if word in OPS)) or None


# --- Rows of the reader as files show them.


def _shown(rows: pa.Table, kind: str, configured: tuple[str, ...] | None) -> pa.Table:
    call = rows["call_id"].fill_null(-1).to_numpy()
    order = order_by([rows["rank"].to_numpy(), rows["step"].to_numpy(), call])
    rows = rows if order is None else rows.take(pa.array(order))
    if kind == DIRECTION_KIND:
        rows = _with_ops_of_scalars(rows)
    columns = {name: rows[name].cast(of) for name, of in IDENTITY.items()}
    return pa.table({**columns, **{op: _op(op, rows[op]) for op in _ops(rows, kind, configured)}})


def _ops(rows: pa.Table, kind: str, configured: tuple[str, ...] | None) -> list[str]:
    """The ops that files show for a kind; where none are known to be configured, those that have a value."""
    own = REPLICA_OPS if kind == REPLICA_KIND else tuple(COLUMNS_OF.get(kind, ())) or configured
    known = [op for op in own or OPS if op in rows.column_names and has_op(op, kind)]
    if own is None:
        known = [op for op in known if rows[op].null_count < len(rows)]
    unasked = [op for op in (CALLS, CHECKSUM) if op in rows.column_names and op not in known]
    return [*known, *(op for op in unasked if rows[op].null_count < len(rows))]


def _op(op: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    if op in TEXT_OPS:
        text = column.cast(pa.string())
        return call_function("if_else", [call_function("equal", [text, _EMPTY]), pa.scalar(None, pa.string()), text])
    return column.cast(pa.int64() if op in INTEGER_OPS else pa.float64(), safe=False)


def _with_ops_of_scalars(rows: pa.Table) -> pa.Table:
    """Shares of agreeing signs with the ops that a scalar of this value has."""
    share = rows[DIRECTION_KIND]
    columns = np.zeros((len(COLUMNS), len(rows)))
    columns[COUNT], columns[SUM] = share.is_valid().to_numpy(), share.fill_null(0.0).to_numpy()
    ops = derive_all(NUMERIC_OPS, as_scalar(Partials(columns)))
    found = {op: pa.array(values, mask=~valid) for op, (values, valid) in ops.items()}
    others = {name: rows[name] for name in rows.column_names if name not in (*NUMERIC_OPS, DIRECTION_KIND)}
    return pa.table({**others, **found})
