"""Which rows of a run are asked for, and how they are read: from a merged set, or from the directories of ranks."""

from __future__ import annotations

import json
import re
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property, partial
from os import stat
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, NamedTuple
from weakref import finalize

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.parquet import ParquetFile

from monitor.merge import execution, merge
from monitor.merge.combine import per_rank_rows
from monitor.merge.discovery import SetAside, choose, discover, runs_of, unmerged_formats, without_manifests
from monitor.merge.finished import Folder
from monitor.merge.outputs import FILE_NAME, GLOBAL, PER_RANK, columns_of, read_merged
from monitor.merge.report import Report, cut, ranges_of, steps_in, summary
from monitor.merge.rows import Source, Told, gathered, read
from monitor.merge.tables import Columns, Shard, Texts, order_by, read_file, starts_of_runs
from monitor.merge.tensors import Catalogue
from monitor.series import KINDS_OF_RANKS
from monitor.sinks.arrow import TEXT
from monitor.sinks.files import ALL_STEPS, StepSpan


class QueryError(ValueError):
    """The run cannot be opened, or the question cannot be answered. The message says why, and what there is."""


# --- Which rows are asked for.

ALL: Final = range(2**63 - 1)
"""Every step."""

Flags = NDArray[np.bool_]

_SPECIAL: Final = re.compile(r"[*?\[]")
_LAST_CHARACTER: Final = "\U0010ffff"


class NameFilter:
    """Names of tensors: each given text is a name, or a glob if it contains ``*``, ``?`` or ``[``."""

    def __init__(self, given: Iterable[str]) -> None:
        self.given = tuple(dict.fromkeys(given))
        globs = [one for one in self.given if _SPECIAL.search(one)]
        self._globs = re.compile("|".join(map(translate, globs))) if globs else None
        self._bounds = [_bounds(one) for one in self.given]

    def matches(self, name: str) -> bool:
        return name in self.given or (self._globs is not None and self._globs.match(name) is not None)

    @property
    def bounds(self) -> tuple[str, str]:
        """The least and the greatest name that may match."""
        return min(low for low, _ in self._bounds), max(high for _, high in self._bounds)

    def meets(self, first: str, last: str) -> bool:
        """Whether a name from ``first`` to ``last``, in the order of code points, may match."""
        return any(low <= last and first <= high for low, high in self._bounds)

    def rows(self, names: pa.ChunkedArray) -> Flags:
        """Whether the name of each row matches."""
        found = [np.zeros(0, dtype=np.bool_)]
        for chunk in names.chunks:
            column = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
            there = [one is not None and self.matches(one) for one in column.dictionary.to_pylist()]
            indices = column.indices.fill_null(len(there)) if column.null_count else column.indices
            found.append(np.array([*there, False])[indices.to_numpy()])
        flags: Flags = np.concatenate(found)
        return flags


def _bounds(given: str) -> tuple[str, str]:
    """The least and the greatest name that it may match."""
    special = _SPECIAL.search(given)
    return (given, given) if special is None else (given[: special.start()], given[: special.start()] + _LAST_CHARACTER)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Some of the rows of a kind.

    Attributes:
        whole: Rows of whole tensors, as in ``global`` of a merged set; otherwise rows of ranks, as in ``per_rank``.
        steps: Not empty.
        names, ranks, columns: None: all.
    """

    kind: str
    whole: bool = False
    names: NameFilter | None = None
    steps: range = ALL
    ranks: frozenset[int] | None = None
    columns: tuple[str, ...] | None = None

    @property
    def span(self) -> StepSpan:
        return StepSpan(self.steps[0], self.steps[-1])

    @property
    def constrained(self) -> list[str]:
        """The columns that rows are chosen by."""
        chosen = {"name": self.names is not None, "step": self.steps != ALL, "rank": self.ranks is not None}
        return [name for name, is_chosen in chosen.items() if is_chosen]

    def read_columns(self, known: Sequence[str]) -> list[str]:
        """The columns to read: those asked for, and those that rows are chosen and sorted by.

        Raises:
            QueryError: A column does not exist.
        """
        if self.columns is None:
            return list(known)
        if unknown := [one for one in self.columns if one not in known]:
            raise QueryError(f"{self.kind} has no column {unknown[0]!r}. It has {', '.join(known)}.")
        return list(dict.fromkeys([*self.columns, "name", "step", *self.constrained]))

    def may_be_in(self, bounds: Mapping[str, tuple[Any, Any]]) -> bool:
        """Whether rows with columns within these bounds may be among those asked for."""
        names = self.names is None or "name" not in bounds or self.names.meets(*bounds["name"])
        steps = "step" not in bounds or self.span.meets(StepSpan(*bounds["step"]))
        low, high = bounds.get("rank", (0, 0))
        return names and steps and (self.ranks is None or "rank" not in bounds or any(low <= one <= high for one in self.ranks))

    def filtered(self, rows: pa.Table) -> pa.Table:
        """The rows that are asked for."""
        keep = self.keeps(rows)
        there = np.flatnonzero(keep)
        if len(there) and there[-1] - there[0] + 1 == len(there):  # of one tensor rows stand together: nothing is copied
            return rows.slice(there[0], len(there))
        return rows.filter(pa.array(keep))

    def keeps(self, rows: pa.Table) -> Flags:
        """Whether each row is asked for; by its rank only if there is that column."""
        keep: Flags = np.ones(len(rows), dtype=np.bool_) if self.names is None else self.names.rows(rows["name"])
        step = rows["step"].to_numpy()
        if self.steps != ALL:
            keep &= (step >= self.steps.start) & (step < self.steps.stop)
        if self.steps.step > 1:
            keep &= (step - self.steps.start) % self.steps.step == 0
        if self.ranks is not None and "rank" in rows.column_names:
            keep &= np.isin(rows["rank"].to_numpy(), list(self.ranks))
        return keep


def with_dictionaries(rows: pa.Table) -> pa.Table:
    """The rows with each column of text as a dictionary, whatever the file has."""
    columns = [column.dictionary_encode() if pa.types.is_string(column.type) else column for column in rows.columns]
    return pa.table(columns, names=rows.column_names)


def in_order(tables: Sequence[pa.Table]) -> pa.Table:
    """Rows of several files as one table in order of steps, with one dictionary for each column of text."""
    rows = pa.concat_tables(tables).unify_dictionaries()
    order = order_by([rows["step"].to_numpy()])
    return rows if order is None else rows.take(pa.array(order))


FOUND_BY_MERGING: Final = ("gaps", "incomplete", "without_global", "unplaced")
"""Entries of a report that only a comparison of all ranks' rows finds."""

SERIES: Final = pa.schema(
    [("kind", TEXT), ("rank", pa.int64()), ("vpp_stage", pa.int64()), ("name", TEXT), ("shape", TEXT), ("dtype", TEXT)]
)
"""``shape`` and ``dtype`` are those of the first measurement; null where they are not known."""


# --- Merged sets.


class MergedFile(NamedTuple):
    """A file of a merged set, and what its name says."""

    steps: StepSpan
    path: str

    @property
    def is_parquet(self) -> bool:
        return self.path.endswith(".parquet")


MOST_LISTINGS: Final = 10
"""Attempts to read files that are replaced meanwhile."""

_FOLDERS: Final = {True: "global", False: "per_rank"}
"""By whether they have rows of whole tensors."""

_TEXTS: Final = {
    _FOLDERS[whole]: [one.name for one in schema if one.type == TEXT] for whole, schema in ((True, GLOBAL), (False, PER_RANK))
}
"""Columns of text. They are read with a dictionary for each row group, so that each text is made and compared once."""


RANKS_AT_A_TIME: Final = 128
"""Ranks of a merged set that are read together. A conversion has a file open for each of them."""


class MergedSet:
    """What ``trainermon merge`` has written, or writes while a job runs. Files that are replaced meanwhile are listed again.

    A process that it is sent to opens it anew.

    Raises:
        QueryError: The report is damaged.
        OSError: The directory cannot be listed.
    """

    set_aside: Sequence[SetAside] = ()

    def __reduce__(self) -> tuple[Callable[[Folder], MergedSet], tuple[Folder]]:
        return MergedSet, (self._folder,)

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._list()

    def _list(self) -> None:
        """Find the files, and then read what is missing of their rows: the report is written before them."""
        self._files = {whole: self._listed(below) for whole, below in _FOLDERS.items()}
        self._footers: dict[tuple[str, object], Any] = {}
        with self._folder.copied(merge.REPORT_FILE) as path:
            try:
                self.manifest: Mapping[str, Any] = json.loads(path.read_bytes())
                self.ranks: list[int] = list(map(int, self.manifest["ranks"]))
                _ = ranges_of(self.manifest["steps"]), list(summary(self.manifest)), self.manifest["notes"]
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise QueryError(f"{merge.REPORT_FILE} is damaged: {type(error).__name__} {error}") from error

    def _listed(self, below: str) -> dict[str, list[MergedFile]]:
        """By kind, in order of steps."""
        found: dict[str, list[MergedFile]] = {}
        for match in filter(None, map(FILE_NAME.fullmatch, self._folder.names(below))):
            file = MergedFile(StepSpan(int(match["first"]), int(match["last"])), f"{below}/{match[0]}")
            found.setdefault(match["kind"], []).append(file)
        return {kind: sorted(files) for kind, files in sorted(found.items())}

    @property
    def steps(self) -> dict[str, list[range]]:
        """By kind, the recorded steps that its files cover."""
        recorded = np.unique(steps_in(ranges_of(self.manifest["steps"])))
        return {kind: cut(recorded, (file.steps for file in files)) for kind, files in self._files[False].items()}

    def kinds(self, *, whole: bool) -> list[str]:
        """The kinds that have rows of whole tensors, or of ranks."""
        return list(self._files[whole])

    def told(self) -> Mapping[str, Any]:
        """What there is and what is missing, as ``Report.told`` says it."""
        return self.manifest

    def series(self) -> pa.Table:
        """A row for each series of each rank, in the columns ``SERIES``. It reads these columns of all rows."""
        found = [SERIES.empty_table()]
        for kind in self._files[False]:
            rows = self.rows(RowChoice(kind, columns=tuple(SERIES.names)))
            key = [rows["rank"].to_numpy(), rows["vpp_stage"].to_numpy(), _codes(rows["name"])]
            order = order_by(key)
            order = np.arange(len(rows)) if order is None else order
            first = order[starts_of_runs([column[order] for column in key])]
            found.append(rows.take(pa.array(first)).select(SERIES.names).cast(SERIES))
        return pa.concat_tables(found).unify_dictionaries()

    def rows(self, choice: RowChoice) -> pa.Table:
        """The rows of a kind that has some, in order of steps, with at least the columns asked for.

        Raises:
            QueryError: A column does not exist, or files were replaced again and again.
        """
        for _ in range(MOST_LISTINGS):
            if choice.kind not in self._files[choice.whole]:
                break
            try:
                return self._rows(choice)
            except FileNotFoundError:
                self._list()
        raise QueryError(f"the files of {choice.kind} were removed or replaced while they were read. Open the run again.")

    def _rows(self, choice: RowChoice) -> pa.Table:
        files = self._files[choice.whole][choice.kind]
        found = [rows for file in files if file.steps.meets(choice.span) for rows in self._of_file(file, choice)]
        if found:
            return in_order(found)
        schema = self._schema(files[0])
        return with_dictionaries(pa.schema([schema.field(name) for name in choice.read_columns(schema.names)]).empty_table())

    def scan(self, choice: RowChoice) -> MergedScan:
        """``rows``, to be read by any process."""
        return MergedScan(self, choice)

    def recorded(self, kinds: Iterable[str]) -> Iterator[tuple[tuple[int, ...], list[Shard]]]:
        """The files that have rows of ranks of these kinds, for some ranks at a time."""
        files = [(kind, one) for kind in kinds for one in self._files[False].get(kind, ())]
        shards = [Shard(Path(str(self._folder.local), one.path), kind, one.steps, merge.PIECE_ROWS) for kind, one in files]
        for first in range(0, len(self.ranks) if shards else 0, RANKS_AT_A_TIME):
            yield tuple(self.ranks[first : first + RANKS_AT_A_TIME]), shards

    def configured(self, setting: str, ranks: Collection[int]) -> list[Any]:  # noqa: ARG002 - it does not say
        """The values of a setting on these ranks, as far as they are known."""
        return []

    def merged(self, kinds: tuple[str, ...], steps: StepSpan) -> MergedSet:  # noqa: ARG002 - it has all that there is
        """A merged set that has the kinds in these steps."""
        return self

    def files(self, kind: str, *, whole: bool) -> list[Path]:
        """The Parquet files on this machine that have all rows of a kind, and nothing else; empty if there are none."""
        root = self._folder.local
        if root is not None and not all((root / file.path).exists() for file in self._files[whole].get(kind, [])):
            self._list()
        files = self._files[whole].get(kind, [])
        paths = [Path(root or ".", file.path) for file in files]
        return paths if root is not None and all(file.is_parquet for file in files) and all(map(Path.is_file, paths)) else []

    def _of_file(self, file: MergedFile, choice: RowChoice) -> Iterator[pa.Table]:
        if file.is_parquet:
            yield from self._of_parquet(file, choice)
            return
        with self._folder.copied(file.path) as path:
            rows = read_merged(path)
        yield choice.filtered(rows.select(choice.read_columns(rows.column_names)))

    def _of_parquet(self, file: MergedFile, choice: RowChoice) -> Iterator[pa.Table]:
        """The row groups that may have rows, and of these the columns that are needed."""
        with self._parquet(file) as parquet:
            columns, groups = choice.read_columns(parquet.schema_arrow.names), list(_row_groups(parquet.metadata, choice))
            if groups:
                rows = parquet.read_row_groups(groups, columns=columns, use_threads=False)  # type: ignore[no-untyped-call]
                for name in set(columns).intersection(_TEXTS[file.path.partition("/")[0]]):
                    rows[name].validate(full=True)  # headers of pages have no checksum
                yield with_dictionaries(choice.filtered(rows))

    @contextmanager
    def _parquet(self, file: MergedFile) -> Iterator[ParquetFile]:
        """Its footer is read once for all queries, if it is not replaced meanwhile."""
        before, texts = self._identity(file), _TEXTS[file.path.partition("/")[0]]
        known = self._footers.get((file.path, before))
        with (
            self._folder.opened(file.path) as source,
            ParquetFile(  # type: ignore[no-untyped-call]
                source, metadata=known, read_dictionary=texts, page_checksum_verification=True
            ) as parquet,
        ):
            if self._identity(file) != before:
                raise FileNotFoundError(file.path)
            self._footers[file.path, before] = parquet.metadata
            yield parquet

    def _identity(self, file: MergedFile) -> object:
        """What changes if a file of this machine is replaced."""
        if self._folder.local is None:
            return None
        status = stat(f"{self._folder.local}/{file.path}")
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _schema(self, file: MergedFile) -> pa.Schema:
        if file.is_parquet:
            with self._parquet(file) as parquet:
                return parquet.schema_arrow
        with self._folder.copied(file.path) as path:
            return read_merged(path).schema


class MergedScan(NamedTuple):
    """Rows of a merged set that any process can read."""

    source: MergedSet
    choice: RowChoice

    def read(self) -> tuple[pa.Table, list[SetAside]]:
        """The rows, and the files that have none to give: a merged set is read whole or not at all."""
        return self.source.rows(self.choice), []


def _row_groups(footer: Any, choice: RowChoice) -> Iterator[int]:
    """The row groups that may have rows. Those of a name stand together in a file that says that it is in order of names.

    Args:
        footer: Its ``schema`` is not looked at: then it would stay in memory until Python's next collection.
    """
    every, columns = range(footer.num_row_groups), choice.constrained
    places = {footer.row_group(0).column(i).path_in_schema: i for i in range(footer.num_columns if every else 0)}

    def bounds(number: int, columns: Collection[str] = columns) -> dict[str, tuple[Any, Any]]:
        """The least and the greatest value of these columns, where the footer has them."""
        group = footer.row_group(number)
        found = {name: group.column(places[name]).statistics for name in columns if name in places}
        return {name: (one.min, one.max) for name, one in found.items() if one is not None and one.has_min_max}

    order = footer.row_group(0).sorting_columns if every else ()
    if choice.names is not None and order and (order[0].column_index, order[0].descending) == (places.get("name"), False):
        low, high = choice.names.bounds
        no_name = (_LAST_CHARACTER, _LAST_CHARACTER)  # null comes last
        first = bisect_left(every, low, key=lambda number: bounds(number, ["name"]).get("name", no_name)[1])
        end = bisect_right(every, high, lo=first, key=lambda number: bounds(number, ["name"]).get("name", no_name)[0])
        every = every[first:end]
    yield from (number for number in every if choice.may_be_in(bounds(number)))


def _codes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """A number for each text, equal for equal texts."""
    codes: NDArray[np.int64] = column.unify_dictionaries().combine_chunks().indices.to_numpy().astype(np.int64)
    return codes


# --- Directories of ranks, read as a merge reads them.

_ONE_PIECE: Final = 2**60
"""Rows of a piece, so that a plan has one piece for each kind."""


class RankDirectories:
    """What the ranks of a job have written.

    At first only manifests are read. The first question about rows lists all files and reads the series of all ranks, as a
    merge does. Then only files of the ranks, the kind and the steps asked for are read.

    Directories without a manifest are read if no directory has one: other tools write such files. A merge leaves them out.

    Args:
        job: The beginning of the job's id; None if there is only one.
        span: Timestamps of directories, the first and the last; None: all.

    Raises:
        MergeError: There is no directory of a rank, or more than one job.
    """

    def __init__(self, base: Path, job: str | None = None, span: tuple[str, str] | None = None) -> None:
        self._base, self._span = base, span
        found = discover(base, span)
        self._is_merged = bool(found.jobs)
        self._found = found if found.jobs or job else without_manifests(base, found, span)
        self._job = choose(self._found, job)
        self._runs = runs_of(self._found, self._job)
        self.set_aside = [*self._found.set_aside, *unmerged_formats(self._runs)]
        self._merges: dict[tuple[object, StepSpan], MergedSet] = {}

    @property
    def manifest(self) -> Mapping[int, Any]:
        """For each rank, the manifest of its latest directory."""
        return {run.rank: run.manifest for run in self._runs}

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a directory."""
        return sorted({run.rank for run in self._runs})

    @cached_property
    def steps(self) -> dict[str, list[range]]:
        """By kind, the steps that manifests list and its files cover. Files of a run that was killed, or is still writing, may
        have later steps than its manifest lists: these are read.
        """
        shards, ended = self._plan.shards, [place for place, run in enumerate(self._runs) if run.manifest.closed]
        of_ended = [one.filter(np.isin(one["run"].to_numpy(), ended)) for one in shards.values()]
        known = merge.recorded_steps({run.manifest.steps.written for run in self._runs}, of_ended)
        spans = {kind: map(StepSpan, *(shards[kind][end].to_pylist() for end in ("first", "last"))) for kind in sorted(shards)}
        return {kind: cut(np.unique(np.concatenate([known, *self._unlisted(kind)])), each) for kind, each in spans.items()}

    def _unlisted(self, kind: str) -> Iterator[NDArray[np.int64]]:
        """The steps in files of runs that have not ended, after those that their manifests list."""
        for place in (number for number, run in enumerate(self._runs) if not run.manifest.closed):
            listed = self._runs[place].manifest.steps.written.restored()
            choice = RowChoice(kind, steps=range(listed.newest + 1, ALL.stop), columns=("step",))
            rows, set_aside = self._scan(choice, self._plan.sources(kind, choice.span, range(place, place + 1))).read()
            self._set_aside(set_aside)
            yield np.unique(rows["step"].to_numpy())

    def kinds(self, *, whole: bool) -> list[str]:
        """The kinds that have rows of whole tensors, or of ranks."""
        return [kind for kind in sorted(self._plan.shards) if not whole or (kind not in KINDS_OF_RANKS and self._is_merged)]

    def told(self) -> Mapping[str, Any]:
        """What there is and what is missing, as far as manifests and the files read so far show it."""
        _ = self._plan  # finds unfinished and damaged files
        missing = merge.missing_ranks(self._runs, self._found.others_of_the_launch(self._job))
        told = Report(self._job, self._runs[0].manifest.world_size, self._runs, missing, self.set_aside).told()
        merges = [one.manifest for one in self._merges.values()]
        listed = {what: [one for each in merges for one in each[what]["listed"]] for what in FOUND_BY_MERGING}
        return told | {what: {"count": len(found), "listed": found} for what, found in listed.items()}

    def series(self) -> pa.Table:
        """A row for each series of each rank, in the columns ``SERIES``."""
        found: dict[tuple[str, int, int, str], tuple[str | None, str | None]] = {}
        for run in reversed(self._runs):
            for one in run.series():
                of, layout = one.series, one.layout
                texts = (None, None) if layout is None else (str(list(layout.shape)), layout.dtype)
                found.setdefault((of.kind, run.rank, of.vpp_stage, of.name), texts)
        columns = zip(*((*key, *found[key]) for key in sorted(found)), strict=True)
        return pa.table([pa.array(one) for one in columns], names=SERIES.names).cast(SERIES) if found else SERIES.empty_table()

    def rows(self, choice: RowChoice) -> pa.Table:
        """The rows of a kind that has some, in order of steps, with at least the columns asked for.

        Raises:
            QueryError: A column does not exist.
            MergeError: Rows of whole tensors cannot be made.
        """
        if choice.whole:
            return self._whole(choice)
        found, set_aside = self.scan(choice).read()
        self._set_aside(set_aside)
        return found

    def scan(self, choice: RowChoice) -> RankScan:
        """``rows`` of ranks, to be read by any process."""
        return self._scan(choice, self._sources(choice.kind, choice.ranks, choice.span))

    def _scan(self, choice: RowChoice, sources: Iterable[Source]) -> RankScan:
        kind, plan = choice.kind, self._plan
        return RankScan(choice, plan.columns(kind), tuple(sources), plan.catalogues_of(kind), plan.about_runs)

    def _sources(self, kind: str, ranks: Collection[int] | None, steps: StepSpan) -> Iterator[Source]:
        of_runs = [one.rank for one in self._runs]
        some = (range(bisect_left(of_runs, one), bisect_right(of_runs, one)) for one in sorted(ranks or ()))
        for places in [range(len(of_runs))] if ranks is None else some:
            yield from (replace(one, replicas=()) for one in self._plan.sources(kind, steps, places) if one.shards)

    def recorded(self, kinds: Collection[str]) -> Iterator[tuple[tuple[int, ...], list[Shard]]]:
        """The files that have rows of these kinds, for each rank."""
        for rank in self.ranks:
            shards = [one for kind in kinds for source in self._sources(kind, [rank], ALL_STEPS) for one in source.shards]
            if shards:
                yield (rank,), shards

    def configured(self, setting: str, ranks: Collection[int]) -> list[Any]:
        """The values of a setting on these ranks, as far as they are known."""
        manifests = [one.manifest for one in self._runs if one.rank in ranks]
        changed = [change.changed for one in manifests for change in one.configurations if setting in change.changed]
        return [*(one.config[setting] for one in manifests if setting in one.config), *changed]

    def _whole(self, choice: RowChoice) -> pa.Table:
        known = columns_of(self._plan.columns(choice.kind), GLOBAL)
        columns = choice.read_columns(known.names)
        try:
            return self.merged((choice.kind,), choice.span).rows(choice)
        except execution.MergeError:
            if choice.steps == ALL:
                raise
        return known.empty_table().select(columns)  # there are no rows of these steps

    def merged(self, kinds: tuple[str, ...], steps: StepSpan) -> MergedSet:
        """The kinds in these steps, merged once into a directory that is removed with this object.

        Raises:
            MergeError: There are no rows.
        """
        if (kinds, steps) not in self._merges:
            output = self._work / f"merged-{len(self._merges)}"
            merge.merge(merge.Wanted(self._base, output, self._job, self._span, kinds, steps, "parquet"))
            self._merges[kinds, steps] = MergedSet(Folder(str(output)))
        return self._merges[kinds, steps]

    def files(self, kind: str, *, whole: bool) -> list[Path]:
        """The Parquet files that have all rows of whole tensors; there are none of rows of ranks."""
        return self.merged((kind,), RowChoice(kind).span).files(kind, whole=True) if whole else []

    @cached_property
    def _work(self) -> Path:
        path = mkdtemp(prefix="trainermon-")
        finalize(self, shutil.rmtree, path, ignore_errors=True)
        return Path(path)

    @cached_property
    def _plan(self) -> merge.Plan:
        """What a merge of everything would do."""
        work = self._work
        with execution.engine() as (executor, workers):
            do = partial(execution.run, executor, workers)
            plan, set_aside = merge.planned(self._job, self._runs, work, work, do, suffix="", rows=_ONE_PIECE)
        self._set_aside(set_aside)
        return plan

    def _set_aside(self, found: Iterable[SetAside]) -> None:
        self.set_aside += [one for one in found if one not in self.set_aside]


RunSource = MergedSet | RankDirectories


@dataclass(frozen=True, slots=True)
class RankScan:
    """Rows of ranks that any process can read.

    Attributes:
        kept: The columns of the kind.
        sources: The files of each directory.
        catalogues: See ``Catalogue.read``.
        about: A file about the directories, in the columns ``RUNS`` of ``monitor.merge.combine``.
    """

    choice: RowChoice
    kept: Columns
    sources: tuple[Source, ...]
    catalogues: tuple[Path | None, Path | None]
    about: Path

    def read(self) -> tuple[pa.Table, list[SetAside]]:
        """The rows, in order of steps, and the files that have none to give.

        Raises:
            QueryError: A column does not exist.
        """
        known = columns_of(self.kept, PER_RANK)
        columns = self.choice.read_columns(known.names)
        series, told = Catalogue.read(self.catalogues[0], self.kept.kind, self.catalogues[1]), Told()
        parts = (part for one in self.sources for part in read([one], self.choice.span, self.kept, series, told))
        chosen = [part for part in (_chosen(part, series, self.choice) for part in parts) if len(part)]
        if not chosen:
            return known.empty_table().select(columns), told.set_aside
        about = read_file(self.about)
        rows, statistics = gathered(chosen, about["rank"].to_numpy(), series, self.kept)
        return per_rank_rows(self.kept, about, rows, statistics).select(columns), told.set_aside


def _chosen(rows: pa.Table, series: Catalogue, choice: RowChoice) -> pa.Table:
    """The rows asked for, of a table of ``monitor.merge.rows.read``, where names that the catalogue knows are null."""
    if choice.names is None:
        return choice.filtered(rows)
    own = Texts.of(rows["name"].chunks)
    names = series.names_or(own, rows["series"].to_numpy()).arrow()
    return rows.filter(pa.array(choice.keeps(rows.set_column(rows.column_names.index("name"), "name", names))))
