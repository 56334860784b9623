"""The operands of matrix multiplications (GEMMs) in a recorded run: which rows are theirs, read some steps at a time.

A GEMM is a module with a parameter ``{module}.weight`` of two dimensions, one of which is the last dimension of its input. Its
operands are its input (``actv``), the weight (``param_origin``) and the gradient of its output (``actv_grad``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.merge.execution import MergeError
from monitor.precision.rounding import Index, Magnitudes
from monitor.query.sources import MergedSet, NameFilter, QueryError, RowChoice, RunSource
from monitor.stats.histograms import MAGNITUDES
from monitor.stats.partials import Floats

INPUT, WEIGHT, GRADIENT = "input", "weight", "gradient"
OPERANDS: Final = (INPUT, WEIGHT, GRADIENT)
OF_INPUT, OF_WEIGHT, OUTPUT = "gradient of the input", "gradient of the weight", "output"
RESULTS: Final = (OF_INPUT, OF_WEIGHT, OUTPUT)
"""No operands: their norms say how much the loss changes with the operands."""

KINDS_OF: Final = {
    INPUT: ("actv",),
    WEIGHT: ("param_origin", "param_updated"),
    GRADIENT: ("actv_grad",),
    OF_INPUT: ("actv_grad",),
    OF_WEIGHT: ("grad_reduced", "grad_unreduced"),
    OUTPUT: ("actv",),
}
"""The kind of each, and the kind to take if a run does not have that one."""
_WHOLE: Final = (WEIGHT, OF_WEIGHT)
"""Operands of which ranks may have shards."""
_PLACES: Final = {INPUT: "input", OF_INPUT: "input", GRADIENT: "output", OUTPUT: "output"}
_GLOBS: Final = ("*.input", "*.input#*", "*.input_0", "*.input_0#*", "*.output", "*.output#*", "*.output_0", "*.output_0#*")
"""Names of rows of modules. A linear layer has one input and one output; some libraries return a bias with it."""
_INPUTS: Final = "*.input_*"
"""Names of further rows: several inputs of a module, and inputs that were given by keyword."""
_TENSOR: Final = re.compile(r"(?P<module>.*)\.(?P<place>input|output)(?:_0)?(?:#(?P<call>\d+))?|(?P<of>.*)\.weight")

FIELDS: Final = {
    INPUT: '"xy_distribution": true, "all_xy": true',
    WEIGHT: '"param_distribution": true',
    GRADIENT: '"xy_distribution": true, "all_xy": true',
}
"""The fields of the configuration that record an operand."""
OPS: Final = '"ops": ["absmax", "norm", "shape", "magnitude_histogram"]'

ROWS_AT_A_TIME: Final = 50_000
"""About: their histograms take some 200 MB."""

NO_NUMBER: Final = -1.0
"""In place of a number that a row does not have. NaN is a measured value."""

_CALL_BITS: Final = 20
LAST_CALL: Final = (1 << _CALL_BITS) - 1
"""The number of the last call that a micro-step may have."""
_FIRST: Final = range(1)


Ranks = frozenset[int] | None
"""None: all."""


class Gemm(NamedTuple):
    """A matrix multiplication.

    Attributes:
        name: Of its module.
        width: The last dimension of its input; 0 where that is not known.
        weight: The module that its weight is named after: an embedding, if they share it.
    """

    name: str
    width: int
    weight: str


@dataclass(frozen=True, slots=True)
class OperandRows:
    """Rows of one operand in some steps.

    Attributes:
        gemm: Of each row the number of its GEMM.
        call: Its micro-step, and its call within that.
        series: A number for each GEMM on each rank: all calls have one history of magnitudes.
        absmax, norm: ``NO_NUMBER`` where the row does not have it.
        count: Elements.
        texts: Histograms; null where a row has none.
    """

    gemm: Index
    step: Index
    rank: Index
    call: Index
    series: Index
    absmax: Floats
    norm: Floats
    count: Floats
    texts: pa.ChunkedArray

    def __len__(self) -> int:
        return len(self.gemm)

    @property
    def has_numbers(self) -> Any:
        """Which rows have a histogram, a norm and a greatest magnitude."""
        return self.texts.is_valid().to_numpy() & (self.absmax != NO_NUMBER) & (self.norm != NO_NUMBER)

    def of(self, rows: Any) -> OperandRows:
        """Some of the rows."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        return OperandRows(
            **{name: one.filter(pa.array(rows)) if name == "texts" else one[rows] for name, one in columns.items()}
        )

    def magnitudes(self) -> Magnitudes:
        """The magnitudes of rows that all have numbers."""
        return Magnitudes.of(self.texts, self.absmax, self.norm)


class FirstRow(NamedTuple):
    """What is known of a tensor from its first row: where it stands within the step, and its layout as far as it is known."""

    place: tuple[int, ...]
    elements: int
    shape: tuple[int, ...] | None
    dtype: str


class RecordedGemms:
    """The GEMMs of a run, in order of depth, and their rows.

    Raises:
        QueryError: The files cannot be read.
    """

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._table = source.series()
        self.kinds: dict[str, str | None] = {what: self._kind(what) for what in KINDS_OF}
        self._read: dict[str, tuple[object, pa.Table]] = {}
        self._rows_of_a_step = 0
        some, ranks = max(1, ROWS_AT_A_TIME * len(source.ranks) // max(1, len(self._table))), source.ranks
        self.groups: list[Ranks] = [frozenset(ranks[first : first + some]) for first in range(0, len(ranks), some)]
        """Ranks that are read together."""
        self.without_layer: list[str] = []
        """Matrices that belong to no layer."""
        self.gemms = list(self._found())
        self._number = {one.name: number for number, one in enumerate(self.gemms)}
        self._number_of_weight = {one.weight: number for number, one in enumerate(self.gemms)}

    def windows(self, steps: range) -> Iterator[tuple[range, int, int]]:
        """The recorded steps, some at a time, as ranges that hold them, with how many are done and how many there are.

        Raises:
            QueryError: There are rows, but none in these steps.
        """
        kinds = {kind for what in OPERANDS if (kind := self.kinds[what])}
        every = {step for kind in kinds for each in self._source.steps.get(kind, []) for step in each}
        recorded = sorted(step for step in every if step in steps)
        if every and not recorded:
            raise QueryError(f"there are no rows in these steps. There are rows of steps {min(every)} to {max(every)}.")
        each = max(1, ROWS_AT_A_TIME // max(1, self._rows_of_a_step // len(self.groups)))
        for first in range(0, len(recorded), each):
            some = recorded[first : first + each]
            yield range(some[0], some[-1] + 1), first, len(recorded)

    def read(self, what: str, steps: range, ranks: Ranks = None) -> OperandRows | None:
        """The rows of an operand in these steps, on one of ``groups``; None if there are none.

        Raises:
            QueryError: The files cannot be read.
        """
        more = [MAGNITUDES] if self.has_histograms(what) else []
        found = self._rows(what, steps, ["absmax", "norm", *more], ranks)
        return None if found is None else self._of_gemms(what, found)

    def has_histograms(self, what: str) -> bool:
        """Whether rows of an operand may have histograms."""
        kind, whole = self.kinds[what], self._is_whole(what)
        if kind is None:
            return False
        return MAGNITUDES in self._files(kind, whole).rows(RowChoice(kind, whole, steps=_FIRST)).column_names

    def lacking(self, incomplete: bool) -> list[str]:
        """What was not recorded, and the fields that record it, a sentence each.

        Args:
            incomplete: Whether rows lack a number.
        """
        absent = [what for what in OPERANDS if self.kinds[what] is None]
        said = [f"There are no rows of {KINDS_OF[what][0]} for the {what} of layers. Record {FIELDS[what]}." for what in absent]
        if not any(map(self.has_histograms, OPERANDS)):
            said.append(f"There are no histograms of magnitudes. Record {OPS}.")
        elif incomplete:
            said.append(f"Rows have no histogram, norm or absmax. Record {OPS}.")
        if not self.gemms:
            said.append(f"No layer was found: a module with a weight of two dimensions and rows of its input. Record {OPS}.")
        return said

    # --- Rows.

    def _of_gemms(self, what: str, rows: pa.Table) -> OperandRows:
        """The rows that belong to a GEMM, and are not terms of a sum over ranks."""
        names = rows["name"].combine_chunks().dictionary_encode()
        texts, codes = names.dictionary.to_pylist(), names.indices.to_numpy()
        parts = [_TENSOR.fullmatch(one) for one in texts]
        parts = [one if one is not None and one["place"] == _PLACES.get(what) else None for one in parts]
        numbers = self._number_of_weight if what == WEIGHT else self._number  # a shared gradient is of both uses
        gemm = np.array([-1 if one is None else numbers.get(one["module"] or one["of"], -1) for one in parts])
        call = np.array([0 if one is None else int(one["call"] or 0) for one in parts])
        rank, term = _column(rows, "rank", -1), _column(rows, "term", value=False)
        none = pa.chunked_array([pa.nulls(len(rows), pa.string())])
        found = OperandRows(
            gemm.astype(np.int64)[codes],
            rows["step"].to_numpy(),
            rank,
            (_column(rows, "micro_step", -1) + 1 << _CALL_BITS) + call[codes],
            gemm.astype(np.int64)[codes] * (max(self._source.ranks, default=0) + 2) + rank + 1,
            _column(rows, "absmax", NO_NUMBER),
            _column(rows, "norm", NO_NUMBER),
            _column(rows, "count", 0).astype(np.float64),
            rows[MAGNITUDES].cast(pa.string()) if MAGNITUDES in rows.column_names else none,
        )
        return found.of((found.gemm >= 0) & ~term)

    def _rows(self, what: str, steps: range, columns: Sequence[str], ranks: Ranks, *, every: bool = False) -> pa.Table | None:
        """Rows under the names that tensors have in the whole model; None if there are none.

        Args:
            every: All parameters instead of weights, or all inputs.
        """
        kind, whole = self.kinds[what], self._is_whole(what)
        if kind is None:
            return None
        wanted = ["name", "step", "micro_step", "count", *columns, *(["term"] if whole else _OF_RANKS)]
        globs: tuple[str, ...] = ("*" if every else "*.weight",) if what in _WHOLE else (*_GLOBS, *[_INPUTS] * every)
        choice = RowChoice(kind, whole, NameFilter(globs), steps, None if whole else ranks, tuple(wanted))
        key = steps, ranks, wanted, globs
        if self._read.get(kind, (None,))[0] != key:  # inputs and outputs are of one kind: it is read once
            self._read[kind] = (key, self._named(choice))
        found = self._read[kind][1]
        return found if len(found) else None

    def _named(self, choice: RowChoice) -> pa.Table:
        try:
            found = self._files(choice.kind, choice.whole).rows(choice)
        except (MergeError, pa.ArrowException) as error:
            raise QueryError(str(error)) from error
        own = found["name"].cast(pa.string())
        names = own if choice.whole else call_function("coalesce", [found["global_name"].cast(pa.string()), own])
        return found.set_column(found.column_names.index("name"), "name", names)

    def _files(self, kind: str, whole: bool) -> RunSource:
        """The run to read from. All steps are merged at once, if they must be."""
        return self._source.merged((kind,), RowChoice(kind).span) if whole else self._source

    def _kind(self, what: str) -> str | None:
        known = self._source.kinds(whole=self._is_whole(what))
        return next((kind for kind in KINDS_OF[what] if kind in known), None)

    def _is_whole(self, what: str) -> bool:
        return what in _WHOLE and len(self._source.ranks) > 1 and bool(self._source.kinds(whole=True))

    # --- Which GEMMs there are.

    def _found(self) -> Iterator[Gemm]:
        """In the order in which forward calls them, as far as that is known, and then by name."""
        parameters = self._first(WEIGHT) or self._first(OF_WEIGHT)
        weights = {name: one for name, one in parameters.items() if name.endswith(".weight")}
        tensors, named = self._first(INPUT), set[str]()
        found: list[tuple[tuple[Any, ...], Gemm]] = []
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            taken, given = (_of_module(tensors, module, place) for place in ("input", "output"))
            is_other = _is_other(weight, taken, given)
            width = None if is_other else _width(weight, taken)
            heads = list(_sharing(module, weight, tensors, weights)) if width is None or taken is given else []
            if width is not None and not heads:
                place = taken.place if taken else given.place if given else (len(tensors), 0, 0)
                heads = [((*place, *_natural(module)), Gemm(module, width, module))]
            found += heads
            named |= {name} if heads or is_other else set()
        matrices = (name for name, one in parameters.items() if name not in named and _is_matrix(name, one))
        self.without_layer = [name for name in matrices if not _is_of_other(name, parameters[name], tensors)]
        yield from (gemm for _, gemm in sorted(found, key=lambda one: one[0]))

    def _first(self, what: str) -> dict[str, FirstRow]:
        """By name, the tensors of an operand in the first step that has rows, as the first rank has them."""
        kind = self.kinds[what]
        steps = self._source.steps.get(kind, []) if kind else []
        first = min((one[0] for one in steps), default=-1)
        found: dict[str, FirstRow] = {}
        for ranks in self.groups if first >= 0 else ():
            rows = self._rows(what, range(first, first + 1), self._layout_columns(what), ranks, every=True)
            if rows is not None:
                self._rows_of_a_step += len(rows)
                found = self._first_rows(str(kind), rows) | found
        return found

    def _first_rows(self, kind: str, rows: pa.Table) -> dict[str, FirstRow]:
        layouts, found = self._layouts(kind), dict[str, FirstRow]()
        calls = _column(rows, "call_id", -1)
        is_in_order = (calls >= 0).any() or not isinstance(self._source, MergedSet)  # which has rows in order of names
        for index, row in enumerate(rows.take(pa.array(np.argsort(calls, kind="stable"))).to_pylist()):
            shape, dtype = layouts.get(row["name"], (None, ""))
            place = (row.get("stage") or 0, row.get("vpp_stage") or 0, index if is_in_order else 0)
            one = FirstRow(place, row["count"] or 0, _shape(row.get("shape") or shape), row.get("dtype") or dtype or "")
            found.setdefault(row["name"], one)
        return found

    def _layout_columns(self, what: str) -> list[str]:
        return [] if self._is_whole(what) else ["shape", "dtype"]

    def _layouts(self, kind: str) -> dict[str, tuple[str | None, str | None]]:
        """By name, shape and dtype of the tensors of a kind, where manifests say them."""
        of_kind = self._table.filter(pa.array(np.array(self._table["kind"].to_pylist(), dtype=object) == kind))
        return {row["name"]: (row["shape"], row["dtype"]) for row in reversed(of_kind.to_pylist())}


_OF_RANKS: Final = ("rank", "stage", "vpp_stage", "global_name", "call_id")


def _column(rows: pa.Table, name: str, value: Any) -> Any:
    """A column, with a value where there is none."""
    return rows[name].fill_null(value).to_numpy() if name in rows.column_names else np.full(len(rows), value)


def _shape(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(json.loads(text))


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts numbers within a name as numbers."""
    return tuple((int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name) if part)


def _of_module(tensors: Mapping[str, FirstRow], module: str, place: str) -> FirstRow | None:
    """Its first input or output; any input that was given by keyword, if there is no other."""
    start = f"{module}.{place}"
    named = (name for name in tensors if name.startswith(f"{start}_") and "." not in name[len(start) :])
    return tensors.get(start) or tensors.get(f"{start}_0") or tensors.get(next(named, ""))


def _width(weight: FirstRow, taken: FirstRow | None) -> int | None:
    """The last dimension of a GEMM's input, 0 if the input is not known. None if shapes say that the module is no GEMM."""
    shape = weight.shape
    if shape is not None and len(shape) > 2:
        return None
    if taken is None or not taken.shape:
        return 0 if shape is not None and len(shape) == 2 else None
    width = taken.shape[-1]
    if shape is not None and len(shape) == 2:
        return width if width in shape else None
    return width if width and weight.elements > width and weight.elements % width == 0 else None


def _is_matrix(name: str, parameter: FirstRow) -> bool:
    """Whether a parameter has two dimensions, or three as the weights of experts do. Weights of convolutions are left out."""
    shape = parameter.shape or ()
    return len(shape) in ((2,) if name.endswith(".weight") else (2, 3)) and min(shape) > 1 and not name.endswith("bias")


def _sharing(
    embedding: str, weight: FirstRow, tensors: Mapping[str, FirstRow], weights: Mapping[str, FirstRow]
) -> Iterator[tuple[tuple[Any, ...], Gemm]]:
    """The heads that share the weight of an embedding: modules without a weight of their own and without modules inside."""
    for name, taken in tensors.items():
        module, _, place = name.rpartition(".")
        given = _of_module(tensors, module, "output")
        if place not in ("input", "input_0") or not module or f"{module}.weight" in weights or "int" in taken.dtype.lower():
            continue
        if given is None or not taken.shape or not given.shape:
            continue
        fits = (given.shape[-1], taken.shape[-1]) == weight.shape and given.shape[-1] != taken.shape[-1]
        if fits and _is_leaf(module, tensors):
            yield (*taken.place, *_natural(module)), Gemm(module, taken.shape[-1], embedding)


def _is_other(weight: FirstRow, taken: FirstRow | None, given: FirstRow | None) -> bool:
    """Whether a module takes integers, or shapes are those of an embedding, which adds a dimension, or of a norm over two."""
    if taken is not None and "int" in taken.dtype.lower():
        return True
    if given is None or not given.shape or taken is None or not taken.shape:
        return False
    is_norm = weight.shape == taken.shape[-2:] == given.shape[-2:] and len(set(weight.shape)) > 1
    return len(given.shape) > len(taken.shape) or is_norm


def _is_of_other(name: str, parameter: FirstRow, tensors: Mapping[str, FirstRow]) -> bool:
    """Whether a matrix under another name than ``weight`` is that of an embedding or norm without modules inside."""
    module = name.rpartition(".")[0]
    taken, given = (_of_module(tensors, module, place) for place in ("input", "output"))
    return _is_leaf(module, tensors) and _is_other(parameter, taken, given)


def _is_leaf(module: str, tensors: Mapping[str, FirstRow]) -> bool:
    """Whether no module inside a module has rows."""
    return not any("." in name[len(module) + 1 :] for name in tensors if name.startswith(f"{module}.") or not module)
