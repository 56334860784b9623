"""The live table of a rank, and the sealed copies that leave the training thread.

A row belongs to one series and, if the kind has micro-steps, to one micro-step. Rows are on *pages*, each on one device. The
memory of a page never moves, because captured and compiled code holds its address. A series first seen in the middle of a step
takes the next free row; when a page is full, another one is added.

The hooks also write host columns: the order in which rows were written, and the layout of the tensor. If the tensor was just
read under another name, an alias gives the row with its numbers. Rows written by a captured device graph have the order of the
capture.

Sealing copies the table and clears ``writes``, which alone decides whether a row is present: an empty tensor has 0 elements and
is still a measurement.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, Literal, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from monitor.series import KINDS, NO_MICRO_STEP, REPLICA_KIND, RUN_KIND, SIGNED_KINDS, Series, SeriesTable, shown_kind
from monitor.stats import loads
from monitor.stats.features import COLUMNS_OF, as_scalar
from monitor.stats.ops import CALLS, CHECKSUM, TotalNorm, has_op, with_total
from monitor.stats.partials import COLUMNS, COUNT, SUM, WRITES, Floats, KindRows, Partials, TensorLayout, combined_micro_steps

PAGE_ROWS: Final = 1024
NOT_AN_ALIAS: Final = -1


class PageMemory(Protocol):
    """The numbers of one page, float64, on the device where they are measured.

    They are rows, shape ``(rows, len(COLUMNS))``, of which only ``writes`` is cleared, or histograms, shape ``(rows, BINS)``,
    which are cleared completely.
    """

    def new_copy(self) -> PageCopy:
        """Memory for one sealed copy of this page."""

    def address(self, row: int) -> int:
        """The address of a row, for code in C; 0 where there is no such code."""

    def clear(self) -> None:
        """Clear the page, in the stream of the training thread. Does not wait."""

    def forget(self, row: int) -> None:
        """Clear one row, in the current stream."""

    def rows_now(self) -> Floats:
        """A copy of the live rows, on the host. Waits for the device."""


class PageCopy(Protocol):
    """A sealed copy of one page.

    Attributes:
        ready: True if ``rows`` will not wait. Always False on a device: a query during the capture of a graph may end the
            capture.
    """

    nbytes: int
    ready: bool

    def take(self, rows: int) -> None:
        """Copy the first ``rows`` of the live page, which are all rows in use, and clear them.

        Called on the training thread, in its stream. Does not wait.
        """

    def rows(self) -> Floats:
        """The numbers, on the host. Called on the writer thread; may wait for the device."""


@dataclass(slots=True)
class Page:
    """A page and its position in the table.

    Attributes:
        histogram: The histograms of its rows; None until a row has one.
        histogram_at: For code in C: the address of the first row's histogram; 0 until there is one.
    """

    memory: PageMemory
    first_row: int
    rows: int
    used: int = 0
    histogram: PageMemory | None = None
    histogram_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class RowSlot:
    """The rows of one series on one page: one row, or one per micro-step.

    Attributes:
        page: The page.
        local_row: First row within the page.
        row: First row within the table.
        rows: Number of rows.
        native: For code in C: the address of the first row's numbers, ``row``, ``rows``, 1 if the numbers are on a device, the
            address of the page's ``histogram_at``, and ``local_row``.
    """

    page: Page
    local_row: int
    row: int
    rows: int
    native: bytes = b""


@dataclass(slots=True)
class HostColumns:
    """Columns that hooks fill in, one entry per table row."""

    order: NDArray[np.int64]
    layout: NDArray[np.int64]
    alias: NDArray[np.int64]
    alias_order: NDArray[np.int64]
    captured_order: NDArray[np.int64]

    @classmethod
    def of(cls, rows: int) -> HostColumns:
        return cls(*(np.zeros(rows, dtype=np.int64) for _ in range(5)))

    def grown(self, rows: int) -> HostColumns:
        grown = HostColumns.of(rows)
        grown.copy_from(self, len(self.order))
        return grown

    def cells(self) -> tuple[memoryview, memoryview, memoryview]:
        """Views of ``order``, ``layout`` and ``alias``: writing one number costs half as much as in an array."""
        return self.order.data, self.layout.data, self.alias.data

    def copy_from(self, other: HostColumns, rows: int) -> None:
        for name in ("order", "layout", "alias", "alias_order", "captured_order"):
            getattr(self, name)[:rows] = getattr(other, name)[:rows]

    def addresses(self) -> tuple[int, int, int, int]:
        """The addresses of ``order``, ``layout``, ``alias`` and ``alias_order``."""
        return self.order.ctypes.data, self.layout.ctypes.data, self.alias.ctypes.data, self.alias_order.ctypes.data

    @property
    def nbytes(self) -> int:
        return 5 * self.order.nbytes


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """The series of each table row, the series' kind (an index into ``KINDS``) and the micro-step. Append-only."""

    series: NDArray[np.int64]
    kind: NDArray[np.int64]
    micro_step: NDArray[np.int64]

    @classmethod
    def of(cls, rows: int) -> RowIdentity:
        return cls(np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64), np.full(rows, NO_MICRO_STEP))

    def grown(self, rows: int) -> RowIdentity:
        """A longer copy: sealed copies still refer to the old one."""
        grown = RowIdentity.of(rows)
        used = len(self.series)
        grown.series[:used], grown.kind[:used], grown.micro_step[:used] = self.series, self.kind, self.micro_step
        return grown


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Which table rows a step has, and in which order. It is cached, because most steps repeat the order of the step before.

    Attributes:
        key: The columns that the order was computed from.
        rows: Table rows, kind by kind, within a kind in the order of measurement.
        series, micro_step: Series and micro-step of these rows.
        place: Position of each row among the rows of all kinds.
        kinds: The slice of each kind's rows.
    """

    key: tuple[bytes, ...]
    rows: NDArray[np.int64]
    series: NDArray[np.int64]
    micro_step: NDArray[np.int64]
    place: NDArray[np.int64]
    kinds: Mapping[str, slice]


class StatsTable:
    """The live table. Used from the training thread only; ``SealedTable`` copies of it go to the writer.

    Attributes:
        row_order: The order of the step that was read last. Used by the writer only.
        experts: The routers and experts among the series. Used by the writer only.
        native: For code in C: the addresses of the columns that ``note`` fills in, and of the number of writes.
    """

    def __init__(self, series: SeriesTable) -> None:
        self.series = series
        self.layouts: list[TensorLayout] = []
        self.pages: list[Page] = []
        self.identity = RowIdentity.of(0)
        self.row_order: RowOrder | None = None
        self.experts = loads.ExpertIndex()
        self._count: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._writes = self._count.data
        self._use(HostColumns.of(0))
        self._layout_index: dict[tuple[object, object], int] = {}

    def _use(self, columns: HostColumns) -> None:
        self.columns = columns
        self._order, self._layout, self._alias = columns.cells()
        self.native = struct.pack("5q", *columns.addresses(), self._count.ctypes.data)

    @property
    def writes(self) -> int:
        """The number of writes in this step so far."""
        return self._writes[0]

    @property
    def rows(self) -> int:
        """Rows in all pages, used or not."""
        return len(self.columns.order)

    @property
    def used(self) -> int:
        """Number of rows up to the last one in use."""
        return self.pages[-1].first_row + self.pages[-1].used if self.pages else 0

    @property
    def nbytes(self) -> int:
        """Bytes of one sealed copy."""
        return self.rows * 8 * (len(COLUMNS) + 5)

    def allot(self, page: Page, series: Series, micro_steps: Sequence[int]) -> RowSlot:
        """Reserve the next free rows of ``page`` for a series: one for each of ``micro_steps``."""
        row, count = page.first_row + page.used, len(micro_steps)
        found = page.memory.address(page.used), row, count, not isinstance(page.memory, HostPage)
        native = struct.pack("6q", *found, page.histogram_at.ctypes.data, page.used)
        slot = RowSlot(page, page.used, row, count, native)
        page.used, rows = page.used + count, slice(row, row + count)
        self.identity.series[rows] = self.series.index_of(series)
        self.identity.kind[rows] = KINDS.index(series.kind)
        self.identity.micro_step[rows] = micro_steps
        return slot

    def add_page(self, memory: PageMemory, rows: int) -> Page:
        """Append a page. Earlier pages do not move."""
        page = Page(memory, self.rows, rows)
        self.pages.append(page)
        self._use(self.columns.grown(page.first_row + rows))
        self.identity = self.identity.grown(page.first_row + rows)
        return page

    def layout_of(self, shape: tuple[int, ...], dtype: object) -> int:
        """The index of a tensor's layout in ``layouts``, added if it is new."""
        index = self._layout_index.get((shape, dtype))
        if index is None:
            index = self._layout_index[shape, dtype] = len(self.layouts)
            self.layouts.append(TensorLayout(tuple(shape), str(dtype)))
        return index

    def note(self, row: int, layout: int, alias: int = NOT_AN_ALIAS) -> None:
        """Fill in the host columns of a row that was just written, or that is an alias of the row ``alias``."""
        self._writes[0] = self._order[row] = self._writes[0] + 1
        self._layout[row] = layout
        self._alias[row] = alias
        if alias != NOT_AN_ALIAS:
            self.columns.alias_order[row] = self._order[alias]

    def note_captured(self, slot: RowSlot, layout: int) -> None:
        """Fill in the host columns of rows that captured code writes later, without a call to the monitor."""
        rows = slice(slot.row, slot.row + slot.rows)
        self.columns.captured_order[rows] = self.next_order()
        self.columns.layout[rows] = layout
        self.columns.alias[rows] = NOT_AN_ALIAS

    def next_order(self, count: int = 1) -> int:
        """The position in this step's order for a row that is noted later: see ``note_rows``. Of several, the last one."""
        self._writes[0] += count
        return self._writes[0]

    def note_rows(self, rows: NDArray[np.int64], orders: NDArray[np.int64], layouts: NDArray[np.int64]) -> None:
        """Fill in the host columns of rows measured earlier, each with the order that ``next_order`` returned then."""
        self.columns.order[rows] = orders
        self.columns.layout[rows] = layouts
        self.columns.alias[rows] = NOT_AN_ALIAS

    def note_block(self, rows: NDArray[np.int64], layout: int) -> None:
        """``note`` for rows that were written together."""
        last = self.next_order(len(rows))
        self.note_rows(rows, np.arange(last + 1 - len(rows), last + 1), np.full(len(rows), layout))

    def seal(self, into: SealedTable) -> None:
        """Copy everything into ``into`` and start the next step. Does not wait for the device."""
        into.take(self)
        self._start_step()

    def discard(self) -> None:
        """Clear the table without a copy, and start the next step."""
        for page in self.pages:
            page.memory.clear()
            if page.histogram is not None:
                page.histogram.clear()
        self._start_step()

    def _start_step(self) -> None:
        self.columns.order[: self.used] = 0
        self._writes[0] = 0

    def kinds_now(self) -> dict[str, KindRows]:
        """The rows measured so far in the current step. Waits for the device."""
        numbers = np.concatenate([page.memory.rows_now() for page in self.pages] or [np.zeros((0, len(COLUMNS)))])
        counted = [None if page.histogram is None else page.histogram.rows_now() for page in self.pages]
        histograms = _whole(counted, [page.rows for page in self.pages])
        kinds = measured(numbers, self.columns, self.identity, histograms)[0]
        return with_loads(kinds, self.series, loads.ExpertIndex())


@dataclass
class SealedTable:
    """A sealed copy of the table: filled on the training thread, read on the writer thread, then reused."""

    step: int = 0
    status: Status = "complete"
    ops: tuple[str, ...] = ()
    micro_step_kinds: frozenset[str] = frozenset()
    combined_kinds: frozenset[str] = frozenset()
    counted_kinds: frozenset[str] = frozenset()
    checked_kinds: frozenset[str] = frozenset()
    rewritten: frozenset[tuple[int, str]] = frozenset()
    total: TotalNorm | None = None
    postscript: Postscript = field(default_factory=lambda: Postscript(None))
    nbytes: int = 0
    _copies: list[PageCopy] = field(default_factory=list)
    _histograms: dict[int, PageCopy] = field(default_factory=dict)
    _columns: HostColumns = field(default_factory=lambda: HostColumns.of(0))
    _lengths: list[int] = field(default_factory=list)
    _table: StatsTable | None = None
    _identity: RowIdentity | None = None

    def take(self, table: StatsTable) -> None:
        self._copies += [page.memory.new_copy() for page in table.pages[len(self._copies) :]]
        for number, page in enumerate(table.pages):
            if page.histogram is not None and number not in self._histograms:
                self._histograms[number] = page.histogram.new_copy()
        for number, page in enumerate(table.pages):
            self._copies[number].take(page.used)
            if number in self._histograms:
                self._histograms[number].take(page.used)
        if len(self._columns.order) < table.rows:
            self._columns = HostColumns.of(table.rows)
        self._columns.copy_from(table.columns, table.used)
        self._lengths = [page.rows for page in table.pages[:-1]] + [page.used for page in table.pages[-1:]]
        self._table, self._identity = table, table.identity
        self.nbytes = sum(copy.nbytes for copy in (*self._copies, *self._histograms.values())) + self._columns.nbytes

    @property
    def ready(self) -> bool:
        """True if ``rows`` will not wait."""
        return not self.postscript.is_open and all(copy.ready for copy in (*self._copies, *self._histograms.values()))

    def finish(self) -> None:
        """The step has all its numbers. Safe on any thread."""
        self.postscript.end()

    def rows(self) -> StepRows:
        """The measured rows, in new arrays. May wait for the device, and for numbers that training adds."""
        if self._table is None or self._identity is None:
            raise RuntimeError("no step was sealed into this copy")
        numbers = _end_to_end([copy.rows()[:length] for copy, length in zip(self._copies, self._lengths, strict=True)])
        found = [self._histograms.get(i) for i in range(len(self._lengths))]
        counted = [None if one is None else one.rows()[:length] for one, length in zip(found, self._lengths, strict=True)]
        histograms, table = _whole(counted, self._lengths), self._table
        kinds, table.row_order = measured(numbers, self._columns, self._identity, histograms, table.row_order)
        kinds = {kind: combined_micro_steps(part) if kind in self.combined_kinds else part for kind, part in kinds.items()}
        kinds = with_loads(with_total(kinds, self.total), table.series, table.experts)
        kinds = self.postscript.added_to(kinds)
        by_configuration = self.micro_step_kinds, self.counted_kinds, self.checked_kinds
        return StepRows(self.step, self.ops, kinds, table.layouts, self.status, *by_configuration, self.rewritten)


def _end_to_end(parts: Sequence[Floats]) -> Floats:
    """The rows of all pages; without a copy if there is a single page."""
    return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros((0, len(COLUMNS)))])


def _whole(parts: Sequence[Floats | None], lengths: Sequence[int]) -> Floats | None:
    """The histograms of all pages, shape ``(rows, BINS)``; None if no page has any."""
    if all(part is None for part in parts):
        return None
    bins = next(part.shape[1] for part in parts if part is not None)
    return np.concatenate([np.zeros((n, bins)) if one is None else one for one, n in zip(parts, lengths, strict=True)])


def measured(
    numbers: Floats,
    columns: HostColumns,
    identity: RowIdentity,
    histograms: Floats | None = None,
    before: RowOrder | None = None,
) -> tuple[dict[str, KindRows], RowOrder]:
    """The rows that were written, by kind and in the order of writing; and that order.

    Args:
        numbers: All rows of the table, shape ``(rows, len(COLUMNS))``. Rows of aliases are filled in, in place.
        histograms: The histograms of all rows, shape ``(rows, BINS)``, filled in likewise.
        before: The row order of an earlier step, returned again if it is the same.
    """
    order = columns.order[: len(numbers)]
    _resolve_aliases(numbers, order, columns, histograms)
    row_order = _row_order(numbers[:, WRITES] > 0, order, columns.captured_order[: len(numbers)], identity, before)
    rows = row_order.rows
    counted = None if histograms is None else histograms[rows].astype(np.int64)
    partials = Partials(Partials.from_rows(numbers[rows]).columns, counted)
    together = KindRows(row_order.series, row_order.micro_step, row_order.place, columns.layout[rows], partials)
    return {kind: together.take(where) for kind, where in row_order.kinds.items()}, row_order


def _row_order(
    there: NDArray[np.bool_],
    order: NDArray[np.int64],
    captured_order: NDArray[np.int64],
    identity: RowIdentity,
    before: RowOrder | None,
) -> RowOrder:
    key = (there.tobytes(), order.tobytes(), captured_order.tobytes())
    if before is not None and before.key == key:
        return before
    (present,) = there.nonzero()
    # No hook runs when captured code writes: its rows keep the order that they had at the capture.
    row_order = np.where(order > 0, order, captured_order)
    present = present[row_order[present].argsort(kind="stable")]
    kinds = identity.kind[present]
    place = kinds.argsort(kind="stable")
    rows, kinds = present[place], kinds[place]
    series, micro_step = identity.series[rows], identity.micro_step[rows]
    for shared in (rows, series, micro_step, place):
        shared.flags.writeable = False
    return RowOrder(key, rows, series, micro_step, place, _parted(kinds))


def _parted(kinds: NDArray[np.int64]) -> dict[str, slice]:
    """The slice of each kind's rows, among rows that are sorted by kind."""
    (ends,) = (kinds[1:] != kinds[:-1]).nonzero()
    bounds = (0, *(ends + 1).tolist(), len(kinds)) if len(kinds) else ()
    return {KINDS[kinds[start]]: slice(start, end) for start, end in pairwise(bounds)}


def _resolve_aliases(numbers: Floats, order: NDArray[np.int64], columns: HostColumns, histograms: Floats | None) -> None:
    """Fill in the rows of aliases. An alias whose source was written again has lost its numbers and becomes absent."""
    (aliases,) = ((columns.alias[: len(order)] != NOT_AN_ALIAS) & (order > 0)).nonzero()
    if not len(aliases):
        return
    source = columns.alias[aliases]
    intact = order[source] == columns.alias_order[aliases]
    numbers[aliases[~intact], WRITES] = 0.0
    numbers[aliases[intact]] = numbers[source[intact]]
    if histograms is not None:
        histograms[aliases[intact]] = histograms[source[intact]]


def with_loads(kinds: dict[str, KindRows], series: SeriesTable, experts: loads.ExpertIndex) -> dict[str, KindRows]:
    """``kinds``, with what compares the experts of each router in the row of the router."""
    rows = kinds.get(loads.LOAD_KIND)
    if rows is None:
        return kinds
    partials = loads.with_summaries(experts.of(series), rows.series, rows.micro_step, rows.partials)
    return {**kinds, loads.LOAD_KIND: replace(rows, partials=partials)}


# --- Numbers that come after the step was sealed.


class LateNumber(NamedTuple):
    """A number of the loop that comes after its step: the row of its series, as a sum over calls.

    Attributes:
        layout: See ``KindRows``.
    """

    series: int
    layout: int
    total: float
    calls: int


MOST_WAITED: Final = 1.0
"""Seconds that the writer waits for numbers of a step whose rows it has read."""


@final
class Postscript:
    """Numbers of a step that training passes after the step was sealed, such as a loss that is logged after the optimizer.

    Training adds numbers, until its next forward ends this. The writer waits for that, for a bounded time. Takes no lock that a
    signal handler could find held: ``SimpleQueue`` is reentrant.

    Attributes:
        logged: What the loop has logged in the step, by name: the total, and the number of calls.
        is_open: Whether numbers may still be added.
    """

    def __init__(self, logged: dict[str, tuple[Any, int]] | None = None) -> None:
        self.logged = {} if logged is None else logged
        self.is_open = logged is not None
        self._numbers: SimpleQueue[LateNumber | None] = SimpleQueue()

    def add(self, number: LateNumber) -> bool:
        """Add a row, which replaces an earlier one of its series. False if it is too late."""
        self._numbers.put(number)
        return self.is_open  # the writer closes it before it looks for the last time

    def end(self) -> None:
        """The step has all its numbers. Safe on any thread."""
        if self.is_open:
            self.is_open = False
            self._numbers.put(None)

    def added_to(self, kinds: dict[str, KindRows]) -> dict[str, KindRows]:
        """``kinds`` with these numbers as rows of ``run``, which replace rows of the same series. May wait for training."""
        if not (late := self._take()):
            return kinds
        columns = np.zeros((len(COLUMNS), len(late)))
        series, layouts, columns[SUM], columns[COUNT] = zip(*late, strict=True)
        columns[WRITES] = 1.0
        places = sum(map(len, kinds.values())) + np.arange(len(late))
        rows = KindRows(np.array(series), np.full(len(late), NO_MICRO_STEP), places, np.array(layouts), Partials(columns))
        if (before := kinds.get(RUN_KIND)) is not None:
            rows = before.take(np.flatnonzero(~np.isin(before.series, series))).followed_by(rows)
        return {**kinds, RUN_KIND: rows}

    def _take(self) -> list[LateNumber]:
        """The numbers, when training has ended this or the time is over: the last one of each series."""
        found: dict[int, LateNumber] = {}
        until = monotonic() + MOST_WAITED
        while self.is_open or not self._numbers.empty():
            try:
                number = self._numbers.get(timeout=max(until - monotonic(), 0.0))
            except Empty:
                self.is_open = False
                continue
            if number is not None:
                found[number.series] = number
        return list(found.values())


# --- The rows of one step as columns, kind by kind, in the order of measurement: the data that the pipeline delivers.

Status = Literal["complete", "skipped", "incomplete"]
"""``skipped``: the optimizer's step was skipped (overflow). ``incomplete``: the run ended in the middle of the step."""


REPLICA_OPS: Final = ("norm", CHECKSUM)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Everything that a rank measured in one step.

    Attributes:
        step: The step's number.
        ops: The statistics that were configured when the step was sealed.
        kinds: Rows by kind; a kind without rows is absent.
        layouts: The rank's layouts so far, append-only and shared between steps.
    """

    step: int
    ops: tuple[str, ...]
    kinds: Mapping[str, KindRows]
    layouts: list[TensorLayout]
    status: Status = "complete"
    micro_step_kinds: frozenset[str] = field(default_factory=frozenset)
    """Kinds whose rows have a micro-step. The configuration decides this, not the rows that happen to be there."""
    counted_kinds: frozenset[str] = field(default_factory=frozenset)
    """Kinds whose rows state how many calls they combine, also by configuration."""
    checked_kinds: frozenset[str] = field(default_factory=frozenset)
    """Kinds whose rows have a checksum even if the op is not configured, also by configuration."""
    rewritten: frozenset[tuple[int, str]] = field(default_factory=frozenset)
    """Parameters, by chunk and name, that another optimizer may have stepped since the last step left them."""

    def ops_of(self, kind: str) -> tuple[str, ...]:
        """The statistics to write for a kind. Replicas always have those only that they are compared by."""
        if kind == REPLICA_KIND:
            return REPLICA_OPS
        if kind in COLUMNS_OF:
            return tuple(COLUMNS_OF[kind])
        if kind in SIGNED_KINDS:
            return tuple(op for op in self.ops if has_op(op, kind))
        if kind in self.checked_kinds:
            return tuple(dict.fromkeys([*self.ops, CHECKSUM]))
        return (*self.ops, CALLS) if shown_kind(kind) in self.counted_kinds else self.ops

    def read(self, kind: str) -> KindRows:
        """The rows of a kind in the form from which its ops are derived."""
        rows = self.kinds[kind]
        return replace(rows, partials=as_scalar(rows.partials)) if shown_kind(kind) != kind else rows

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.kinds.values())


# --- Pages in host memory: numpy arrays, independent of the framework.


class HostPage:
    """A page in host memory.

    Attributes:
        numbers: The live rows, shape ``(rows, columns)``.
        cleared: The columns that ``clear`` sets to zero.
    """

    def __init__(self, rows: int, columns: int = len(COLUMNS), cleared: int | slice = WRITES) -> None:
        self.numbers: Floats = np.zeros((rows, columns))
        self.cleared = cleared

    def address(self, row: int) -> int:
        """The address of a row."""
        return self.numbers.ctypes.data + row * self.numbers.strides[0]

    def new_copy(self) -> PageCopy:
        return HostPageCopy(self)

    def clear(self) -> None:
        self.numbers[:, self.cleared] = 0.0

    def forget(self, row: int) -> None:
        self.numbers[row, self.cleared] = 0.0

    def rows_now(self) -> Floats:
        return self.numbers.copy()


class HostPageCopy:
    """A sealed copy of a ``HostPage``."""

    ready = True

    def __init__(self, page: HostPage) -> None:
        self._page = page
        self._sealed = np.zeros_like(page.numbers)
        self.nbytes = self._sealed.nbytes

    def take(self, rows: int) -> None:
        live = self._page.numbers[:rows]
        np.copyto(self._sealed[:rows], live)
        live[:, self._page.cleared] = 0.0

    def rows(self) -> Floats:
        return self._sealed
