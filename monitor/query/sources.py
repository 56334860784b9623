"""Which rows of a run are asked for, and how they are read: from a merged set, or from the directories of ranks."""

from __future__ import annotations

import json
import re
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Final, NamedTuple
from weakref import finalize

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.parquet import ParquetFile

from monitor.coordinator.manifest_format import StepRanges
from monitor.failures import LOGGER
from monitor.merge import execution, merge
from monitor.merge.combine import per_rank_rows
from monitor.merge.discovery import SetAside, choose, discover, runs_of, unmerged_formats
from monitor.merge.execution import MergeError
from monitor.merge.outputs import GLOBAL, PER_RANK, columns_of, read_merged
from monitor.merge.report import Report
from monitor.merge.rows import Told, gathered, read
from monitor.merge.tables import Texts, order_by, read_file, starts_of_runs
from monitor.merge.tensors import Catalogue
from monitor.series import REPLICA_KIND
from monitor.sinks.arrow import TEXT
from monitor.sinks.files import StepSpan


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
        """Those of the rows that are asked for."""
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


SERIES: Final = pa.schema(
    [("kind", TEXT), ("rank", pa.int64()), ("vpp_stage", pa.int64()), ("name", TEXT), ("shape", TEXT), ("dtype", TEXT)]
)
"""``shape`` and ``dtype`` are those of the first measurement; null where they are not known."""


# --- Merged sets.


class Folder:
    """A directory, local or behind a URL that fsspec opens.

    Raises:
        QueryError: It is behind a URL, and fsspec or the package for it is missing.
    """

    def __init__(self, path: str) -> None:
        self._files, self._root = None, path
        if "://" in path:
            try:
                from fsspec.core import url_to_fs  # installed where there are URLs

                self._files, self._root = url_to_fs(path)
            except ImportError as error:
                raise QueryError(f"{path} cannot be opened: {error}. Install fsspec and the package for this URL.") from error

    @property
    def local(self) -> Path | None:
        """Where it is on this machine, if it is."""
        return Path(self._root) if self._files is None else None

    def names(self, below: str = "") -> list[str]:
        """The names of what is in a directory below, sorted; empty if there is no such directory.

        Raises:
            OSError: It cannot be listed.
        """
        path = f"{self._root}/{below}"
        try:
            if self._files is None:
                return sorted(one.name for one in Path(path).iterdir())
            return sorted(str(one).rstrip("/").rpartition("/")[2] for one in self._files.ls(path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """A file to read: its path, or a file object if it is behind a URL."""
        if self._files is None:
            yield f"{self._root}/{name}"
        else:
            with self._files.open(f"{self._root}/{name}", "rb") as file:
                yield file

    @contextmanager
    def copied(self, name: str) -> Iterator[Path]:
        """A file on this machine: itself, or a copy for the time being."""
        if self._files is None:
            yield Path(self._root, name)
            return
        with TemporaryDirectory() as directory:
            path = Path(directory, name.rpartition("/")[2])
            self._files.get_file(f"{self._root}/{name}", str(path))
            yield path


class MergedFile(NamedTuple):
    """A file of a merged set, and what its name says."""

    steps: StepSpan
    path: str

    @property
    def is_parquet(self) -> bool:
        return self.path.endswith(".parquet")


_NAME: Final = re.compile(r"(?P<kind>[a-z][a-z_]*)_(?P<first>\d{1,19})-(?P<last>\d{1,19})\.(?:h5|csv|parquet)")

_FOLDERS: Final = {True: "global", False: "per_rank"}
"""By whether they have rows of whole tensors."""

_TEXTS: Final = {
    _FOLDERS[whole]: [one.name for one in schema if one.type == TEXT] for whole, schema in ((True, GLOBAL), (False, PER_RANK))
}
"""Columns of text. They are read with a dictionary for each row group, so that each text is made and compared once."""


class MergedSet:
    """What ``trainermon merge`` has written.

    Raises:
        QueryError: The report is damaged.
        OSError: The directory cannot be listed.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        with folder.copied(merge.REPORT_FILE) as path:
            try:
                self.manifest: Mapping[str, Any] = json.loads(path.read_bytes())
                self.ranks: list[int] = list(map(int, self.manifest["ranks"]))
            except (ValueError, KeyError, TypeError) as error:
                raise QueryError(f"{merge.REPORT_FILE} is damaged: {error}") from error
        self._files = {whole: self._listed(below) for whole, below in _FOLDERS.items()}
        self._footers: dict[str, Any] = {}

    def _listed(self, below: str) -> dict[str, list[MergedFile]]:
        """By kind, in order of steps."""
        found: dict[str, list[MergedFile]] = {}
        for match in filter(None, map(_NAME.fullmatch, self._folder.names(below))):
            file = MergedFile(StepSpan(int(match["first"]), int(match["last"])), f"{below}/{match[0]}")
            found.setdefault(match["kind"], []).append(file)
        return {kind: sorted(files) for kind, files in sorted(found.items())}

    @property
    def steps(self) -> dict[str, list[range]]:
        """By kind, the recorded steps that its files cover."""
        listed = [np.arange(one.start, one.stop, one.step) for one in ranges_of(self.manifest["steps"])]
        recorded = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *listed]))
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
            QueryError: A column does not exist.
        """
        files = self._files[choice.whole][choice.kind]
        found = [rows for file in files if file.steps.meets(choice.span) for rows in self._of_file(file, choice)]
        if found:
            return in_order(found)
        schema = self._schema(files[0])
        empty = pa.schema([schema.field(name) for name in choice.read_columns(schema.names)]).empty_table()
        return with_dictionaries(empty)

    def merged(self, kind: str, steps: StepSpan) -> MergedSet:  # noqa: ARG002 - it has all that there is
        """A merged set that has the kind in these steps."""
        return self

    def files(self, kind: str, *, whole: bool) -> list[Path]:
        """The Parquet files on this machine that have all rows of a kind, and nothing else; empty if there are none."""
        files, root = self._files[whole].get(kind, []), self._folder.local
        return [root / file.path for file in files] if root is not None and all(file.is_parquet for file in files) else []

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
            columns, groups = choice.read_columns(parquet.schema.names), list(_row_groups(parquet.metadata, choice))
            if groups:
                rows = parquet.read_row_groups(groups, columns=columns, use_threads=False)  # type: ignore[no-untyped-call]
                yield with_dictionaries(choice.filtered(rows))

    @contextmanager
    def _parquet(self, file: MergedFile) -> Iterator[ParquetFile]:
        """Its footer is read once for all queries."""
        known, texts = self._footers.get(file.path), _TEXTS[file.path.partition("/")[0]]
        with (
            self._folder.opened(file.path) as source,
            ParquetFile(source, metadata=known, read_dictionary=texts) as parquet,  # type: ignore[no-untyped-call]
        ):
            self._footers[file.path] = parquet.metadata
            yield parquet

    def _schema(self, file: MergedFile) -> pa.Schema:
        if file.is_parquet:
            with self._parquet(file) as parquet:
                return parquet.schema_arrow
        with self._folder.copied(file.path) as path:
            return read_merged(path).schema


def _row_groups(footer: Any, choice: RowChoice) -> Iterator[int]:
    """The row groups that may have rows. Those of a name stand together in a file that says that it is in order of names."""
    every, columns = range(footer.num_row_groups), choice.constrained
    places = {name: place for place, name in enumerate(footer.schema.names) if name in columns}

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


MOST_STEPS: Final = 10**8
"""Of a range. A number in a damaged report may be any."""


def ranges_of(steps: Mapping[str, Any]) -> list[range]:
    """Steps of a report as ranges; those that it only counts as all steps between the first and the last of them."""
    rest = steps.get("rest")
    more = [range(rest["first"], rest["last"] + 1)] if rest else []
    ranges = [range(first, last + 1, interval) for first, last, interval in steps["ranges"]]
    return [one[:MOST_STEPS] for one in (*ranges, *more)]


def cut(steps: NDArray[np.int64], spans: Iterable[StepSpan]) -> list[range]:
    """The steps that are in one of the spans, as ranges.

    Args:
        steps: Ascending.
    """
    inside = np.zeros(len(steps), dtype=np.bool_)
    for first, last in set(spans):
        inside[np.searchsorted(steps, first) : np.searchsorted(steps, last, "right")] = True
    found = steps[inside].tolist()
    return [range(first, last + 1, interval) for first, last, interval in StepRanges(found, most=len(found) + 1).ranges]


# --- Directories of ranks, read as a merge reads them.

_ONE_PIECE: Final = 2**60
"""Rows of a piece, so that a plan has one piece for each kind."""


class RankDirectories:
    """What the ranks of a job have written.

    At first only manifests are read. The first question about rows lists all files and reads the series of all ranks, as a
    merge does. Then only files of the ranks, the kind and the steps asked for are read.

    Args:
        job: The beginning of the job's id; None if there is only one.

    Raises:
        MergeError: There is no directory of a rank, or more than one job.
    """

    def __init__(self, base: Path, job: str | None = None) -> None:
        self._base = base
        self._found = discover(base)
        self._job = choose(self._found, job)
        self._runs = runs_of(self._found, self._job)
        self._aside = [*self._found.set_aside, *unmerged_formats(self._runs)]
        self._merges: dict[tuple[str, StepSpan], MergedSet] = {}

    @property
    def manifest(self) -> Mapping[int, Any]:
        """Of each rank the manifest of its latest directory."""
        return {run.rank: run.manifest for run in self._runs}

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a directory."""
        return sorted({run.rank for run in self._runs})

    @property
    def steps(self) -> dict[str, list[range]]:
        """By kind, the steps that manifests list and its files cover."""
        shards = self._plan.shards
        known = merge.recorded_steps({run.manifest.steps.written for run in self._runs}, shards.values())
        spans = {kind: map(StepSpan, *(shards[kind][end].to_pylist() for end in ("first", "last"))) for kind in sorted(shards)}
        return {kind: cut(known, each) for kind, each in spans.items()}

    def kinds(self, *, whole: bool) -> list[str]:
        """The kinds that have rows of whole tensors, or of ranks."""
        return [kind for kind in sorted(self._plan.shards) if not whole or kind != REPLICA_KIND]

    def told(self) -> Mapping[str, Any]:
        """What there is and what is missing, as far as manifests and the files read so far show it."""
        _ = self._plan  # finds unfinished and damaged files
        missing = merge.missing_ranks(self._runs, self._found.others_of_the_launch(self._job))
        return Report(self._job, self._runs[0].manifest.world_size, self._runs, missing, self._aside).told()

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
        kept, plan = self._plan.columns(choice.kind), self._plan
        schema = columns_of(kept, GLOBAL if choice.whole else PER_RANK)
        columns = choice.read_columns(schema.names)
        windows = plan.windows([choice.kind], choice.span)
        if not windows:
            return schema.empty_table().select(columns)
        if choice.whole:
            return self._whole(choice, schema)
        (piece,) = plan.pieces(windows[0])
        of_kind, told = Catalogue.read(piece.catalogue, piece.kind, piece.others), Told()
        sources = [replace(one, replicas=()) for one in piece.sources if choice.ranks is None or one.rank in choice.ranks]
        parts = (part for source in sources for part in read([source], piece.steps, kept, of_kind, told))
        chosen = [part for part in (_chosen(part, of_kind, choice) for part in parts) if len(part)]
        self._set_aside(told.set_aside)
        if not chosen:
            return schema.empty_table().select(columns)
        about = read_file(piece.runs)
        rows, statistics = gathered(chosen, about["rank"].to_numpy(), of_kind, kept)
        return per_rank_rows(kept, about, rows, statistics).select(columns)

    def _whole(self, choice: RowChoice, schema: pa.Schema) -> pa.Table:
        try:
            return self.merged(choice.kind, choice.span).rows(choice)
        except MergeError:
            if choice.steps == ALL:
                raise
        return schema.empty_table()  # files cover these steps and have no rows of them

    def merged(self, kind: str, steps: StepSpan) -> MergedSet:
        """The kind in these steps, merged once into a directory that is removed with this object.

        Raises:
            MergeError: There are no rows.
        """
        if (kind, steps) not in self._merges:
            output = self._work / f"merged-{len(self._merges)}"
            merge.merge(merge.Wanted(self._base, output, self._job, kinds=[kind], steps=steps, format="parquet"))
            self._merges[kind, steps] = MergedSet(Folder(str(output)))
        return self._merges[kind, steps]

    def files(self, kind: str, *, whole: bool) -> list[Path]:
        """The Parquet files that have all rows of whole tensors; there are none of rows of ranks."""
        return self.merged(kind, RowChoice(kind).span).files(kind, whole=True) if whole else []

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
        for one in found:
            if one not in self._aside:
                self._aside.append(one)
                LOGGER.warning("%s was not read: %s", one.path, one.reason)


def _chosen(rows: pa.Table, of_kind: Catalogue, choice: RowChoice) -> pa.Table:
    """The rows asked for, of a table of ``monitor.merge.rows.read``, where names that the catalogue knows are null."""
    if choice.names is None:
        return choice.filtered(rows)
    own = Texts.of(rows["name"].chunks)
    names = of_kind.names_or(own, rows["series"].to_numpy()).arrow()
    return rows.filter(pa.array(choice.keeps(rows.set_column(rows.column_names.index("name"), "name", names))))
