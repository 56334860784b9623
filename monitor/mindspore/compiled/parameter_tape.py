"""The tape of compiled code that MindSpore's own operations measure: rows of a Parameter, which can be on a device.

Each row has a place of its own, so the order of execution has no meaning: the beginning of a call reserves a block of rows by
a counter, and all that belongs to the call is added to rows of that block. If rows were added to one place twice, the column
``writes`` shows it. Python reads the Parameter after each execution, and sets it to zeros.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cache
from itertools import count
from typing import Any, Final, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from numpy.typing import NDArray

from monitor.mindspore.compiled import roles
from monitor.mindspore.tape import MARK, Layout, Measurements
from monitor.stats import partials
from monitor.stats.mindspore.kernels import PIECE, PIECE_COLUMNS, combined
from monitor.stats.partials import Floats

BLOCK: Final = 32
"""Rows of a call."""
LEAST_CALLS: Final = 512
"""How many calls one execution can have, at least."""
CALLS_OF_A_CELL: Final = 8
MOST_PIECES: Final = 16
"""How many rows a tensor may have."""

LONGEST: Final = 1 << 16
"""How many elements are added up in one go. On a CPU, MindSpore's ``ReduceSum`` loses digits beyond: 6e-6 of a norm of 2^22."""

HEAD: Final = 3
"""Columns before those of a piece: ``writes``, the number of a site, and the place in the block, which has no meaning here."""

READ: Final = frozenset({ms.float32, ms.float16, ms.bfloat16, ms.int8, ms.uint8, ms.int16, ms.bool_})
"""The dtypes that are read: float32 holds all of their numbers."""

_MARK: Final = "_monitored_rows"
"""An attribute that only the rows of tapes have."""

_NUMBERS: Final = count()
"""Parameters of compiled code need different names."""

OVERFLOW: Final = (
    "Compiled code made more calls of cells in one execution than the monitor keeps. They have no rows of actv and actv_grad. "
    "Select cells with targets, or compile a step for each micro-batch."
)
SEVERAL: Final = (
    "Compiled code has computed several gradients of one parameter in an execution: of micro-batches, or parts of one in loops "
    "and branches. So such parameters have no rows of grad_unreduced. grad_reduced has the whole gradient."
)
REPEATED: Final = (
    "Compiled code has computed tensors of a call several times in an execution, and does not show which is which. They have "
    "no rows of actv and actv_grad."
)


class Site(NamedTuple):
    """What writes to places of the tape.

    Attributes:
        tap: The id of its entries.
        cell: The number of the cell; 0 for what belongs to no call.
        role: One of ``roles``.
        layout: The shape and dtype of its tensor; None for a mark.
    """

    tap: int
    cell: int
    role: str
    layout: Layout | None

    @property
    def begins(self) -> bool:
        """Whether its entries begin a forward of the model."""
        return self.role in roles.MARKS

    @property
    def rows(self) -> int:
        return 1 if self.layout is None else pieces_of(self.layout[0])


class _Entry(NamedTuple):
    """What a site has written.

    Attributes:
        call: The number of its call; 0 for what belongs to no call.
        place: Its first row.
    """

    site: Site
    call: int
    place: int
    pieces: NDArray[np.float32]

    def row(self) -> Floats:
        return np.array(partials.EMPTY) if self.site.layout is None else combined(self.pieces)


class _Span(NamedTuple):
    """When a call began and ended.

    Attributes:
        forward: The number of the pass through the model.
    """

    forward: int
    begin: int
    end: int


_LAST: Final = _Span(1 << 62, 0, 0)
"""The span of what belongs to no call."""


def _in_order(entries: Sequence[_Entry], inside: Callable[[int], Set[int | None]]) -> list[_Entry]:
    """The entries as hooks would have seen them: a result after the calls inside, and gradients the other way round."""
    spans = _spans(entries, inside)

    def place_of(one: _Entry) -> tuple[int, bool, int, int]:
        span, role = spans.get(one.call, _LAST), one.site.role
        back = role in (roles.OUTPUT_GRAD, roles.INPUT_GRAD)
        at = span.end if role in (roles.OUTPUT, roles.OUTPUT_GRAD) else span.begin
        return span.forward, back, -at if back else at, -1 if one.site.begins else one.place

    return sorted(entries, key=place_of)


def _spans(entries: Sequence[_Entry], inside: Callable[[int], Set[int | None]]) -> dict[int, _Span]:
    """The spans of calls, by number. Calls are numbered as they begin. A call ends before one begins that is not inside.

    Args:
        inside: The numbers of the cells inside a cell.
    """
    cells = {one.call: one.site.cell for one in entries if one.call}
    of_model = {one.call for one in entries if one.site.begins}
    found: dict[int, _Span] = {}
    unfinished: list[tuple[int, int]] = []  # calls, and when they began
    models: set[int] = set()
    forward, now = 0, count()

    def end() -> None:
        call, began = unfinished.pop()
        found[call] = _Span(forward, began, next(now))

    for call in sorted(cells):
        again = call in of_model and cells[call] in models
        while unfinished and (again or cells[call] not in inside(cells[unfinished[-1][0]])):
            end()
        if again:
            forward, models = forward + 1, set()
        if call in of_model:
            models.add(cells[call])
        unfinished.append((call, next(now)))
    while unfinished:
        end()
    return found


class ParameterTape:
    """The measurements of one program, in Parameters.

    Args:
        cells: How many cells are measured.
        parameters: The sizes of the parameters whose gradients are measured.
        inside: Returns the numbers of the cells inside a cell.
        warn: Warns once of what has no rows.
    """

    def __init__(
        self,
        cells: int,
        parameters: Sequence[int],
        inside: Callable[[int], Set[int | None]],
        warn: Callable[[str, str], object],
    ) -> None:
        self._inside, self._warn = inside, warn
        self._is_on = False
        self.ring = BLOCK * max(LEAST_CALLS, CALLS_OF_A_CELL * cells)
        rows = self.ring + sum(2 * -(-size // PIECE) for size in parameters)
        self._zeros, number = Tensor(np.zeros((rows, HEAD + PIECE_COLUMNS), np.float32)), next(_NUMBERS)
        self.rows = Parameter(self._zeros.copy(), name=f"monitor_rows_{number}", requires_grad=False)
        vars(self.rows)[_MARK] = True
        self.counter = Parameter(Tensor(np.array([self.ring])), name=f"monitor_calls_{number}", requires_grad=False)
        self._assign = ops.Assign()
        self._sites: list[Site] = [Site(-1, 0, roles.BEGIN, None)]
        self._known: dict[tuple[Any, ...], Tensor | None] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._used: Counter[int] = Counter({0: self.ring})
        self._taken = self.ring

    def site(self, tap: int, cell: int, role: str, layout: Layout | None) -> Tensor | None:
        """What the operations write of a tensor: float32, shape ``(HEAD,)``; None if there is no place for it.

        Args:
            tap, cell, role: See ``Site``.
            layout: The shape and dtype of the tensor; None for a mark.
        """
        key = tap, layout
        if key not in self._known:
            made = Site(tap, cell, role, layout)
            place = self._place_of(made)
            if place is None:
                self._known[key] = None
            else:
                self._known[key] = Tensor(np.array([1, len(self._sites), place], np.float32))
                self._sites.append(made)
        return self._known[key]

    def _place_of(self, site: Site) -> int | None:
        """The first of its rows, which a tap has once for all shapes: a call has one of them. None if there is no place."""
        key = site.tap, site.rows
        if key not in self._places:
            place = self._used[site.cell]
            if place + site.rows > (BLOCK if site.cell else len(self._zeros)):
                return None
            self._places[key], self._used[site.cell] = place, place + site.rows
        return self._places[key]

    def drain(self) -> Measurements:
        """Take what was written since the last time, in the order in which hooks would have seen it. Waits for it."""
        counted, table = self._take()
        if not self._is_on:
            table[:] = 0
        if counted - self._taken > self.ring:
            table[: self.ring] = 0
            self._warn("too many calls for actv and actv_grad", OVERFLOW)
        self._taken = counted
        entries = list(self._entries(table, counted))
        return _measurements(_in_order(entries, self._inside))

    def discard(self) -> None:
        """Drop what was written since the last time. Waits for it."""
        self._taken, _ = self._take()

    def _take(self) -> tuple[int, NDArray[np.float32]]:
        """How many rows calls have reserved so far, and all rows, which are zeros from then on."""
        counted, table = int(self.counter.asnumpy()[0]), self.rows.asnumpy().copy()
        if table[:, 0].any():
            self._assign(self.rows, self._zeros)
        return counted, table

    def _entries(self, table: NDArray[np.float32], counted: int) -> Iterator[_Entry]:
        """What was written once."""
        end = 0
        for at in np.flatnonzero(table[:, 0]).tolist():
            if at < end:
                continue
            site = self._sites[round(float(table[at, 1] / table[at, 0]))]
            end = at + site.rows
            is_of_call = at < self.ring
            if (table[at:end, 0] == 1).all():
                call = counted - (counted - at // BLOCK * BLOCK) % self.ring if is_of_call else 0
                yield _Entry(site, call, at, table[at:end, HEAD:])
            elif is_of_call:
                self._warn("repeated calls for actv and actv_grad", REPEATED)
            else:
                self._warn("several gradients for grad_unreduced", SEVERAL)

    # What a tape of the operator in C also does.

    def set_up(self, eps: float, **wanted: bool) -> None:
        """Nothing to do: what is measured was decided when the tape was made."""

    def bound(self, most: int) -> None:
        """Nothing to do: entries are taken after each execution."""

    def turn(self, on: bool) -> None:
        """Whether entries are taken. The operations always write."""
        if on and not self._is_on:
            self.discard()
        self._is_on = on

    def rest(self) -> None:
        """Nothing to do: compiled code keeps the Parameters."""

    def wake(self) -> bool:
        """True: the Parameters are still there."""
        return True


def _measurements(entries: Sequence[_Entry]) -> Measurements:
    found = [one.site.layout or ((), "") for one in entries]
    layouts = sorted(set(found))
    return Measurements(
        np.array([one.site.tap for one in entries], np.int64),
        np.array([one.row() for one in entries]).reshape(-1, len(partials.COLUMNS)),
        None,
        layouts,
        np.array([layouts.index(one) for one in found], np.int64),
        frozenset(),
        np.array([one.call if one.site.begins else 0 for one in entries], np.int64),
        np.array([0 if one.site.begins else one.call for one in entries], np.int64),
        np.zeros(len(entries), np.int64),
        np.array([MARK * (one.site.layout is None) for one in entries], np.int64),
        0,
    )


def tapes_in(parameters: Iterable[Parameter]) -> Sequence[Parameter]:
    """The rows of tapes among the parameters of compiled code."""
    return [one for one in parameters if _MARK in vars(one)]


def layout_of(kind: Any, shape: Sequence[int]) -> Layout | None:
    """The layout of a tensor in compiled code; None if it is not read."""
    dtype = kind.element_type()
    return (tuple(shape), str(dtype).lower()) if dtype in READ and pieces_of(tuple(shape)) else None


def pieces_of(shape: Sequence[int]) -> int:
    """In how many equal pieces a tensor is reduced; 0 if there are none."""
    size = math.prod(shape)
    counts = range(max(1, -(-size // PIECE)), MOST_PIECES + 1)
    return next((count for count in counts if size and size % count == 0 and run_of(size // count)), 0)


@cache
def run_of(size: int) -> int:
    """The length of equal runs of a piece, which are added up first; 0 if no runs are short and few enough."""
    return next((run for run in range(min(size, LONGEST), 0, -1) if size % run == 0 and size // run <= LONGEST), 0)
