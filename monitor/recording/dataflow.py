"""Derives the dataflow between series from the rows of one step, read from the live table before it is sealed.

No additional hooks are needed. The table marks a tensor that was recorded under two names as an alias, and names tell which
series belong to one call of a module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice, product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.coordinator.series_file import MOST_EDGES, MOST_PASSES, Edge, Flow, Pass
from monitor.recording.gradient_edges import places_of
from monitor.recording.recorder import RecordedSeries
from monitor.series import KINDS
from monitor.stats.table import NOT_AN_ALIAS, StatsTable

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
                around = (outputs.get((series.vpp_stage, name)) for name in _around(series.name))
                for source in next(filter(None, around), ()):
                    yield Edge(source, number)


def _distinct(edges: Iterable[Edge]) -> Iterator[Edge]:
    found: set[Edge] = set()
    for edge in edges:
        if edge not in found:
            found.add(edge)
            yield edge


def _around(name: str) -> Iterator[str]:
    """The names of the modules that contain a parameter, innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


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
