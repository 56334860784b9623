"""The dataflow graph of a rank, from its series file: which module a series belongs to, and what each tensor is made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from monitor.anomalies.overflows import SCALED_KINDS
from monitor.coordinator.manifest_format import ManifestError, ManifestRecord
from monitor.coordinator.series_file import LOCAL_PLACEMENT, NOT_MEASURED, Flow, Pass, SeriesColumns, read_columns
from monitor.merge.discovery import leads_out
from monitor.selection import parents
from monitor.series import ACTIVATION_KINDS, ACTIVATION_NAME, KIND_TABLE, Series, underlying_series

# --- The subject of an event: the role of its series in a step, and the modules around it.

ROOT: Final = ""
"""The name of a chunk's root module."""


class Role(IntEnum):
    """Phases of a step, in an order such that no phase depends on a later one of the same step and micro-step."""

    ORIGINAL_WEIGHT = 0
    FORWARD = 1
    BACKWARD = 2
    LOCAL_GRADIENT = 3
    GRADIENT = 4
    MOMENT = 5
    UPDATED_WEIGHT = 6
    OTHER = 7


_ROLES: Final = {kind.name: Role[kind.role] for kind in KIND_TABLE if kind.role}

SCALED: Final = tuple(_ROLES[kind] for kind in SCALED_KINDS)
"""Roles that a loss scale multiplies."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A series, as the ranking sees it.

    Attributes:
        series: The series; for a replica, the series that it replicates.
        recorded_as: The series as in files.
        module: The module that the tensor enters or leaves; for a parameter, the module that owns it.
        is_input: Whether the tensor, or the tensor of this gradient, is an input of the module.
        call: The number of earlier calls of the module in the micro-step.
    """

    series: Series
    recorded_as: Series
    role: Role
    module: str
    is_input: bool = False
    call: int = 0

    @property
    def is_entry(self) -> bool:
        """Whether it carries data into the module: an input in the forward, an output's gradient in the backward."""
        return self.role == (Role.FORWARD if self.is_input else Role.BACKWARD)

    @property
    def around(self) -> tuple[str, ...]:
        """The modules around it, innermost first; the root is the last."""
        return modules_around(self.module)


def subject_of(series: Series) -> Subject:
    """The subject of a series. An activation whose name no hook produces counts as one of the root."""
    meant = underlying_series(series)
    role = _ROLES.get(meant.kind, Role.OTHER)
    if meant.kind not in ACTIVATION_KINDS:
        return Subject(meant, series, role, meant.name.rpartition(".")[0])
    found = ACTIVATION_NAME.fullmatch(meant.name)
    if found is None:
        return Subject(meant, series, role, ROOT)
    return Subject(meant, series, role, found["module"], found["slot"].startswith("input"), int(found["call"] or 0))


@lru_cache(maxsize=100_000)
def modules_around(module: str) -> tuple[str, ...]:
    """A module and the modules around it; the root is the last."""
    return module, *parents(module)


def parent(module: str) -> str:
    return module.rpartition(".")[0]


Side = tuple[Role, int, str]
"""Direction, chunk and module."""


class _Measured(NamedTuple):
    """A series of a side of a module, and the module call that it belongs to."""

    number: int
    call: int


@dataclass(frozen=True, slots=True)
class SameTensor:
    """The earlier series of the tensor that is now an input.

    Attributes:
        series: All series under which the tensor was measured before.
        made: Those of them under which it was measured first.
    """

    series: tuple[Series, ...]
    made: tuple[Subject, ...]


@dataclass(frozen=True, eq=False)
class DataflowGraph:
    """The measured series of a rank in the order of their numbers, and the dataflow between them.

    For activations and their gradients, the order is that of their first measurement.

    Attributes:
        sharded: Series of which each rank holds another part.
    """

    numbers: Mapping[Series, int]
    flow: Flow
    sharded: frozenset[Series] = frozenset()

    @property
    def passes(self) -> tuple[Pass, ...]:
        return self.flow.passes

    def without(self, kinds: frozenset[str]) -> DataflowGraph:
        """The graph of the series of all other kinds."""
        if kinds.isdisjoint(kind for kind, _ in self.kinds):
            return self
        if kinds not in self._parts:
            left = {one: number for one, number in self.numbers.items() if one.kind not in kinds}
            self._parts[kinds] = replace(self, numbers=left)
        return self._parts[kinds]

    @cached_property
    def _parts(self) -> dict[frozenset[str], DataflowGraph]:
        return {}

    def sources(self, series: Series) -> Sequence[Series]:
        """Series of the same kind with an edge to this one. For the input of a module they are the same tensor."""
        return self._sources.get(self.numbers.get(series, NOT_MEASURED), ())

    def same_as(self, series: Series) -> SameTensor | None:
        """The earlier series of a module's input; None if it was not measured before."""
        if series not in self._same:
            self._same[series] = self._found_same(series) if self.sources(series) else None
        return self._same[series]

    def _found_same(self, series: Series) -> SameTensor:
        found, waiting = {series}, [series]
        made: list[Subject] = []
        while waiting:
            for source in self.sources(waiting.pop()):
                if source in found:
                    continue
                found.add(source)
                subject = subject_of(source)
                if subject.is_input and self.sources(source):
                    waiting.append(source)
                else:
                    made.append(subject)
        return SameTensor(tuple(found - {series}), tuple(made))

    def closure(self, subject: Subject) -> str | None:
        """The smallest module whose measured entries, with the computation inside it, produced the tensor.

        None if no module has all entries measured: then anything that enters the chunk may have produced the tensor.
        """
        if subject.series not in self._closures:
            self._closures[subject.series] = self._found_closure(subject)
        return self._closures[subject.series]

    def _found_closure(self, subject: Subject) -> str | None:
        if subject.is_entry and subject.module == ROOT:
            return None
        number = self.numbers.get(subject.series, len(self.numbers))
        for around in modules_around(parent(subject.module) if subject.is_entry else subject.module):
            entries = self._entries.get((subject.role, subject.series.vpp_stage, around), ())
            entries = [one for one in entries if one.call == subject.call] or entries
            # A container's output is often its last child's, whose row comes first: it shows no more than the child's row.
            if entries and all(one.number < number for one in entries):
                return around
        return None

    def entries_like(self, series: Series) -> Sequence[str]:
        """The modules that share a container's output. Its gradient is first measured as theirs, and may change later."""
        if series not in self._likes:
            backward = [one.module for one in map(subject_of, self.sources(series)) if one.is_entry]
            forward = map(subject_of, self.sources(replace(series, kind="actv")))
            self._likes[series] = list(dict.fromkeys([*backward, *(one.module for one in forward if not one.is_input)]))
        return self._likes[series]

    def uses_itself(self, subject: Subject) -> bool:
        """Whether a module itself uses its output, given the gradient of that output.

        Attention, for example, may compute, use and return a position bias. Such a gradient is made inside the module, too.
        Autograd runs the last computation first. If the gradient came after the module's backward had begun, there are two
        cases: the module uses the output, or the output existed before the call. In the latter case an input's gradient is
        complete by then. If the module was called several times, the call of the backward is unknown.
        """
        side = subject.role, subject.series.vpp_stage, subject.module
        number, exits = self.numbers.get(subject.series, NOT_MEASURED), self._exits.get(side, ())
        if subject.role != Role.BACKWARD or not subject.is_entry or len({one.call for one in self._entries[side]}) > 1:
            return False
        if not exits or any(one.number < number for one in exits):
            return False
        return any(not one.is_entry and subject.module in one.around for one in self.before(subject))

    def innermost(self, subject: Subject) -> Subject:
        """The same tensor at the innermost module where it was measured: a container's input is an input of its parts."""
        found = [one for one in map(subject_of, self.sources(subject.series)) if _is_within(one, subject)]
        return self.innermost(max(found, key=lambda one: self.numbers[one.series])) if found else subject

    def shows_entry(self, role: Role, chunk: int, module: str) -> bool:
        """Whether any entry of the module was measured."""
        return (role, chunk, module) in self._entries

    def shows_exit(self, role: Role, chunk: int, module: str) -> bool:
        """Whether any exit of the module was measured."""
        return (role, chunk, module) in self._exits

    def has_weights(self, chunk: int, module: str) -> bool:
        """Whether any series of a parameter below the module was measured."""
        return (chunk, module) in self._weights

    def records_weights(self, chunk: int, module: str) -> bool:
        """Whether weights below the module were measured."""
        return (chunk, module) in self._measured_weights

    def owner(self, parameter: Subject) -> str | None:
        """The nearest module around a parameter whose output gradient was measured."""
        key = parameter.series.vpp_stage, parameter.module
        if key not in self._owners:
            around = modules_around(parameter.module)
            self._owners[key] = next((one for one in around if self.shows_entry(Role.BACKWARD, key[0], one)), None)
        return self._owners[key]

    def before(self, subject: Subject) -> Iterator[Subject]:
        """Subjects of the same direction and chunk that were first measured earlier, the latest first."""
        number = self.numbers.get(subject.series, NOT_MEASURED)
        for _, one in reversed(self._in_order[subject.role, subject.series.vpp_stage][: self._place(subject, number)]):
            yield one

    def _place(self, subject: Subject, number: int) -> int:
        own = self._in_order[subject.role, subject.series.vpp_stage]
        return sum(1 for other, _ in own if other < number)

    @cached_property
    def _same(self) -> dict[Series, SameTensor | None]:
        return {}

    @cached_property
    def _likes(self) -> dict[Series, list[str]]:
        return {}

    @cached_property
    def _closures(self) -> dict[Series, str | None]:
        return {}

    @cached_property
    def _owners(self) -> dict[tuple[int, str], str | None]:
        return {}

    @cached_property
    def _subjects(self) -> Sequence[tuple[int, Subject]]:
        return [(number, subject_of(series)) for series, number in self.numbers.items()]

    @cached_property
    def _in_order(self) -> Mapping[tuple[Role, int], list[tuple[int, Subject]]]:
        found: dict[tuple[Role, int], list[tuple[int, Subject]]] = defaultdict(list)
        for number, subject in self._subjects:
            found[subject.role, subject.series.vpp_stage].append((number, subject))
        return found

    @cached_property
    def kinds(self) -> frozenset[tuple[str, int]]:
        """The measured kinds, with their chunks."""
        return frozenset((one.kind, one.vpp_stage) for one in self.numbers)

    @cached_property
    def _entries(self) -> Mapping[Side, list[_Measured]]:
        return self._sides(entry=True)

    @cached_property
    def _exits(self) -> Mapping[Side, list[_Measured]]:
        return self._sides(entry=False)

    def _sides(self, *, entry: bool) -> Mapping[Side, list[_Measured]]:
        found: dict[Side, list[_Measured]] = {}
        for number, one in self._subjects:
            if one.role in (Role.FORWARD, Role.BACKWARD) and one.is_entry == entry:
                found.setdefault((one.role, one.series.vpp_stage, one.module), []).append(_Measured(number, one.call))
        return found

    @cached_property
    def _weights(self) -> frozenset[tuple[int, str]]:
        return self._around(set(Role) - {Role.FORWARD, Role.BACKWARD, Role.OTHER})

    @cached_property
    def _measured_weights(self) -> frozenset[tuple[int, str]]:
        return self._around({Role.ORIGINAL_WEIGHT, Role.UPDATED_WEIGHT})

    def _around(self, roles: Container[Role]) -> frozenset[tuple[int, str]]:
        """Chunks and modules that contain a subject of one of these roles."""
        found = (one for _, one in self._subjects if one.role in roles)
        return frozenset((one.series.vpp_stage, module) for one in found for module in one.around)

    @cached_property
    def _sources(self) -> Mapping[int, list[Series]]:
        series = {number: one for one, number in self.numbers.items()}
        found: dict[int, list[Series]] = {}
        for source, target in self.flow.edges:
            one, other = series.get(source), series.get(target)
            if one is not None and other is not None and one.kind == other.kind and one.vpp_stage == other.vpp_stage:
                found.setdefault(target, []).append(one)
        return found


def _is_within(one: Subject, other: Subject) -> bool:
    """Whether ``one`` is on the same side of a module inside the module of ``other``."""
    return one.is_entry == other.is_entry and one.module != other.module and other.module in one.around


class DataflowGraphs:
    """Reads the graph of each rank once. Ranks of the same stage usually share one graph."""

    def __init__(self) -> None:
        self._by_content: dict[str, DataflowGraph] = {}
        self._alike: dict[tuple[object, ...], DataflowGraph] = {}

    def read(self, directory: Path, manifest: ManifestRecord) -> DataflowGraph | None:
        """The graph of a rank; None if the rank has measured nothing.

        Raises:
            ManifestError: its series file is missing, damaged, or lies elsewhere.
        """
        if manifest.series is None:
            return None
        path = directory / manifest.series.file
        known = self._by_content.get(path.name)
        if known is None:
            if leads_out(path):
                raise ManifestError(f"{path} leads to another directory")
            columns = read_columns(directory, manifest)
            known = None if columns is None else self._shared(columns)
        if known is not None:
            self._by_content[path.name] = known
        return known

    def _shared(self, columns: SeriesColumns) -> DataflowGraph:
        measured = tuple(number for number, layout in enumerate(columns.layout) if layout != NOT_MEASURED)
        flow = (columns.flow_from, columns.flow_to, columns.passes)
        sharded = _sharded(columns)
        key = (columns.kinds, columns.kind, columns.vpp_stage, columns.name, measured, sharded, flow)
        known = self._alike.get(key)
        if known is None:
            every = zip(columns.kind, columns.vpp_stage, columns.name, strict=True)
            series = [Series(columns.kinds[kind], chunk, name) for kind, chunk, name in every]
            numbers = {underlying_series(series[number]): number for number in measured}
            parts = frozenset(underlying_series(series[number]) for number in sharded)
            known = self._alike[key] = DataflowGraph(numbers, columns.flow(), parts)
        return known


def _sharded(columns: SeriesColumns) -> tuple[int, ...]:
    """Numbers of the sharded series. Each rank holds another part of them."""
    cut = [placement.shard is not None for placement in columns.placements]
    return tuple(
        number for number, placement in enumerate(columns.placement) if placement != LOCAL_PLACEMENT and cut[placement]
    )
