"""Reads the rows of one kind in order of steps, and says which of their columns are judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.anomalies.overflows import SCALED_KINDS, SCALED_NUMBERS
from monitor.bars import Progress, silent
from monitor.query.sources import MergedSet, NameFilter, RankDirectories, RowChoice
from monitor.report.history import FEW, Flags, Ints, RowTaker, without_number
from monitor.series import KIND_TABLE, KINDS_OF_RANKS, RUN_KIND, is_input
from monitor.sinks.files import StepSpan
from monitor.stats.features import COLUMNS_OF

VALUE: Final = "value"
SHOWN: Final = ("norm", "absmax", "std", "mean", "max", "min")
"""The op that a heat map shows: the first that was recorded."""
GLOBAL_NAME: Final = "global_name"
_PLACED: Final = ("vpp_stage", "stage", GLOBAL_NAME)
_BACKWARD: Final = {kind.name for kind in KIND_TABLE if kind.phase == "backward"}


def spans_of(source: MergedSet, kind: str) -> list[StepSpan]:
    """The steps of each file with rows of ranks of a kind, in order. No step is in two files."""
    return next(([one.steps for one in shards] for _, shards in source.recorded([kind])), [])


def judged_ops(kind: str, columns: Collection[str]) -> list[str]:
    """The columns of a kind that are judged and shown if they have a value, the best first."""
    return [one for one in (*COLUMNS_OF.get(kind, ()), VALUE, *SHOWN) if one in columns]


_SHOWS_ALL: Final = ("norm", "absmax", "std", "mean")
"""Ops that are not finite if an element is not."""
NOT_FINITE: Final = ("min", "max", "nans", "infs")
"""Ops that show some of these elements: ``max`` shows no minus infinity, and ``min`` no infinity."""


OF_MASKS: Final = ("min", "max", "nans")
"""Ops that show whether an input is an additive mask."""


def are_masks(rows: pa.Table, named: str) -> Flags:
    """Which rows of activations are masks that are added to scores, as the alert rules know them: inputs without NaN whose
    greatest element is 0 and whose least one is -Inf.

    Args:
        named: The column of names.
    """
    least, most, nans = (rows[one].fill_null(np.nan).to_numpy() for one in OF_MASKS)
    found: Flags = (least == -np.inf) & (most == 0) & (nans == 0)
    for row in np.flatnonzero(found).tolist():
        found[row] = is_input(rows[named][row].as_py())
    return found


def without_masks(source: RankDirectories, choice: RowChoice, rows: pa.Table, op: str) -> pa.Table:
    """Leave out masks of rows that were just read, if no more rows have come since.

    Args:
        choice: What was read.
        op: The column that is judged.
    """
    infinite = choice.kind == "actv" and np.isinf(rows[op].fill_null(0).to_numpy()).any()
    if not infinite or not {*OF_MASKS} <= {*source.scan(choice).kept.ops}:
        return rows
    again = source.rows(replace(choice, columns=("name", *OF_MASKS)))
    return rows.filter(pa.array(~are_masks(again, "name"))) if len(again) == len(rows) else rows


def shows_all(kind: str, ops: Collection[str]) -> bool:
    """Whether ops of a kind show every NaN and infinity among the elements."""
    together = {"min", "max"} <= {*ops} or {"nans", "infs"} <= {*ops}
    return together or bool(COLUMNS_OF.get(kind)) or not {*_SHOWS_ALL}.isdisjoint(ops)


@dataclass
class KindReader:
    """The rows of a kind, read in order of steps. Names are those of the whole model, also where a pipeline's ranks count anew.

    Attributes:
        op: The column that is judged and shown.
        ops: All columns with a value in the first rows.
        series: Place and name of each series, in order of execution. The place is that of its stage in the pipeline, or the
            number of the model chunk if there is no pipeline.
        unseen: Number of rows of elements without a value of ``op``.
        read: Number of all rows.
        steps: Steps of which a rank has rows, ascending.
        of_few: Numbers of the series that may come near zero: those of tensors of ``FEW`` elements, and numbers of the run that
            were below it.
        scaled: Numbers of the series that a loss scale multiplies.
        masks: Number of rows of additive masks. They are not judged: -Inf is no fault there.
    """

    source: MergedSet
    kind: str
    op: str = ""
    ops: tuple[str, ...] = ()
    series: list[tuple[int, str]] = field(default_factory=list)
    unseen: int = 0
    read: int = 0
    steps: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    of_few: set[int] = field(default_factory=set)
    scaled: set[int] = field(default_factory=set)
    masks: int = 0
    _number: dict[tuple[int, str], int] = field(default_factory=dict)
    _known_as: dict[str, set[str]] = field(default_factory=dict)
    _has_stages: bool = False

    @cached_property
    def names(self) -> list[str]:
        """The name of each series, with its place if several places have the name."""
        places, what = Counter(name for _, name in self.series), "stage" if self._has_stages else ""
        return [f"{what}{place}:{name}" if places[name] > 1 else name for place, name in self.series]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of the series of each of ``names``."""
        return {name: number for number, name in enumerate(self.names)}

    def name_of(self, step: int, rank: int, chunk: int, name: str) -> str:
        """The name in the whole model of what a rank calls ``name``, as in ``names``."""
        rows = self.rows_at(range(step, step + 1), ("rank", *_PLACED), [name])
        of = [one for one in rows.to_pylist() if one["rank"] == rank]
        found = ((self._place(one), one[GLOBAL_NAME]) for one in of if (one["vpp_stage"] or 0) == chunk)
        number = self._number.get(next(found, (chunk, name)))
        return name if number is None else self.names[number]

    def places_of(self, name: str) -> list[int]:
        """The numbers of the series of a name in the whole model."""
        return [number for number, (_, one) in enumerate(self.series) if one == name]

    @cached_property
    def spans(self) -> list[StepSpan]:
        """The steps of each file, in order. No step is in two files."""
        return spans_of(self.source, self.kind)

    @cached_property
    def columns(self) -> list[str]:
        first = self.spans[0].first
        return list(self.source.rows(RowChoice(self.kind, steps=range(first, first + 1))).column_names)

    def choose(self) -> None:
        """Choose the op. It stays empty if the kind has no number."""
        columns, spans = self.columns, self.spans
        known = judged_ops(self.kind, columns)
        others = [one for one in columns[columns.index("count") + 1 if "count" in columns else 0 :] if one not in known]
        if spans:
            first = self.rows_at(range(spans[0].first, spans[0].last + 1), (*known, *others), None)
            self.ops = tuple(one for one in (*known, *others) if len(first) and first[one].null_count < len(first))
        self.op = next((one for one in known if one in self.ops), "")

    def feed(
        self,
        history: RowTaker,
        steps: range | None = None,
        names: Sequence[str] | None = None,
        progress: Progress = silent,
    ) -> None:
        """Read rows into a history. All files are read, one at a time, if nothing is chosen."""
        spans = self.spans
        count = {"count"}.intersection(self.columns) - {self.op} if spans else ()
        columns = ("rank", "step", "micro_step", *_PLACED, self.op, *count)
        for done, span in enumerate(spans):
            first, end = (steps.start, steps.stop) if steps else (span.first, span.last + 1)
            wanted = range(max(span.first, first), min(span.last + 1, end))
            if wanted:
                rows = self.rows_at(wanted, columns, self._known_by(names))
                masked = self._masked(rows, wanted, names)
                if names is None and steps is None:
                    self._count(rows)
                    self.masks += int(masked.sum())
                rows = rows.filter(pa.array(~masked)) if masked.any() else rows
                if rows[self.op].null_count:
                    if names is None and steps is None:
                        self.unseen += self._without_value(wanted)
                    rows = rows.filter(rows[self.op].is_valid())
                self._feed(history, rows, wanted)
            progress(self.kind, done + 1, len(spans))

    def _masked(self, rows: pa.Table, steps: range, names: Sequence[str] | None) -> Flags:
        """Which of these rows are additive masks."""
        known = {*OF_MASKS} <= {*self.columns}
        if self.kind != "actv" or not known or not np.isinf(rows[self.op].fill_null(0).to_numpy()).any():
            return np.zeros(len(rows), np.bool_)
        return are_masks(self.rows_at(steps, (GLOBAL_NAME, *OF_MASKS), self._known_by(names)), GLOBAL_NAME)

    def _count(self, rows: pa.Table) -> None:
        step = rows["step"].to_numpy()
        self.read += len(step)
        self.steps = np.append(self.steps, step[np.diff(step, prepend=step[:1] - 1) != 0])

    def last_rows(self, name: str, columns: Sequence[str], most: int) -> list[dict[str, Any]]:
        """Rows of a series, named as in ``names``, of about the last steps, in order of steps."""
        series = self.series[self.numbers[name]]
        found: list[dict[str, Any]] = []
        for span in reversed(self.spans):
            wanted = (*columns, *_PLACED)
            rows = self.rows_at(range(span.first, span.last + 1), wanted, self._known_by([series[1]])).to_pylist()
            found = [one for one in rows if (self._place(one), one[GLOBAL_NAME]) == series] + found
            if len({one["step"] for one in found}) >= most:
                break
        return found

    def _place(self, row: Mapping[str, Any]) -> int:
        """The place of a row's series. Numbers of the run are those of all ranks alike."""
        stage = None if self.kind in KINDS_OF_RANKS else row["stage"]
        return int(row["vpp_stage"] or 0) if stage is None else int(stage)

    def _places(self, rows: pa.Table) -> Ints:
        """The same for a table."""
        chunk: Ints = rows["vpp_stage"].fill_null(0).to_numpy()
        if self.kind in KINDS_OF_RANKS or rows["stage"].null_count == len(rows):
            return chunk
        self._has_stages = True
        stage: Ints = rows["stage"].fill_null(-1).to_numpy()
        return np.where(stage < 0, chunk, stage)

    def _without_value(self, steps: range) -> int:
        """Rows of elements without a value of ``op``."""
        if "count" not in self.columns:
            return 0
        own = [name for name in COLUMNS_OF.get(self.kind, ()) if name in self.columns]
        return without_number(self.rows_at(steps, tuple(dict.fromkeys(("count", self.op, *own))), None), self.op, own)

    def _known_by(self, names: Sequence[str] | None) -> list[str] | None:
        """What ranks call the tensors with these names in the whole model."""
        return None if names is None else sorted({one for name in names for one in self._known_as.get(name, {name})})

    def rows_at(self, steps: range, columns: Sequence[str], names: Sequence[str] | None) -> pa.Table:
        """The rows of some steps, in these columns; ``names`` are those that ranks use, None for all."""
        chosen = None if names is None else NameFilter(names)
        choice = RowChoice(self.kind, names=chosen, steps=steps, columns=tuple(columns))
        rows = self.source.scan(choice).read()[0]
        if GLOBAL_NAME in columns and rows[GLOBAL_NAME].null_count:  # no manifest knows these series
            rows = self.source.scan(replace(choice, columns=tuple(dict.fromkeys([*columns, "name"])))).read()[0]
            known, own = (rows[one].cast(pa.string()) for one in (GLOBAL_NAME, "name"))
            named = call_function("coalesce", [known, own]).dictionary_encode()
            rows = rows.set_column(rows.column_names.index(GLOBAL_NAME), GLOBAL_NAME, named)
        return rows

    def _feed(self, history: RowTaker, rows: pa.Table, steps: range) -> None:
        if not len(rows):
            return
        series = self._numbered(rows, steps)
        values = rows[self.op].to_numpy().astype(np.float64, copy=False)
        if self.kind in SCALED_KINDS:
            self.scaled.update(range(len(self.series)))
        if self.kind == RUN_KIND:
            self.scaled.update(number for number, (_, name) in enumerate(self.series) if name in SCALED_NUMBERS)
            self.of_few.update(series[values < 0].tolist())
        elif "count" in rows.column_names:
            self.of_few.update(series[rows["count"].to_numpy() <= FEW].tolist())
        known = np.array(self.source.ranks)
        rank = rows["rank"].to_numpy()
        place = np.searchsorted(known, rank)
        micro_step = rows["micro_step"]
        micro = micro_step.fill_null(-1).to_numpy() if micro_step.null_count < len(rows) else np.full(len(rows), -1)
        history.add(rows["step"].to_numpy(), micro, series, place, values)

    def _numbered(self, rows: pa.Table, steps: range) -> Ints:
        """The number of the series of each row. New series are numbered in order of execution."""
        for derived in ("names", "numbers"):  # of the series so far
            self.__dict__.pop(derived, None)
        names = rows[GLOBAL_NAME].combine_chunks()
        chunk = self._places(rows)
        chunks = int(chunk.max()) + 1
        code = names.indices.to_numpy().astype(np.int64)
        code = code * chunks + chunk if chunks > 1 else code
        texts = names.dictionary.to_pylist()
        used = np.flatnonzero(np.bincount(code, minlength=1)).tolist()
        found = {one: (one % chunks, texts[one // chunks]) for one in used}
        new = [one for one in found.values() if one not in self._number]
        if new:
            if new == sorted(new):  # the file stands in order of names, or they are in order anyway
                new.sort(key=lambda one: _in_words(one[1]))
            for one in sorted(new, key=self._order(steps)):
                self._number[one] = len(self.series)
                self.series.append(one)
        numbers = np.zeros(max(used) + 1, np.int64)
        numbers[used] = [self._number[found[one]] for one in used]
        found_numbers: Ints = numbers[code]
        return found_numbers

    def _order(self, steps: range) -> Callable[[tuple[int, str]], tuple[int, int]]:
        """Sorts series by their stage of the pipeline and the first call of any rank, as far as that is known."""
        rows = self.rows_at(steps, (*_PLACED, "name", "call_id"), None)
        for one in ("name", GLOBAL_NAME):
            rows = rows.set_column(rows.column_names.index(one), one, rows[one].cast(pa.string()))
        found = rows.group_by(["name", GLOBAL_NAME, "vpp_stage", "stage"]).aggregate([("call_id", "min")]).to_pylist()
        way = -1 if self.kind in _BACKWARD else 1
        first: dict[tuple[int, str], tuple[int, int]] = {}
        for one in found:
            self._known_as.setdefault(one[GLOBAL_NAME], set()).add(one["name"])
            series, place = (self._place(one), one[GLOBAL_NAME]), (way * (one["stage"] or 0), one["call_id_min"] or 0)
            first[series] = min(place, first.get(series, place))
        return lambda one: first.get(one, (0, 0))


def _in_words(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 2 before layer 10."""
    return [(int(one), "") if one.isdecimal() else (-1, one) for one in re.split(r"([0-9]{1,18})", name)]
