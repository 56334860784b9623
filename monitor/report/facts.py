"""What a report is made of: the rows of a merged set, read kind by kind, what ranks and events say, and what was not there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow.compute import call_function  # type: ignore[attr-defined]

from monitor.anomalies.ranking.loading import NothingReadError, folder_of
from monitor.anomalies.ranking.ranking import Ranking, ranking_of
from monitor.bars import Progress, silent
from monitor.coordinator.manifest_format import MANIFEST_FILE, ManifestError, ManifestRecord, read_manifest
from monitor.coordinator.series_file import read_columns
from monitor.merge.execution import MergeError
from monitor.merge.merge import Wanted, merge
from monitor.merge.report import ranges_of
from monitor.query.opened import Lacking, open_source, total_norms
from monitor.query.sources import MergedSet, NameFilter, QueryError, RankDirectories, RowChoice, in_order
from monitor.report.bands import Numbers
from monitor.report.history import WINDOW, Axis, Ints, KindHistory, RowTaker, SuddenBound, without_number
from monitor.series import CLIPPED_NORM, DIRECTION_KIND, GRAD_NORM, KIND_TABLE, KINDS, KINDS_OF_RANKS, REPLICA_KIND, RUN_KIND
from monitor.sinks.files import StepSpan
from monitor.stats.features import COLUMNS_OF

VALUE: Final = "value"
TOTAL_KIND: Final = "total_norm"
"""The norm over all tensors, computed from rows, as if it were a kind with one series."""
NORMS_OF: Final = "grad_reduced"
"""The kind whose rows give the total norm where the run has no ``GRAD_NORM``."""

SHOWN: Final = ("norm", "absmax", "std", "mean", "max", "min")
"""The op that a heat map shows: the first that was recorded."""
GLOBAL_NAME: Final = "global_name"
_PLACED: Final = ("vpp_stage", "stage", GLOBAL_NAME)
NOT_PICTURED: Final = ("replica",)
"""Kinds that are only compared."""
NOT_JUDGED: Final = (*NOT_PICTURED, DIRECTION_KIND)
"""Kinds that say nothing by themselves: a share of equal signs is finite, and any share may be healthy."""

MOST_BINS: Final = 2000
FEWEST_BINS: Final = 100
MOST_CELLS: Final = 20_000_000
"""Of all heat maps of tensors and steps together."""
MOST_KEPT: Final = 8_000_000
"""Cells of single ranks of a kind, kept for curves. Beyond that, the rows of some tensors are read again."""
MOST_EVENTS: Final = 50

MOST_ASKED: Final = 8
"""Directories whose series files are read."""
_REGULAR: Final = {kind.name for kind in KIND_TABLE if kind.warned}
_FIELDS: Final = {kind.name: kind.field for kind in KIND_TABLE}
"""Kinds with rows in each step."""
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
        of_one: Numbers of the series of tensors of one element. Of numbers of the run nothing is known.
    """

    source: MergedSet
    kind: str
    op: str = ""
    ops: tuple[str, ...] = ()
    series: list[tuple[int, str]] = field(default_factory=list)
    unseen: int = 0
    read: int = 0
    steps: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    of_one: set[int] = field(default_factory=set)
    _number: dict[tuple[int, str], int] = field(default_factory=dict)
    _known_as: dict[str, set[str]] = field(default_factory=dict)
    _has_stages: bool = False

    @property
    def names(self) -> list[str]:
        """Of each series, with its place if several places have the name."""
        places, what = Counter(name for _, name in self.series), "stage" if self._has_stages else ""
        return [f"{what}{place}:{name}" if places[name] > 1 else name for place, name in self.series]

    def name_of(self, step: int, rank: int, chunk: int, name: str) -> str:
        """The name in the whole model of what a rank calls ``name``, as in ``names``."""
        rows = self._read(range(step, step + 1), ("rank", *_PLACED), [name])
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
            first = self._read(range(spans[0].first, spans[0].last + 1), (*known, *others), None)
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
                rows = self._read(wanted, columns, self._known_by(names))
                if names is None and steps is None:
                    self._count(rows)
                if rows[self.op].null_count:
                    if names is None and steps is None:
                        self.unseen += self._without_value(wanted)
                    rows = rows.filter(rows[self.op].is_valid())
                self._feed(history, rows, wanted)
            progress(self.kind, done + 1, len(spans))

    def _count(self, rows: pa.Table) -> None:
        step = rows["step"].to_numpy()
        self.read += len(step)
        self.steps = np.append(self.steps, step[np.diff(step, prepend=step[:1] - 1) != 0])

    def last_rows(self, name: str, columns: Sequence[str], most: int) -> list[dict[str, Any]]:
        """Rows of a series, named as in ``names``, of about the last steps, in order of steps."""
        series = self.series[self.names.index(name)]
        found: list[dict[str, Any]] = []
        for span in reversed(self.spans):
            wanted = (*columns, *_PLACED)
            rows = self._read(range(span.first, span.last + 1), wanted, self._known_by([series[1]])).to_pylist()
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
        return without_number(self._read(steps, tuple(dict.fromkeys(("count", self.op, *own))), None), self.op, own)

    def _known_by(self, names: Sequence[str] | None) -> list[str] | None:
        """What ranks call the tensors with these names in the whole model."""
        return None if names is None else sorted({one for name in names for one in self._known_as.get(name, {name})})

    def _read(self, steps: range, columns: Sequence[str], names: Sequence[str] | None) -> pa.Table:
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
        if "count" in rows.column_names and self.kind != RUN_KIND:
            self.of_one.update(series[rows["count"].to_numpy() == 1].tolist())
        known = np.array(self.source.ranks)
        rank = rows["rank"].to_numpy()
        place = np.searchsorted(known, rank)
        micro_step = rows["micro_step"]
        micro = micro_step.fill_null(-1).to_numpy() if micro_step.null_count < len(rows) else np.full(len(rows), -1)
        history.add(rows["step"].to_numpy(), micro, series, place, rows[self.op].to_numpy().astype(np.float64, copy=False))

    def _numbered(self, rows: pa.Table, steps: range) -> Ints:
        """Of each row the number of its series. New series are numbered in order of execution."""
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
        rows = self._read(steps, (*_PLACED, "name", "call_id"), None)
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


@dataclass
class Facts:
    """What is known of a run.

    Attributes:
        told: The report of the merge.
        manifests: By rank; empty where the directories of ranks are not there.
        ranking: None if no events were found; ``why_not_ranked`` says why.
        kinds: In order of execution.
        others: Kinds of which no op is judged.
        measured: Kinds that ranks have recorded, as far as that is known.
        left_out: Number of steps that the first rank has recorded, and of which there are no rows.
        histories: Of each kind. ``run`` has the run's own numbers, and the total norm if only rows give it.
        no_total_norm: Why steps have no total norm, and how many have none.
        base: The directory that contains those of the ranks, if they are still there.
        totals: Steps, and total norms that only rows give.
        norms: By step, the total norms of gradients before and after clipping, where both were recorded.
    """

    source: MergedSet
    path: str
    told: Mapping[str, Any]
    manifests: Mapping[int, ManifestRecord]
    ranking: Ranking | None
    why_not_ranked: str
    axis: Axis
    kinds: dict[str, KindReader] = field(default_factory=dict)
    histories: dict[str, KindHistory] = field(default_factory=dict)
    no_total_norm: dict[str, int] = field(default_factory=dict)
    norms: dict[int, tuple[float, float]] = field(default_factory=dict)
    others: dict[str, KindReader] = field(default_factory=dict)
    measured: frozenset[str] = frozenset()
    left_out: int = 0
    base: Path = Path()
    totals: list[tuple[Ints, Numbers]] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        return self.source.ranks

    @property
    def first(self) -> Mapping[str, Any]:
        """The configuration of the first rank; empty if it is not known."""
        return self.manifests[min(self.manifests)].config if self.manifests else {}

    def shown_name(self, kind: str, name: str) -> str:
        """What the pictures call a tensor with this name in the whole model: the first, if several stages have it."""
        places = self.kinds[kind].places_of(name) if kind in self.kinds else []
        return self.kinds[kind].names[places[0]] if places else name

    def count(self, what: str) -> int:
        """Entries of a list of the merge's report."""
        number: int = self.told[what]["count"]
        return number


@contextmanager
def facts_of(
    path: str, job: str | None = None, events: Path | None = None, workers: int = 1, progress: Progress = silent
) -> Iterator[Facts]:
    """All facts about a run. Directories of ranks are merged into a temporary directory first.

    Args:
        path: As in ``open_run``.
        events: The directory that contains the directories of ranks, if ``path`` is a merged set elsewhere.

    Raises:
        QueryError, MergeError, OSError: The run cannot be read.
    """
    source = open_source(path, job)
    if isinstance(source, MergedSet):
        base = events or Path(path).absolute().parent
        yield _read(source, path, base, _manifests(base, source.told()), progress)
        return
    with TemporaryDirectory(prefix="trainermon-") as work:
        merged = Path(work) / "merged"
        known = _known(source)
        ordered = {one for manifest in known.values() for one in manifest.formats} & {"hdf5", "parquet"}
        # CSV has no order of calls but that of its rows, which HDF5 keeps.
        merge(
            Wanted(Path(path), merged, job, format="parquet" if ordered else "hdf5", workers=workers),
            partial(progress, "merging"),
        )
        opened = open_source(str(merged))
        assert isinstance(opened, MergedSet)
        yield _read(opened, path, events or Path(path), known, progress)


def _known(source: RankDirectories) -> Mapping[int, ManifestRecord]:
    return {rank: one for rank, one in source.manifest.items() if isinstance(one, ManifestRecord)}


def _manifests(base: Path, told: Mapping[str, Any]) -> Mapping[int, ManifestRecord]:
    """The manifests of the merged directories that are still there."""
    found: dict[int, ManifestRecord] = {}
    for name in told.get("directories", ()):
        with suppress(ManifestError, OSError):
            manifest = read_manifest(base / str(name) / MANIFEST_FILE)
            found[manifest.rank] = manifest
    return found


def _read(source: MergedSet, path: str, base: Path, manifests: Mapping[int, ManifestRecord], progress: Progress) -> Facts:
    told = source.told()
    ranking, why = _ranking(base, told, manifests)
    facts = Facts(source, path, told, manifests, ranking, why, _axis(told, 1), base=base)
    listed = [kind for kind in source.kinds(whole=False) if kind not in NOT_JUDGED]
    listed.sort(key=lambda kind: KINDS.index(kind) if kind in KINDS else -1)
    every = {kind: KindReader(source, kind) for kind in listed}
    for one in every.values():
        one.choose()
    facts.kinds = {kind: one for kind, one in every.items() if one.op}
    facts.others = {kind: one for kind, one in every.items() if not one.op}
    facts.axis = _axis(told, _series_about(facts))
    facts.measured, facts.left_out = _measured(base, told), _left_out(facts)
    for kind, rows in facts.kinds.items():
        bounds = MOST_KEPT, MOST_EVENTS, SuddenBound.of(kind), rows.of_one
        facts.histories[kind] = KindHistory(facts.axis, len(facts.ranks), *bounds)
        rows.feed(facts.histories[kind], progress=progress)
        _mark_differing(facts, kind, facts.histories[kind])
    _read_total_norm(facts)
    _read_clipping(facts)
    return facts


def _mark_differing(facts: Facts, kind: str, history: KindHistory) -> None:
    """Show where replicas differ. The one that differs may have no rows of the kind itself."""
    rows = facts.kinds[kind]
    for one in facts.told["disagreements"]["listed"]:
        if one["kind"] == kind and one["rank"] in facts.ranks:
            value = float(one["value"]) if one["op"] == rows.op else np.nan
            for series in rows.places_of(one["name"]):
                history.mark_differing(one["step"], series, facts.ranks.index(one["rank"]), value)
    for one in facts.told.get("bits", {"first": []})["first"]:
        for rank in (rank for rank in one["odd_ranks"] if one["kind"] == kind and rank in facts.ranks):
            for series in rows.places_of(one["name"]):
                history.mark_differing(one["step"], series, facts.ranks.index(rank), np.nan)


def _series_about(facts: Facts) -> int:
    """The number of all series, from the rows of the first step of each kind."""
    count = 0
    for rows in facts.kinds.values():
        first = rows.spans[0]
        read = rows._read(range(first.first, first.first + 1), ("name",), None)
        count += len(read["name"].unique())
    return count


def _measured(base: Path, told: Mapping[str, Any]) -> frozenset[str]:
    """The kinds that some of the merged directories have rows of, by their series files."""
    found: set[str] = set()
    for name in told["directories"][:MOST_ASKED]:
        with suppress(ManifestError, OSError):
            columns = read_columns(base / name, read_manifest(base / name / MANIFEST_FILE))
            if columns is not None:
                found |= {columns.kinds[kind] for kind, layout in zip(columns.kind, columns.layout, strict=True) if layout >= 0}
    return frozenset(found - {REPLICA_KIND})


def _left_out(facts: Facts) -> int:
    if not facts.manifests:
        return 0
    recorded = facts.manifests[min(facts.manifests)].steps.written.ranges
    written = [np.zeros(0, np.int64), *(np.arange(first, last + 1, interval) for first, last, interval in recorded)]
    return len(np.setdiff1d(np.concatenate(written), facts.axis.steps))


def ended_early(facts: Facts) -> dict[str, int]:
    """The kinds of which no rank has rows at the last steps, and of each the last step with rows."""
    last = {kind: rows.spans[-1].last for kind, rows in {**facts.kinds, **facts.others}.items() if kind in _REGULAR}
    return {kind: step for kind, step in last.items() if (_regular_steps(facts, kind) > step).sum() >= 2}


def lacking_steps(facts: Facts) -> dict[str, Ints]:
    """The kinds of which no rank has rows at some steps, and has some before and after them."""
    read = {kind: rows.steps for kind, rows in facts.kinds.items() if kind in _REGULAR and len(rows.steps)}
    due = {kind: _regular_steps(facts, kind) for kind in read}
    lacking = {kind: np.setdiff1d(due[kind][(due[kind] > of[0]) & (due[kind] < of[-1])], of) for kind, of in read.items()}
    return {kind: of for kind, of in lacking.items() if len(of)}


def _regular_steps(facts: Facts, kind: str) -> Ints:
    """Recorded steps in which the optimizer stepped, and in which ``intervals`` ask for the kind.

    If the configuration was changed while the run recorded, the steps of a kind with an interval are not known, and there are
    none.
    """
    ranges = ranges_of(facts.told["steps"]), ranges_of(facts.told["skipped_steps"])
    every, skipped = ([np.arange(one.start, one.stop, one.step) for one in each] for each in ranges)
    steps: Ints = np.setdiff1d(np.concatenate(every), np.concatenate([np.zeros(0, np.int64), *skipped]))
    asked = {"start_step": 0, "step_interval": 1, "intervals": {}, **facts.first}
    interval = asked["intervals"].get(_FIELDS.get(kind, ""), 1)
    if interval == 1:
        return steps
    changed = any(one.configurations for one in facts.manifests.values())
    return steps[:0] if changed else steps[(steps - asked["start_step"]) % (asked["step_interval"] * interval) == 0]


def _axis(told: Mapping[str, Any], series: int) -> Axis:
    """Recorded steps, and steps that are known to be missing."""
    known = [*ranges_of(told["steps"]), *(each for one in told["dropped"]["listed"] for each in ranges_of(one["steps"]))]
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *(np.arange(one.start, one.stop, one.step) for one in known)]))
    most = max(FEWEST_BINS, min(MOST_BINS, MOST_CELLS // max(series, 1)))
    return Axis(steps, max(min(len(steps), most), 1))


def _ranking(base: Path, told: Mapping[str, Any], manifests: Mapping[int, ManifestRecord]) -> tuple[Ranking | None, str]:
    try:
        ranking = ranking_of(folder_of(base), MOST_EVENTS)
    except (NothingReadError, MergeError, OSError) as error:
        return None, str(error).partition("\n")[0]
    known = {str(told["job_id"]), *(one.job_id for one in manifests.values())}
    known |= {str(one["continued"]) for one in told.get("joints", {}).get("listed", ())}
    if not any(one.events.judged.job_id in known for one in ranking.job.members):
        return None, f"the events in {base} are of another job."
    return ranking, ""


def _read_total_norm(facts: Facts) -> None:
    """The total norm of each step from the rows of whole tensors, if the run does not have it."""
    own = facts.kinds.get(RUN_KIND)
    if (own is not None and (0, GRAD_NORM) in own.series) or NORMS_OF not in facts.source.kinds(whole=True):
        return
    history = KindHistory(facts.axis, len(facts.ranks), MOST_KEPT, MOST_EVENTS)
    lacking = replace(Lacking.of(facts.told, NORMS_OF), dropped=[])
    for span in spans_of(facts.source, NORMS_OF):
        wanted = ("step", "micro_step", "term", "norm")
        choice = RowChoice(NORMS_OF, whole=True, steps=range(span.first, span.last + 1), columns=wanted)
        try:
            found = total_norms(facts.source.rows(choice), lacking)
        except QueryError:
            return  # there are no norms
        for reason in filter(None, found["missing"].to_pylist()):
            facts.no_total_norm[reason] = facts.no_total_norm.get(reason, 0) + 1
        found = found.filter(found["total_norm"].is_valid())
        none = np.zeros(len(found), np.int64)
        facts.totals.append((found["step"].to_numpy(), found["total_norm"].to_numpy()))
        history.add(facts.totals[-1][0], none - 1, none, none, facts.totals[-1][1])
    if len(history.pair_series):
        facts.kinds[TOTAL_KIND] = KindReader(facts.source, TOTAL_KIND, "norm", series=[(0, f"total norm of {NORMS_OF}")])
        facts.histories[TOTAL_KIND] = history


def _read_clipping(facts: Facts) -> None:
    own = facts.kinds.get(RUN_KIND)
    if own is None or not {(0, GRAD_NORM), (0, CLIPPED_NORM)} <= set(own.series):
        return
    for span in own.spans:
        names = NameFilter([GRAD_NORM, CLIPPED_NORM])
        wanted = RowChoice(RUN_KIND, names=names, steps=range(span.first, span.last + 1), columns=("name", "step", VALUE))
        found: dict[str, dict[int, float]] = {GRAD_NORM: {}, CLIPPED_NORM: {}}
        for row in in_order([facts.source.rows(wanted)]).to_pylist():
            found[row["name"]][row["step"]] = row[VALUE]
        norm, after = found[GRAD_NORM], found[CLIPPED_NORM]
        facts.norms |= {step: (norm[step], after[step]) for step in norm if step in after}


def at_step(facts: Facts, kind: str, step: int) -> KindHistory:
    """The cells of all ranks at one step, in the only column of ``cells``: its rows are judged by those of the steps before."""
    history = KindHistory(facts.axis, len(facts.ranks))
    steps = facts.axis.steps
    before = steps[max(int(np.searchsorted(steps, step)) - WINDOW, 0)]
    if before < step:
        facts.kinds[kind].feed(history, range(int(before), step))
    history.keep_from(Axis(np.array([step]), 1))
    facts.kinds[kind].feed(history, range(step, step + 1))
    _mark_differing(facts, kind, history)
    return history


def of_series(facts: Facts, kind: str, names: Sequence[str]) -> KindHistory:
    """All rows of some series of a kind, judged once more, with the cells and values of each rank."""
    history = KindHistory(facts.axis, len(facts.ranks))
    history.keep_from(facts.axis)
    facts.kinds[kind].feed(history, None, names)
    _mark_differing(facts, kind, history)
    return history
