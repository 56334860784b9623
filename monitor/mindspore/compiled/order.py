"""The order of what compiled code has measured, from the order in which MindSpore's threads have executed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from monitor.mindspore.compiled import roles
from monitor.mindspore.compiled.program import ObservedCell, ObservedOptimizer, ObservedParameter, Tap
from monitor.mindspore.tape import TapedTensor

INDEPENDENT: Final = (
    "In a forward, calls of one cell (for example of a {name}) do not depend on each other, and compiled code does not show "
    "which comes first in the program. They are numbered in the order of the compiled graph, which is the same in each step."
)


class Entry(NamedTuple):
    """A measurement.

    Attributes:
        call: The number of the entry that began its call.
        number: Its own number.
        site: The place of its operator in the compiled graph (``Measurements.sites``).
    """

    tap: Tap
    call: int
    number: int
    x: TapedTensor
    site: int


class _Call:
    """A call of a cell inside the model.

    Attributes:
        last_input: The place of its last argument among the entries; -1 if none was measured.
        end: The place of its first result, or of its last argument if it has no result.
        site: The least site of its results, or of its arguments if it has no result.
    """

    def __init__(self, cell: ObservedCell, number: int) -> None:
        self.cell = cell
        self.number = number
        self.last_input = -1
        self.end = -1
        self.site = 0
        self._has_result = False

    def add(self, place: int, entry: Entry) -> None:
        is_result = entry.tap.role == roles.OUTPUT
        if not is_result:
            self.last_input = place
        if is_result > self._has_result:
            self.end, self.site, self._has_result = place, entry.site, True
        elif is_result:
            self.site = min(self.site, entry.site)
        elif not self._has_result:
            self.end, self.site = place, min(self.site or entry.site, entry.site)


def beginnings(entries: Sequence[Entry], warn: Callable[[str, str], object]) -> dict[int, list[tuple[ObservedCell, int]]]:
    """The calls of cells inside the model that begin at a place: cells and numbers of calls, by the index of an entry.

    A call begins where it ends: only then is the order of dependent calls known. Calls that do not depend on each other begin
    together, in the order of the compiled graph. The order in which threads execute them is not always the same.
    """
    begins: dict[int, list[tuple[ObservedCell, int]]] = {}
    for calls in _calls(entries):
        for group in _groups(calls):
            if len(group) > 1:
                warn("order of calls", INDEPENDENT.format(name=type(group[0].cell.cell()).__name__))
            place = min(call.end for call in group)
            begins.setdefault(place, []).extend((call.cell, call.number) for call in group)
    return begins


def _calls(entries: Sequence[Entry]) -> Iterator[list[_Call]]:
    """The calls of each cell in each forward, in the order in which they end."""
    found: dict[int, _Call] = {}
    forwards: dict[tuple[int, int], list[_Call]] = {}
    forward = 0
    for place, entry in enumerate(entries):
        cell = entry.tap.owner
        if entry.tap.role in (roles.BEGIN, roles.EVALUATION):
            forward += 1
        elif entry.tap.role in (roles.INPUT, roles.OUTPUT) and cell.chunk is None:
            if entry.call not in found:
                found[entry.call] = _Call(cell, entry.call)
                forwards.setdefault((cell.number, forward), []).append(found[entry.call])
            found[entry.call].add(place, entry)
    for calls in forwards.values():
        yield sorted(calls, key=lambda call: call.end)


def _groups(calls: Sequence[_Call]) -> Iterator[list[_Call]]:
    """The calls, those together that do not depend on each other, and each group in the order of the graph."""
    group: list[_Call] = []
    for call in calls:
        if group and not 0 <= call.last_input < group[-1].end:
            yield _by_site(group)
            group = []
        group.append(call)
    if group:
        yield _by_site(group)


def _by_site(group: list[_Call]) -> list[_Call]:
    """A loop executes a site several times, which says nothing about the order."""
    sites = {call.site for call in group}
    return sorted(group, key=lambda call: call.site) if len(sites) == len(group) and 0 not in sites else group


def in_parts(entries: Sequence[Entry], training: set[int]) -> dict[int, set[ObservedParameter]]:
    """The parameters with gradients of which it is not known which backward of a step has computed them.

    It is known if there is one entry, or equal ones, after the beginning of each forward and before that of the next one.

    Returns:
        The parameters of each step, by the index of its first entry.
    """
    return {begin: _in_parts(step, training) for begin, step in _steps(entries)}


def _in_parts(entries: Sequence[Entry], training: set[int]) -> set[ObservedParameter]:
    found: dict[ObservedParameter, dict[int, list[TapedTensor]]] = {}
    forwards = 0
    for entry in entries:
        if entry.tap.role == roles.PARAMETER:
            found.setdefault(entry.tap.owner, {}).setdefault(forwards, []).append(entry.x)
        elif entry.tap.role == roles.BEGIN and entry.number in training:
            forwards += 1
    return {
        parameter
        for parameter, parts in found.items()
        if (forwards > 1 and set(parts) != set(range(1, forwards + 1)))
        or any(not np.array_equal(x.row, every[0].row, equal_nan=True) for every in parts.values() for x in every)
    }


def _steps(entries: Sequence[Entry]) -> Iterator[tuple[int, Sequence[Entry]]]:
    """The entries of each step, and the index of its first one. In a step, each optimizer steps at most once."""
    ends = [(place, entry.tap.owner) for place, entry in enumerate(entries, 1) if entry.tap.role == roles.TURN_ENDS]
    optimizers = {optimizer for _, optimizer in ends}
    begin = last = 0
    stepped: set[ObservedOptimizer] = set()
    for place, optimizer in ends:
        if optimizer in stepped:
            yield begin, entries[begin:last]
            begin, stepped = last, set()
        stepped.add(optimizer)
        last = place
    if stepped and stepped == optimizers:
        yield begin, entries[begin:last]
        begin = last
    yield begin, entries[begin:]


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """The entries. Between two steps of optimizers the only forward begins first: cells of constants may be earlier."""
    ordered: list[Entry] = []
    between: list[Entry] = []
    for entry in entries:
        between.append(entry)
        if entry.tap.role == roles.TURN_ENDS:
            ordered += _with_only_forward_first(between)
            between = []
    return ordered + _with_only_forward_first(between)


def _with_only_forward_first(entries: list[Entry]) -> list[Entry]:
    begins = [entry for entry in entries if entry.tap.role in (roles.BEGIN, roles.EVALUATION)]
    if len(begins) != 1:
        return entries
    return [*begins, *(entry for entry in entries if entry is not begins[0])]
