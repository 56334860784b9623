"""Which rows of a run are asked for, and how they are read from a merged set, on this machine or behind a URL."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.parquet import ParquetFile

from monitor.coordinator.manifest_format import StepRanges
from monitor.merge.merge import REPORT_FILE
from monitor.merge.outputs import read_merged
from monitor.merge.tables import order_by, starts_of_runs
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
        return rows if keep.all() else rows.filter(pa.array(keep))

    def keeps(self, rows: pa.Table) -> Flags:
        """Whether each row is asked for; by its rank only if there is that column."""
        step = rows["step"].to_numpy()
        keep: Flags = (step >= self.steps.start) & (step < self.steps.stop)
        if self.steps.step > 1:
            keep &= (step - self.steps.start) % self.steps.step == 0
        if self.ranks is not None and "rank" in rows.column_names:
            keep &= np.isin(rows["rank"].to_numpy(), list(self.ranks))
        if self.names is not None:
            keep &= self.names.rows(rows["name"])
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


class MergedSet:
    """What ``trainermon merge`` has written.

    Raises:
        QueryError: The report is damaged.
        OSError: The directory cannot be listed.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        with folder.copied(REPORT_FILE) as path:
            try:
                self.manifest: Mapping[str, Any] = json.loads(path.read_bytes())
                self.ranks: list[int] = list(map(int, self.manifest["ranks"]))
            except (ValueError, KeyError, TypeError) as error:
                raise QueryError(f"{REPORT_FILE} is damaged: {error}") from error
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
            columns = choice.read_columns(parquet.schema_arrow.names)
            every = _bounds_of_groups(parquet.metadata, choice.constrained)
            groups = [number for number, bounds in enumerate(every) if choice.may_be_in(bounds)]
            if groups:
                rows = parquet.read_row_groups(groups, columns=columns, use_threads=False)  # type: ignore[no-untyped-call]
                yield with_dictionaries(choice.filtered(rows))

    @contextmanager
    def _parquet(self, file: MergedFile) -> Iterator[ParquetFile]:
        """Its footer is read once for all queries."""
        known = self._footers.get(file.path)
        with (
            self._folder.opened(file.path) as source,
            ParquetFile(source, metadata=known, memory_map=isinstance(source, str)) as parquet,  # type: ignore[no-untyped-call]
        ):
            self._footers[file.path] = parquet.metadata
            yield parquet

    def _schema(self, file: MergedFile) -> pa.Schema:
        if file.is_parquet:
            with self._parquet(file) as parquet:
                return parquet.schema_arrow
        with self._folder.copied(file.path) as path:
            return read_merged(path).schema


def _bounds_of_groups(metadata: Any, columns: Collection[str]) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Of each row group the least and the greatest value of these columns, where the footer has them."""
    places = {metadata.schema.column(place).name: place for place in range(metadata.num_columns)} if columns else {}
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        every = {name: group.column(places[name]).statistics for name in columns if name in places}
        yield {name: (one.min, one.max) for name, one in every.items() if one is not None and one.has_min_max}


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
