"""Records the tensors of a rank into the live table, step by step; reads from it the dataflow and the current metrics.

A hook calls ``Recorder.record``, which is the method of the framework's ``TensorReader``. The reader finds the tensor's row in
``LiveRows`` and calls a kernel.
"""

from __future__ import annotations

from _thread import RLock
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from monitor.coordinator.series_file import MOST_EDGES, MOST_PASSES, Edge, Flow, Pass
from monitor.failures import EarlierFailure
from monitor.pipeline.process import PROCESS
from monitor.recording.gradient_edges import places_of
from monitor.selection import parents
from monitor.series import KINDS, NO_MICRO_STEP, Series, SeriesTable
from monitor.stats.histograms import BINS
from monitor.stats.ops import CALLS, INTEGER_OPS, LAYOUT_OPS, SPELLED_OPS, TotalNorm, derive, spelled
from monitor.stats.partials import COLUMNS, WRITES, Floats, KindRows, TensorLayout
from monitor.stats.table import (
    NOT_AN_ALIAS,
    PAGE_ROWS,
    HostPage,
    Page,
    PageMemory,
    Postscript,
    RowSlot,
    SealedTable,
    StatsTable,
)

Device = Hashable
"""The device of a tensor, as a framework names it."""


class RecordedSeries:
    """One series, and its rows on each device.

    Attributes:
        micro_steps: The micro-steps of its rows; ``(NO_MICRO_STEP,)`` for a series with one row per step.
        checked: Whether its tensors get check sums (``partials``), whatever the reader measures of others.
    """

    __slots__ = ("checked", "late", "micro_steps", "series", "slots")

    def __init__(self, series: Series, micro_steps: tuple[int, ...] = (NO_MICRO_STEP,), *, checked: bool = False) -> None:
        self.series = series
        self.checked = checked
        self.micro_steps = micro_steps
        self.slots: dict[Device, RowSlot] = {}
        self.late: dict[tuple[Device, int], RowSlot] = {}


NewMemory = Callable[[int, Device, int, int | slice], PageMemory]
"""Returns the memory of a page: from its number of rows, its device, its number of columns, and the columns to clear."""


class RowBlock(NamedTuple):
    """Rows of several series.

    Attributes:
        local: The rows within the page.
        rows: The rows within the table.
    """

    page: Page
    local: range
    rows: NDArray[np.int64]


def _settled() -> None:
    """Readers that write the numbers of a row when they note it have nothing to settle."""


class InterruptedReadingError(RuntimeError):
    """A signal handler ends a step on the thread whose reading of a tensor it has interrupted."""


@final
class RowsLock(RLock):  # type: ignore[misc]  # final in stubs only
    """The lock of the live table. A signal handler, which runs on a thread that may have it, does not wait for that thread.

    ``with`` acquires it in C: an interrupt cannot come between that and the block.
    """

    def refuse_handlers(self) -> None:
        """Raises ``InterruptedReadingError`` on the thread that has it."""
        if self._is_mine:
            raise InterruptedReadingError("a signal handler has interrupted the reading of a tensor")

    def take(self, seconds: float) -> bool:
        """Whether the lock was acquired within so many seconds. Not on the thread that has it."""
        return not self._is_mine and self.acquire(timeout=seconds)

    @property
    def _is_mine(self) -> bool:
        return bool(self._is_owned())  # type: ignore[attr-defined]


@final
class LiveRows:
    """The rows of every series in the live table.

    Attributes:
        table: The live table, changed only under ``lock``.
        lock: The autograd engine runs the backward of each device on a thread of its own.
        slots: The rows of each series. A later attachment continues with them.
        settle: Writes the numbers of rows that were noted and are still being measured. It may wait for training's operations,
            whose errors it raises as ``EarlierFailure``. The caller does not hold the lock.
    """

    def __init__(self, series: SeriesTable, new_memory: NewMemory) -> None:
        self.table = StatsTable(series)
        self.lock = RowsLock()
        self.slots: dict[tuple[Series, Device, tuple[int, ...]], RowSlot] = {}
        self.settle: Callable[[], None] = _settled
        self._blocks: dict[tuple[Series, int, Device, tuple[int, ...]], RowSlot] = {}
        self._new_memory = new_memory
        self._open_pages: dict[Device, Page] = {}

    def slot(self, watched: RecordedSeries, device: Device, micro_step: int) -> tuple[RowSlot, int]:
        """The rows of a series on ``device``, and which of them has ``micro_step``."""
        slot = watched.slots.get(device)
        if slot is None:
            slot = watched.slots[device] = self._allot(watched.series, device, watched.micro_steps)
        if micro_step < slot.rows:
            return slot, micro_step
        late = watched.late.get((device, micro_step))
        if late is None:
            late = watched.late[device, micro_step] = self._allot(watched.series, device, (micro_step,))
        return late, 0

    def block(self, watched: Sequence[RecordedSeries], device: Device, micro_step: int) -> RowBlock:
        """The rows of several series for one micro-step. They stand at equal distances on one page, so that a single operation
        writes them.

        Args:
            watched: Series with the same micro-steps, always the same ones after the first.
        """
        micro_steps = watched[0].micro_steps
        offset = micro_step
        if micro_step >= len(micro_steps):
            micro_steps, offset = (micro_step,), 0
        key = watched[0].series, len(watched), device, micro_steps
        first = self._blocks.get(key)
        if first is None:
            page = self._page_for(device, len(watched) * len(micro_steps))
            slots = [self.table.allot(page, one.series, micro_steps) for one in watched]
            first = self._blocks[key] = slots[0]
        distances = np.arange(len(watched)) * len(micro_steps) + offset
        local = range(first.local_row + offset, first.local_row + len(watched) * len(micro_steps), len(micro_steps))
        return RowBlock(first.page, local, first.row + distances)

    def _allot(self, series: Series, device: Device, micro_steps: tuple[int, ...]) -> RowSlot:
        slot = self.slots.get((series, device, micro_steps))
        if slot is None:
            slot = self.slots[series, device, micro_steps] = self.new_slot(series, device, micro_steps)
        return slot

    def new_slot(self, series: Series, device: Device, micro_steps: tuple[int, ...]) -> RowSlot:
        """New rows on ``device``, one for each of ``micro_steps``."""
        return self.table.allot(self._page_for(device, len(micro_steps)), series, micro_steps)

    def _page_for(self, device: Device, rows: int) -> Page:
        """A page on ``device`` with room for so many rows."""
        page = self._open_pages.get(device)
        if page is None or page.used + rows > page.rows:
            rows = max(PAGE_ROWS, rows)
            page = self.table.add_page(self._new_memory(rows, device, len(COLUMNS), WRITES), rows)
            self._open_pages[device] = page
        return page

    def histograms(self, page: Page, device: Device) -> PageMemory:
        """The histograms of a page on ``device``."""
        if page.histogram is None:
            page.histogram = self._new_memory(page.rows, device, BINS, slice(None))
            page.histogram_at[0] = page.histogram.address(0)
        return page.histogram

    def host_histograms(self, page: Page, device: Device) -> Floats:
        """The same of a page in host memory, shape ``(rows, BINS)``."""
        memory = self.histograms(page, device)
        assert isinstance(memory, HostPage)
        return memory.numbers


UNREADABLE: Final = "Tensors of these classes have no rows, since only the class knows where their elements are: {names}."


class TensorReader(Protocol):
    """Reads the tensors of a framework into rows.

    Attributes:
        rows: The rows, made by the reader.
        eps: The bound below which elements count as zeros.
        higher, check_sums: Whether to measure the higher moments, and the check sums (``partials``), of every tensor.
        magnitudes: Whether to count a histogram of magnitudes for every tensor.
        unreadable: Names of the classes whose tensors had no rows, since only the class knows where their elements are.
    """

    rows: LiveRows
    eps: float
    higher: bool
    check_sums: bool
    magnitudes: bool

    @property
    def unreadable(self) -> Sequence[str]: ...

    def record(self, watched: RecordedSeries, x: Any, micro_step: int = 0, *, aliases: bool = True) -> None:
        """Reduce ``x`` into the row of ``watched`` for ``micro_step``. Without data there is no row.

        Args:
            aliases: Do not read a tensor again that was read under another name and is unchanged since. Off for parameters and
                gradients: loops change them without increasing the version counter (``p.data.clamp_()``).
        """

    def record_all(
        self, items: Sequence[tuple[RecordedSeries, Any]], failed: Callable[[RecordedSeries, Exception], None]
    ) -> None:
        """Reduce one tensor into a row of each series, in this order, without use of aliases.

        Args:
            failed: Called for a tensor that could not be read.
        """

    def record_numbers(
        self, watched: RecordedSeries, numbers: Mapping[int, Any], x: Any, micro_step: int = 0, *, histogram: Any = None
    ) -> None:
        """Write a row of computed numbers.

        Args:
            numbers: By column of partials (``monitor.stats.partials``); the others are 0. Tensors have one element, on the
                device of ``x``, and are read asynchronously.
            x: The measured tensor. The row has the shape and dtype of its local part.
            histogram: Number of elements in each bin, shape of at most ``(BINS,)``, on the device of ``x``.
        """

    def record_block(self, watched: Sequence[RecordedSeries], numbers: Mapping[int, Any], x: Any, micro_step: int = 0) -> None:
        """Write a row of computed numbers for each of several series, with few operations whatever their number.

        Args:
            watched: See ``LiveRows.block``.
            numbers: By column of partials; the others are 0. A tensor with one element for each series, on the device of ``x``,
                or one element or number for all of them.
            x: As for ``record_numbers``.
        """

    def read_into(self, x: Any, slot: RowSlot) -> bool:
        """Reduce ``x`` into the row of ``slot``. False if ``x`` has no data, and no row. The caller holds the lock."""

    def take_kernels(self, eps: float, *, higher: bool, check_sums: bool) -> None:
        """Set what the arguments name, from the next tensor on."""

    def activate(self, active: bool) -> None:
        """Whether tensors are recorded from now on: a step begins or ends."""

    def micro_step_begins(self, chunk: int, micro_steps: int) -> None:
        """The root of a chunk begins a training forward, one of ``micro_steps`` or more."""

    def forget_step(self) -> None:
        """A new step begins: drop references to the last step's tensors. The caller holds the lock."""

    def close(self) -> None:
        """Free what measures tensors. None is recorded any more."""


@final
class Due:
    """Whether the kinds of one configuration field are recorded in the step in progress.

    Attributes:
        now: Whether they are recorded now. Every hook checks it first, and returns if it is false.
        in_step: Whether they are recorded in the step. ``now`` ends earlier: when the step is sealed.
    """

    __slots__ = ("in_step", "now")

    def __init__(self, wanted: bool = False) -> None:
        self.now = self.in_step = wanted


class LateRows(Protocol):
    """Enters rows at the end of a step. Its methods must not raise."""

    def step_ends(self) -> None:
        """The last moment to measure something in the step in progress."""

    def enter(self) -> None:
        """Enter the measurements: the table is about to be read. The caller holds the lock."""

    def discard(self) -> None:
        """Discard the measurements of the step in progress. The caller holds the lock."""


def always(_field: str) -> bool:
    """Every collected step has all kinds."""
    return True


class NoLateRows:
    """Has no rows to enter."""

    def step_ends(self) -> None: ...

    def enter(self) -> None: ...

    def discard(self) -> None: ...


@final
class Recorder:
    """Records the tensors of a rank, step by step. Every hook calls it.

    ``record``, ``record_all``, ``record_numbers``, ``record_block`` and ``micro_step_begins`` are the methods of
    ``TensorReader``.

    Attributes:
        active: Whether the step in progress is collected.
        table: The live table, changed only under ``lock``.
        steps: Number of ended steps.
        late: Enters rows at the end of a step.
        total: How rows give the total norm of the step in progress; None if they do not.
        postscript: Takes numbers after the step was sealed.
        rewritten: See ``StepRows``, of the step in progress.
    """

    def __init__(self, reader: TensorReader) -> None:
        self.active = False
        self.reader = reader
        self.table, self.lock = reader.rows.table, reader.rows.lock
        # Methods here that call the reader's would be a further call for each tensor.
        self.record, self.record_all, self.record_numbers = reader.record, reader.record_all, reader.record_numbers
        self.record_block = reader.record_block
        self.micro_step_begins = reader.micro_step_begins
        self.steps = 0
        self.late: LateRows = NoLateRows()
        self.total: TotalNorm | None = None
        self.postscript = Postscript()
        self.rewritten: frozenset[tuple[int, str]] = frozenset()
        self._inert, self._forgotten, self._noted = False, 0, 0
        self._due: dict[str, Due] = {}
        PROCESS.on_fork_child(self._become_inert)

    @property
    def has_rows(self) -> bool:
        """Whether anything was recorded since the last seal, and not forgotten."""
        return self.table.writes > self._forgotten

    def use(self, eps: float, *, magnitudes: bool = False, higher: bool = False, check_sums: bool = False) -> None:
        """Set what to measure of every tensor, from the next one on.

        Args:
            eps: Elements below it count as zeros.
            magnitudes, higher, check_sums: See ``TensorReader``.
        """
        reader = self.reader
        reader.magnitudes = magnitudes
        if (eps, higher, check_sums) != (reader.eps, reader.higher, reader.check_sums):
            reader.take_kernels(eps, higher=higher, check_sums=check_sums)

    def note_unreadable(self, note: Callable[[str, str], None]) -> None:
        """Note which classes of tensors have no rows, unless that was noted before."""
        names = self.reader.unreadable
        if len(names) > self._noted:
            self._noted = len(names)
            note("unreadable_tensors", UNREADABLE.format(names=", ".join(names)))

    def due(self, field: str) -> Due:
        """Whether the kinds of a configuration field are recorded. The object stays the same, and changes with the steps."""
        return self._due.setdefault(field, Due(self.active))

    def activate(self, wanted: bool, has: Callable[[str], bool] = always) -> None:
        """Record the next step if ``wanted``. A forked child never records.

        Args:
            has: Whether the step has the kinds of a configuration field.
        """
        self.active = wanted and not self._inert
        for field, due in self._due.items():
            due.now = due.in_step = self.active and has(field)
        self.reader.activate(self.active)

    def end_step(self) -> None:
        """Stop recording the step in progress."""
        if self.active:
            self.late.step_ends()
        self._stop()
        self.reader.activate(False)

    def _stop(self) -> None:
        self.active = False
        for due in self._due.values():
            due.now = False

    def _become_inert(self) -> None:
        self._inert = True
        self._stop()

    def settle(self) -> EarlierFailure | None:
        """Write the numbers of rows that are still being measured. Returns the error of training that the wait has received.
        Rows that were measured before the error are written.
        """
        try:
            self.reader.rows.settle()
        except EarlierFailure as failure:
            return failure
        return None

    def seal(self, into: SealedTable) -> None:
        """Copy the table into ``into`` and begin a new step."""
        self.lock.refuse_handlers()
        self.reader.rows.settle()
        with self.lock:
            self.late.enter()
            into.total, into.rewritten, into.postscript = self.total, self.rewritten, self.postscript
            self.table.seal(into)
            self.steps, self._forgotten = self.steps + 1, 0
            self.reader.forget_step()

    def forget(self, first: int, last: int) -> None:
        """Remove the rows that were written in the ``first`` to the ``last`` write of the step in progress."""
        self.lock.refuse_handlers()
        with self.lock:
            self._forgotten += max(0, last - first + 1)
            for page in self.table.pages:
                order = self.table.columns.order[page.first_row : page.first_row + page.used]
                for row in np.flatnonzero((order >= first) & (order <= last)).tolist():
                    order[row] = 0
                    for memory in filter(None, (page.memory, page.histogram)):
                        memory.forget(row)

    def kinds_now(self) -> dict[str, KindRows]:
        """The rows of the step in progress so far. Waits for the device."""
        self.lock.refuse_handlers()
        self.reader.rows.settle()
        with self.lock:
            self.late.enter()
            return self.table.kinds_now()

    def discard(self) -> None:
        """Discard the step in progress, and begin a new one."""
        self.lock.refuse_handlers()
        try:
            self.reader.rows.settle()
        finally:
            with self.lock:
                self.reader.forget_step()
                self.late.discard()
                self.table.discard()
                self.steps, self._forgotten = self.steps + 1, 0


# --- Derives the dataflow between series from the rows of one step, read from the live table before it is sealed.
#
# No additional hooks are needed. The table marks a tensor that was recorded under two names as an alias, and names tell
# which series belong to one call of a module.

NOT_SEEN: Final = np.iinfo(np.int64).max
_IN_FORWARD: Final = KINDS.index("actv")
_IN_BACKWARD: Final = (KINDS.index("actv_grad"), KINDS.index("grad_unreduced"))


class CallTensor(NamedTuple):
    """One tensor of one call of a module.

    Attributes:
        kind: ``actv`` or ``actv_grad``.
        name: ``input`` or ``output``, with the path of the tensor: ``input_0``.
        call: Number of earlier calls of the module in the micro-step.
    """

    kind: str
    name: str
    call: int

    @property
    def is_input(self) -> bool:
        return self.name.startswith("input")

    def seen_forward(self, seen: Container[CallTensor]) -> list[CallTensor]:
        """For a gradient: its tensor in forward, which has several names if it was passed as several arguments."""
        own = self._replace(kind="actv")
        places = [own] if own in seen else [own._replace(name=place) for place in places_of(self.name, "input_")]
        return [place for place in places if place in seen]


class SeenModule(NamedTuple):
    """A module and the series of its calls, with the fields of ``CallTensor`` as keys."""

    chunk: int
    name: str
    watched: Mapping[tuple[str, str, int], RecordedSeries]


def observed_dataflow(table: StatsTable, modules: Iterable[SeenModule]) -> Flow:
    """The dataflow of the step in the table, limited to ``MOST_EDGES`` and ``MOST_PASSES``.

    Only rows of the first micro-step are used: the others are nearly the same. Every edge leads from an earlier measurement to
    a later one, so there are no cycles.
    """
    seen = _ObservedStep(table, modules)
    edges = list(islice(_distinct(filter(seen.is_ordered, seen.edges())), MOST_EDGES + 1))
    passes = _passes(table)
    cut = len(edges) > MOST_EDGES or len(passes) > MOST_PASSES
    return Flow(tuple(edges[:MOST_EDGES]), tuple(passes[:MOST_PASSES]), cut)


class _ObservedStep:
    """The rows of the first micro-step, and the module calls that they belong to."""

    def __init__(self, table: StatsTable, modules: Iterable[SeenModule]) -> None:
        self._table = table
        order, identity = table.columns.order, table.identity
        self._rows: NDArray[np.int64] = np.flatnonzero((order > 0) & (identity.micro_step <= 0))
        when = np.full(len(table.series), NOT_SEEN)
        np.minimum.at(when, identity.series[self._rows], order[self._rows])
        self._when: list[int] = when.tolist()
        self._modules = [(module, self._slots(module)) for module in modules]

    def is_ordered(self, edge: Edge) -> bool:
        """Whether both ends of an edge were measured, in this order."""
        return self._when[edge.source] < self._when[edge.target] != NOT_SEEN

    def edges(self) -> Iterator[Edge]:
        """Candidates for edges. Those that are not ordered are no edges."""
        same = list(self._aliases())
        yield from same
        yield from self._handed_back(same)
        yield from self._through_modules()
        yield from self._into_parameters()

    def _slots(self, module: SeenModule) -> dict[CallTensor, int]:
        """The numbers of a module's series, without series that have no row on any device yet."""
        first = {CallTensor(*key): next(iter(watched.slots.values()), None) for key, watched in module.watched.items()}
        return {key: int(self._table.identity.series[slot.row]) for key, slot in first.items() if slot is not None}

    def _aliases(self) -> Iterator[Edge]:
        """Edges between series that measured the same tensor."""
        alias, series = self._table.columns.alias, self._table.identity.series
        again = self._rows[alias[self._rows] != NOT_AN_ALIAS]
        again = again[np.isin(alias[again], self._rows)]
        return map(Edge, series[alias[again]].tolist(), series[again].tolist())

    def _handed_back(self, same: Iterable[Edge]) -> Iterator[Edge]:
        """Edges of gradients, opposite to the forward edges: from the consumer's input to the producer's output."""
        gradient = {
            slots[forward]: number
            for _, slots in self._modules
            for slot, number in slots.items()
            if slot.kind == "actv_grad"
            for forward in slot.seen_forward(slots)
        }
        for source, target in same:
            if source in gradient and target in gradient:
                yield Edge(gradient[target], gradient[source])

    def _through_modules(self) -> Iterator[Edge]:
        """Edges from the inputs of a call to its outputs; for gradients, from its outputs to its inputs."""
        for _, slots in self._modules:
            calls: dict[tuple[str, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
            for slot, number in slots.items():
                calls[slot.kind, slot.call][slot.is_input].append(number)
            for (kind, _), (outputs, inputs) in calls.items():
                pairs = product(inputs, outputs) if kind == "actv" else product(outputs, inputs)
                yield from map(Edge._make, pairs)

    def _into_parameters(self) -> Iterator[Edge]:
        """Edges from the gradient of a module's output to the gradients of its parameters.

        The module is the nearest recorded one that contains the parameter.
        """
        outputs: dict[tuple[int, str], list[int]] = {}
        for module, slots in self._modules:
            found = [number for slot, number in slots.items() if slot.kind == "actv_grad" and not slot.is_input]
            if found:
                outputs[module.chunk, module.name] = found
        for number, series in enumerate(self._table.series):
            if series.kind == "grad_unreduced":
                around = (outputs.get((series.vpp_stage, name)) for name in parents(series.name))
                for source in next(filter(None, around), ()):
                    yield Edge(source, number)


def _distinct(edges: Iterable[Edge]) -> Iterator[Edge]:
    found: set[Edge] = set()
    for edge in edges:
        if edge not in found:
            found.add(edge)
            yield edge


def _passes(table: StatsTable) -> list[Pass]:
    """Each forward and backward of a micro-batch through a chunk, in the order of their first rows."""
    order, identity = table.columns.order, table.identity
    chunks = np.array([series.vpp_stage for series in table.series], dtype=np.int64)
    rows = np.flatnonzero((order > 0) & (identity.micro_step >= 0) & np.isin(identity.kind, (_IN_FORWARD, *_IN_BACKWARD)))
    rows = rows[np.argsort(order[rows])]
    forward = identity.kind[rows] == _IN_FORWARD
    each = np.stack([forward, chunks[identity.series[rows]], identity.micro_step[rows]], axis=1)
    _, first = np.unique(each, axis=0, return_index=True)
    return [Pass(bool(way), chunk, micro_step) for way, chunk, micro_step in each[np.sort(first)].tolist()]


# --- Returns the measurements of the current step as dictionaries for the training loop.

REDUCED: Final = "grad_reduced"
UNREDUCED: Final = "grad_unreduced"
GRADIENT_KINDS: Final = (REDUCED, UNREDUCED)

Value = float | int | str
Metrics = dict[str, dict[str, Value]]
"""``{tag: {op: value}}``. Ops without a value are absent."""


def metrics_of(
    rows: KindRows | None, ops: Sequence[str], series: SeriesTable, layouts: Sequence[TensorLayout], rank: int
) -> Metrics:
    """The rows of one kind by tag; empty if there are none."""
    if rows is None:
        return {}
    columns = {op: _column(op, rows, layouts) for op in ops}
    found: Metrics = {}
    for place, (index, micro_step) in enumerate(zip(rows.series.tolist(), rows.micro_step.tolist(), strict=True)):
        values = {op: column[place] for op, column in columns.items()}
        found[series[index].tag(rank, micro_step)] = {op: value for op, value in values.items() if value is not None}
    return found


def of_kinds(
    kinds: Sequence[str],
    measured: Mapping[str, KindRows],
    ops: Sequence[str],
    series: SeriesTable,
    layouts: Sequence[TensorLayout],
    rank: int,
    counted: Collection[str] = (),
) -> list[Metrics]:
    """The rows of each of these kinds by tag.

    Args:
        counted: Kinds whose rows have the number of calls that they combine.
    """
    ops_of = {kind: (*ops, CALLS) if kind in counted else ops for kind in kinds}
    return [metrics_of(measured.get(kind), ops_of[kind], series, layouts, rank) for kind in kinds]


def reduced_from_local(unreduced: Metrics) -> Metrics:
    """``grad_reduced`` before the optimizer's step in a single process: equal to the local gradients of backward."""
    return {f"{tag.removesuffix(UNREDUCED)}{REDUCED}": dict(values) for tag, values in unreduced.items()}


def _column(op: str, rows: KindRows, layouts: Sequence[TensorLayout]) -> list[Value | None]:
    if op in LAYOUT_OPS:
        return _layout_column(op, rows, layouts)
    return [*spelled(op, rows.partials)] if op in SPELLED_OPS else _numbers(op, rows)


def _numbers(op: str, rows: KindRows) -> list[Value | None]:
    values, valid = derive(op, rows.partials)
    whole = op in INTEGER_OPS
    return [None if not there else int(value) if whole else value for value, there in zip(values.tolist(), valid, strict=True)]


def _layout_column(op: str, rows: KindRows, layouts: Sequence[TensorLayout]) -> list[Value | None]:
    chosen = (layouts[index] for index in rows.layout.tolist())
    return [str(list(layout.shape)) if op == "shape" else layout.dtype for layout in chosen]
