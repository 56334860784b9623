"""The newest rows of a running job: the run's own numbers, and the tensors that are most unusual."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from monitor.merge.execution import MergeError
from monitor.query.sources import QueryError, RankDirectories, RowChoice
from monitor.report.facts import NOT_JUDGED
from monitor.report.history import FEW, INFINITE, WINDOW, Axis, Exempt, Ints, KindHistory, SuddenBound, most_unusual
from monitor.report.kind_reader import NOT_FINITE, judged_ops, shows_all, without_masks
from monitor.series import RUN_KIND
from monitor.sinks.spool import PART

MOST_RANKS: Final = 16
"""Whose rows are read, evenly chosen."""

COUNTS: Final = {"nans": float("nan"), "infs": float("inf")}
"""Ops that count elements which are not finite, used where no other op is judged, and what such an element is."""

MOST_UNUSUAL: Final = 5
NOTABLE: Final = 8.0
"""Deviations from which on a tensor is listed. In healthy runs of hundreds of tensors some always have six."""

NOW_STEPS: Final = 10
"""For how many steps a tensor that was unusual stays in the list."""


@dataclass(frozen=True)
class Unusual:
    """A tensor whose newest values are far from its own history.

    Attributes:
        deviations: Robust standard deviations of the logarithm; None if the value is not finite.
        typical: The median of the values before.
    """

    kind: str
    name: str
    op: str
    rank: int
    step: int
    value: float | None
    typical: float | None
    deviations: float | None


@dataclass(frozen=True)
class Number:
    """One of the run's own numbers: its newest step, the mean over the ranks that have it there, and how many these are."""

    step: int
    value: float
    ranks: int


@dataclass
class _Kind:
    """The rows of a kind that were read so far.

    Attributes:
        beside: Ops that show elements which are not finite, and which ``op`` does not show.
        last: By rank, the last step. Ranks write at different times, and the files of a record one after the other.
        steps: Those that were added last.
        number: Of each series in the history, by chunk and name, in order.
        of_few: The numbers of tensors of ``FEW`` elements, which the history knows, too.
    """

    history: KindHistory
    op: str
    beside: tuple[str, ...] = ()
    last: dict[int, int] = field(default_factory=dict)
    steps: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    number: dict[tuple[int, str], int] = field(default_factory=dict)
    of_few: set[int] = field(default_factory=set)

    def news(self, rows: pa.Table) -> pa.Table:
        """The rows that were not there at the last look."""
        rank, step = rows["rank"].to_numpy(), rows["step"].to_numpy()
        ranks, places = np.unique(rank, return_inverse=True)
        found = rows.filter(pa.array(step > np.array([self.last.get(one, -1) for one in ranks.tolist()])[places]))
        for one in ranks.tolist():
            self.last[one] = max(self.last.get(one, -1), int(step[rank == one].max()))
        return found

    def add(self, rows: pa.Table, ranks: Sequence[int]) -> None:
        """Take rows in order of steps, and forget how unusual those before were."""
        chunk, name = rows["vpp_stage"].fill_null(0).to_pylist(), rows["name"].to_pylist()
        series = [self.number.setdefault(one, len(self.number)) for one in zip(chunk, name, strict=True)]
        step, micro_step = rows["step"].to_numpy(), rows["micro_step"].fill_null(-1).to_numpy()
        count = rows["count"].fill_null(0).to_numpy()
        self.of_few.update(np.array(series)[(count > 0) & (count <= FEW)].tolist())
        rank = np.searchsorted(np.array(ranks), rows["rank"].to_numpy())
        self.forget()
        self.steps = np.unique(step)
        self.history.keep_from(Axis(self.steps, len(self.steps)))
        values = np.ones(len(rows)) if self.op in COUNTS else rows[self.op].to_numpy().astype(np.float64)
        for one in (self.op, *self.beside):  # an element that is counted would show in the ops that were not recorded
            seen = rows[one].fill_null(0).to_numpy().astype(np.float64)
            values = np.where(seen > 0, COUNTS[one], values) if one in COUNTS else np.where(np.isfinite(seen), values, seen)
        self.history.add(step, micro_step, np.array(series), rank, values)

    def forget(self) -> None:
        """Forget how unusual the rows were."""
        self.history.deviations[:] = -1
        if self.history.cells is not None:
            self.history.cells[:] = 0


def _is_growing(path: str) -> bool:
    """Whether it is a file of CSV that the job still writes. Its rows are read when it is complete."""
    return path.endswith(PART)


class RowsNow:
    """Reads the newest rows of some ranks.

    Attributes:
        numbers, unusual: As in ``Look``, of the last steps.
        newest: The last step that was read; -1: none.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._job = ""
        self._begin([])

    def _begin(self, ranks: list[int]) -> None:
        self.ranks, self.newest = ranks, -1
        self.numbers: dict[str, Number] = {}
        self.unusual: list[Unusual] = []
        self._recent: list[Unusual] = []
        self.notes: list[str] = []
        self._kinds: dict[str, _Kind] = {}
        self._has_news = False

    def read(self, job: str, ranks: Sequence[int], newest: int) -> None:
        """Read what is new in the last ``WINDOW`` steps."""
        # The last rank is among them: it is the one that has the loss of a pipeline.
        chosen = sorted({ranks[place * (len(ranks) - 1) // (MOST_RANKS - 1)] for place in range(MOST_RANKS)})
        if (job, chosen) != (self._job, self.ranks):
            self._job = job
            self._begin(chosen)
        steps = range(max(newest - WINDOW, 0), newest + 1)
        self.notes, self._has_news = [], False
        try:
            source = RankDirectories(self._base, job)
            for kind in source.kinds(whole=False):
                if kind not in NOT_JUDGED:
                    self._read_kind(source, kind, steps)
        except (MergeError, QueryError, OSError, pa.ArrowException) as error:
            self.notes = [f"rows could not be read: {str(error).partition(chr(10))[0]}"]
            return
        aside = [Path(one.path).name + f" was not read: {one.reason}" for one in source.set_aside if not _is_growing(one.path)]
        self.notes += aside[:3]
        if self._has_news:
            self._note_unusual()

    def _read_kind(self, source: RankDirectories, kind: str, steps: range) -> None:
        columns = ("rank", "step", "micro_step", "vpp_stage", "name", "count")
        choice = RowChoice(kind, steps=steps, ranks=frozenset(self.ranks), columns=columns)
        if kind in self._kinds:
            op = self._kinds[kind].op
            rows = source.rows(replace(choice, columns=(*columns, op, *self._kinds[kind].beside)))
        else:
            recorded = source.scan(choice).kept.ops
            ops = list(dict.fromkeys([*judged_ops(kind, recorded), *(one for one in NOT_FINITE if one in recorded)]))
            rows = source.rows(replace(choice, columns=(*columns, *ops)))
            op = next((one for one in ops if rows[one].null_count < len(rows)), "")
        there, rows = len(rows), without_masks(source, choice, rows, op) if op else rows.slice(0, 0)
        rows = rows.filter(rows[op].is_valid()) if op else rows
        if not len(rows):
            self.notes += [f"rows of {kind} have no {op or 'op that is judged'}"] if there else []
            return
        self.newest = max(self.newest, int(rows["step"].to_numpy().max()))
        if kind == RUN_KIND:
            self._note_numbers(rows, op)
            return
        if kind not in self._kinds:
            more = [one for one in ops if one in NOT_FINITE and one != op and rows[one].null_count < len(rows)]
            beside = () if shows_all(kind, [op]) else tuple(more)
            of_few: set[int] = set()
            history = KindHistory(Axis(np.arange(1), 1), len(self.ranks), bound=SuddenBound.of(kind), exempt=Exempt(of_few))
            self._kinds[kind] = _Kind(history, op, beside, of_few=of_few)
        read = self._kinds[kind]
        if not shows_all(kind, (op, *read.beside)):
            self.notes.append(f"NaN and infinity in {kind}: {', '.join((op, *read.beside))} does not show all")
        if len(news := read.news(rows)):
            self._has_news = True
            read.add(news, self.ranks)
        else:
            read.forget()

    def _note_numbers(self, rows: pa.Table, op: str) -> None:
        """Args: rows: In order of steps."""
        newest: dict[str, tuple[int, list[float]]] = {}
        for row in rows.select(["name", "step", op]).to_pylist():
            if row["name"] not in newest or newest[row["name"]][0] < row["step"]:
                newest[row["name"]] = row["step"], []
            newest[row["name"]][1].append(row[op])
        self.numbers |= {name: Number(step, sum(values) / len(values), len(values)) for name, (step, values) in newest.items()}

    def _note_unusual(self) -> None:
        kinds = list(self._kinds.items())
        found = [one for kind, read in kinds for one in self._not_finite(kind, read)]
        histories = [read.history for _, read in kinds]
        for number, pair in most_unusual(histories, MOST_UNUSUAL):
            kind, read = kinds[number]
            of = read.history
            numbers = (float(of.value[pair]), float(of.typical[pair]), float(of.deviations[pair]))
            if numbers[2] >= NOTABLE:
                found.append(self._unusual(kind, read, pair, int(of.at[pair]), *numbers))
        there = {(one.kind, one.name, one.rank) for one in found}
        late = [one for one in self._recent if one.step > self.newest - NOW_STEPS]
        found += [one for one in late if (one.kind, one.name, one.rank) not in there]
        found.sort(key=lambda one: (one.deviations is not None, -(one.deviations or 0.0), one.step))
        self._recent, self.unusual = found[: MOST_UNUSUAL**2], found[:MOST_UNUSUAL]

    def _not_finite(self, kind: str, read: _Kind) -> Iterable[Unusual]:
        cells, values = read.history.cells, read.history.values
        if cells is None or values is None:
            return
        for pair in np.flatnonzero(cells.max(axis=1, initial=0) >= INFINITE)[:MOST_UNUSUAL].tolist():
            column = int((cells[pair] >= INFINITE).argmax())
            yield self._unusual(kind, read, pair, int(read.steps[column]), float(values[pair, column]), None, None)

    def _unusual(
        self, kind: str, read: _Kind, pair: int, step: int, value: float, typical: float | None, deviations: float | None
    ) -> Unusual:
        chunk, name = list(read.number)[int(read.history.pair_series[pair])]
        rank = self.ranks[int(read.history.pair_rank[pair])]
        return Unusual(kind, f"{chunk}:{name}" if chunk else name, read.op, rank, step, value, typical, deviations)
