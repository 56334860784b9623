"""``open_run``: what a job recorded, from the directories of its ranks or from a merged set, as Arrow tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from operator import index
from os import PathLike, fspath
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.coordinator.manifest_format import THINNED
from monitor.failures import LOGGER
from monitor.merge.execution import MergeError
from monitor.merge.finished import Folder
from monitor.merge.merge import REPORT_FILE
from monitor.merge.report import ranges_of, summary
from monitor.merge.statistics import roots_of_squares
from monitor.merge.tables import order_by, starts_of_runs
from monitor.query.sources import ALL, MergedSet, NameFilter, QueryError, RankDirectories, RowChoice, RunSource
from monitor.series import CHECKED_KINDS, IN_NO_GROUP, OF_ONE_RANK, WITHOUT_ROWS
from monitor.terminal import counted

MISSING: Final = (
    "missing ranks",
    "gaps",
    "dropped",
    "thinned",
    "not closed",
    "set aside",
    "incomplete",
    "without global",
    "unplaced",
)
"""Lines of the summary of a report that say what is missing."""

MOST_NAMED: Final = 10
"""Names or reasons in a message; more are counted."""

MOST_STEPS: Final = 100_000
"""Most steps of a range of dropped steps. A damaged report may state any number."""

_SQL_MISSING: Final = "a query in SQL needs the package duckdb: pip install 'trainermon[sql]'"


def open_run(path: str | PathLike[str], *, job: str | None = None) -> OpenedRun:
    """Open what a job recorded. Only manifests, or the report of a merge and the names of its files, are read.

    Args:
        path: The directory that contains the ranks' directories, or a merged set. A merged set may be behind a URL that the
            package fsspec opens, such as ``s3://bucket/merged``.
        job: The id of the job, or its beginning, if the directory contains several jobs.

    Raises:
        QueryError: There is nothing to open, or there are several jobs.
        OSError: The directory cannot be read.
    """
    return OpenedRun(open_source(path, job))


def open_source(path: str | PathLike[str], job: str | None = None, span: tuple[str, str] | None = None) -> RunSource:
    """``open_run`` for other rooms of the package, which read rows of a run in batches (``monitor.query.batches``).

    Args:
        span: Timestamps of the ranks' directories, the first and the last; None: all.
    """
    try:
        folder = Folder(fspath(path))
        names = folder.names()
        if REPORT_FILE in names and {"per_rank", "global"} & set(names):
            merged = MergedSet(folder)
            if span is not None or not str(merged.manifest.get("job_id")).startswith(job or ""):
                raise QueryError(
                    f"{path} is a merged set of job {merged.manifest.get('job_id')}: it has no other job, and no times."
                )
            return merged
        if folder.local is not None:
            return RankDirectories(folder.local, job, span)
    except MergeError as error:
        raise QueryError(f"{path} cannot be opened: {error}") from error
    raise QueryError(f"{path} is not a merged set. Directories of ranks are read from this machine only: merge them first.")


class OpenedRun:
    """What a job recorded. Made by ``open_run``.

    Rows of ranks are what every rank wrote. Rows of whole tensors have shards combined and replicas counted once. A merged set
    has both. For directories of ranks, the first question about whole tensors merges that kind into a temporary directory.
    """

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._said = len(source.set_aside)

    @property
    def kinds(self) -> list[str]:
        """The kinds that have rows."""
        return sorted({*self._source.kinds(whole=False), *self._source.kinds(whole=True)})

    @property
    def ranks(self) -> list[int]:
        """The ranks that recorded."""
        return self._source.ranks

    @property
    def steps(self) -> dict[str, list[range]]:
        """By kind, the recorded steps that its files cover. A rank may lack some of them."""
        return self._source.steps

    @cached_property
    def series(self) -> pa.Table:
        """A row for each series of each rank: ``kind rank vpp_stage name shape dtype``, as at its first measurement.

        Raises:
            ManifestError: The series of a rank cannot be read.
        """
        return self._source.series()

    @property
    def manifest(self) -> Mapping[Any, Any]:
        """The manifest of each rank, as ``read_manifest`` returns it; for a merged set its report."""
        return self._source.manifest

    @property
    def missing(self) -> list[str]:
        """What is known to be missing, a sentence each."""
        return missing_in(self._source.told())

    @property
    def notes(self) -> list[str]:
        """What the ranks say about the numbers, for example that gradients were measured after clipping."""
        return [f"{one['about']}: {one['note']}" for one in self._source.told()["notes"]]

    @property
    def joints(self) -> list[Mapping[str, Any]]:
        """Where restarts continued earlier runs: ``job_id continued step redone``, in order of time."""
        joints: list[Mapping[str, Any]] = self._source.told().get("joints", {}).get("listed", [])
        return joints

    @property
    def tables(self) -> list[str]:
        """The tables of ``sql``."""
        return list(self._tables)

    def rows(
        self,
        kind: str,
        *,
        name: str | Iterable[str] | None = None,
        steps: int | range | slice | Sequence[int] | None = None,
        ranks: int | Iterable[int] | None = None,
        columns: Sequence[str] | None = None,
        per_rank: bool = True,
    ) -> pa.Table:
        """Rows of a kind, in order of steps.

        Args:
            name: Names of tensors, or globs (``layers.*.weight``); one or several. None: all.
            steps: A step, a range or slice (without its end), or the first and the last step. None: all.
            ranks: A rank, or several. None: all.
            columns: The columns, in their order. None: all.
            per_rank: Rows of ranks; otherwise rows of whole tensors.

        Raises:
            QueryError: There is no such kind, name, rank or column. The message says what there is.
        """
        self._check_kind(kind, whole=not per_rank)
        names = None if name is None else _names(name)
        of_ranks = None if ranks is None else self._ranks(ranks, per_rank)
        asked = None if columns is None else tuple([columns] if isinstance(columns, str) else columns)
        choice = RowChoice(kind, not per_rank, names, steps_of(steps), of_ranks, asked)
        found = self._read(choice)
        self._check_names(choice, found)
        return found if asked is None else found.select(list(asked))

    def sql(self, query: str) -> pa.Table:
        """The answer of DuckDB to a query.

        The tables are the kinds: ``grad_reduced`` and ``per_rank_grad_reduced`` have the rows of ranks,
        ``global_grad_reduced`` those of whole tensors. Only tables that the query names are opened.

        Raises:
            QueryError: DuckDB is not installed, or does not accept the query.
        """
        try:
            import duckdb
        except ImportError as error:
            raise QueryError(_SQL_MISSING) from error
        named = {word.lower() for word in re.findall(r"\w+", query)}
        with duckdb.connect() as connection:
            try:
                for table in named & set(self._tables):
                    self._add_table(connection, table)
                found = connection.sql(query)
                answer = None if found is None else found.to_arrow_table()
            except duckdb.Error as error:
                raise QueryError(f"{error}\nThe tables are {', '.join(self._tables) or 'none'}.") from error
        if answer is None:
            raise QueryError("the statement has no rows as its result. Write a query, such as select … from …")
        return answer

    def total_norm(self, kind: str) -> pa.Table:
        """The norm over all recorded tensors of a kind, each counted once: the root of the sum of squares.

        Returns:
            A row for each step, or micro-step: ``step micro_step total_norm tensors missing``. If a part of a tensor or a rank
            is missing, ``total_norm`` is null, and ``missing`` has the reason.

        Raises:
            QueryError: The kind does not exist, or has no norms.
        """
        self._check_kind(kind, whole=True)
        choice = RowChoice(kind, whole=True, columns=("step", "micro_step", "term", "norm"))
        rows = self._read(choice)
        return total_norms(rows, Lacking.of(self._merged(kind).told(), kind))

    @property
    def _tables(self) -> dict[str, tuple[str, bool]]:
        """By name, the kind and whether its rows are of whole tensors."""
        of_ranks, whole = self._source.kinds(whole=False), self._source.kinds(whole=True)
        return {
            **{kind: (kind, False) for kind in of_ranks},
            **{f"per_rank_{kind}": (kind, False) for kind in of_ranks},
            **{f"global_{kind}": (kind, True) for kind in whole},
        }

    def _add_table(self, connection: Any, table: str) -> None:
        """DuckDB reads Parquet itself, and only what the query needs. Anything else is read here."""
        kind, whole = self._tables[table]
        files = [str(path) for path in self._source.files(kind, whole=whole)]
        if files and not any(re.search(r"[*?\[{]", path) for path in files):  # which DuckDB takes for a glob
            connection.read_parquet(files).create_view(table)
        else:
            connection.register(table, self._read(RowChoice(kind, whole)))

    def _read(self, choice: RowChoice) -> pa.Table:
        try:
            found = self._source.rows(choice)
        except (MergeError, pa.ArrowException) as error:
            raise QueryError(str(error)) from error
        for one in self._source.set_aside[self._said :]:
            LOGGER.warning("%s was not read: %s", one.path, one.reason)
        self._said = len(self._source.set_aside)
        return found

    def _merged(self, kind: str) -> MergedSet:
        return self._source.merged((kind,), RowChoice(kind).span)

    def _check_kind(self, kind: str, *, whole: bool) -> None:
        known = self._source.kinds(whole=whole)
        if kind not in known:
            what = "rows of whole tensors" if whole else "rows of ranks"
            raise QueryError(f"there are no {what} of kind {kind!r}. There are {what} of {', '.join(known) or 'no kind'}.")

    def _ranks(self, ranks: int | Iterable[int], per_rank: bool) -> frozenset[int]:
        if not per_rank:
            raise QueryError("a row of a whole tensor belongs to no single rank. Leave ranks out, or pass per_rank=True.")
        try:
            asked = frozenset(map(index, ranks) if isinstance(ranks, Iterable) else [index(ranks)])
        except TypeError as error:
            raise QueryError(f"ranks is {ranks!r}. Give a rank, or several.") from error
        if unknown := sorted(asked - set(self.ranks)):
            raise QueryError(f"there is no rank {unknown[0]}. There are {_listed(self.ranks)}.")
        return asked

    def _check_names(self, choice: RowChoice, found: pa.Table) -> None:
        """Refuse a name that no tensor of the kind has in any step and on any rank."""
        if choice.names is None:
            return
        there = found["name"].unique().to_pylist()
        absent = [one for one in choice.names.given if not any(map(NameFilter([one]).matches, there))]
        if not absent:
            return
        every = self._read(RowChoice(choice.kind, choice.whole, columns=("name",)))["name"].unique().to_pylist()
        for one in absent:
            if not any(map(NameFilter([one]).matches, every)):
                close = get_close_matches(one, every, MOST_NAMED)
                hint = f"Close to it: {_listed(close)}" if close else f"It has {_listed(sorted(every))}"
                raise QueryError(f"{choice.kind} has no tensor {one!r} among its {len(every)}. {hint}.")


def missing_in(told: Mapping[str, Any]) -> list[str]:
    """What is missing, a sentence each.

    Args:
        told: See ``Report.told``.
    """
    said: list[str] = []
    listed = False
    for what, line in summary(told):
        listed = what in MISSING if what else listed
        if listed:
            said.append(f"{what}: {line}" if what else line)
    return said


def _listed(values: Sequence[object]) -> str:
    more = f" and {len(values) - MOST_NAMED} more" if len(values) > MOST_NAMED else ""
    return ", ".join(map(str, values[:MOST_NAMED])) + more


def _names(name: str | Iterable[str]) -> NameFilter:
    given = [name] if isinstance(name, str) else list(name) if isinstance(name, Iterable) else [name]
    if not all(isinstance(one, str) for one in given):
        raise QueryError(f"name is {name!r}. Give a name, a glob, or several of them.")
    return NameFilter(given)


def steps_of(steps: int | range | slice | Sequence[int] | None) -> range:
    """The steps that an argument means, as an ascending range.

    Raises:
        QueryError: It means no steps.
    """
    if steps is None:
        return ALL
    try:
        if isinstance(steps, slice):
            end, interval = ALL.stop if steps.stop is None else steps.stop, 1 if steps.step is None else steps.step
            found = range(steps.start or 0, end, interval)
        elif isinstance(steps, range):
            found = steps
        else:
            first, last = steps if isinstance(steps, Sequence) else (steps, steps)
            found = range(index(first), index(last) + 1)
    except (TypeError, ValueError):
        found = range(0)
    if not found or found.start < 0 or found.step < 1:
        raise QueryError(f"steps is {steps!r}. Give a step, an ascending range, or the first and the last step.")
    return found


# --- Norms over all tensors.


@dataclass(frozen=True, slots=True)
class Lacking:
    """Steps of a kind at which something is missing.

    Attributes:
        reasons: With the steps of each, as ranges.
        dropped: Reasons for steps of which there may be no row at all.
    """

    reasons: list[tuple[str, list[range]]]
    dropped: list[tuple[str, list[range]]]

    @classmethod
    def of(cls, told: Mapping[str, Any], kind: str) -> Lacking:
        """Args: told: See ``Report.told``."""
        reasons = [(f"rank {rank} has no directory", [ALL]) for rank in told["missing_ranks"]]
        for what, said in (
            ("gaps", "rank {rank} has no rows"),
            ("incomplete", "{name} has not all its parts"),
            ("without_global", "{name}: {reason}"),
            ("unplaced", "rank {rank}: {rows} rows that its manifest does not know"),
        ):
            own = [one for one in told[what]["listed"] if one["kind"] == kind]
            reasons += [(said.format(**one), ranges_of(one["steps"]) if "steps" in one else [ALL]) for one in own]
            if (more := told[what]["count"] - len(told[what]["listed"])) > 0:
                reasons.append((f"the report does not list {more} more of {what.replace('_', ' ')}", [ALL]))
        thinned = told.get("thinned", {"count": 0, "listed": []})  # not in reports of earlier versions
        reasons += [(f"rank {one['rank']}: {THINNED}", ranges_of(one["steps"])) for one in thinned["listed"]]
        if (more := thinned["count"] - len(thinned["listed"])) > 0:
            reasons.append((f"the report does not list {more} more of thinned", [ALL]))
        reasons += [(said, [ALL]) for said in _left_out(told, kind)]
        dropped = [(_dropped(one), ranges_of(one["steps"])) for one in told["dropped"]["listed"]]
        return cls(reasons, dropped)

    def at(self, steps: NDArray[np.int64]) -> list[str | None]:
        """What is missing at each step; None if nothing is."""
        found: list[list[str]] = [[] for _ in steps]
        for reason, ranges in self.reasons:
            for place in np.flatnonzero(_are_in(steps, ranges)).tolist():
                found[place].append(reason)
        return [_joined(each) for each in found]

    def steps_without_rows(self, steps: NDArray[np.int64]) -> Iterator[tuple[int, str]]:
        """Dropped steps that are not among these, with the reason."""
        found: dict[int, list[str]] = {}
        for reason, ranges in self.dropped:
            for step in sorted({one for each in ranges for one in each[:MOST_STEPS]} - set(steps.tolist())):
                found.setdefault(step, []).append(reason)
        yield from ((step, str(_joined(reasons))) for step, reasons in sorted(found.items()))


def _left_out(told: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Notes of the ranks that tensors of a kind have no rows, that some may have none, or that some may count several times."""
    for one in told["notes"]:
        about, note = one["about"], str(one["note"])
        if about == kind == "grad_reduced" and WITHOUT_ROWS in note:
            yield note[note.index(WITHOUT_ROWS) :]
        elif kind in CHECKED_KINDS and (about == IN_NO_GROUP or (about == OF_ONE_RANK and kind != "grad_reduced")):
            yield note


def _dropped(one: Mapping[str, Any]) -> str:
    """An entry of the report's list, of all formats or of one."""
    of_format = f", {one['format']}" if "format" in one else ""
    return f"rank {one['rank']}{of_format}: {one['reason']}"


def _joined(reasons: Sequence[str]) -> str | None:
    return "; ".join([*reasons[:3], *([f"and {len(reasons) - 3} more"] if len(reasons) > 3 else [])]) or None


def _are_in(steps: NDArray[np.int64], ranges: Iterable[range]) -> NDArray[np.bool_]:
    inside = np.zeros(len(steps), dtype=np.bool_)
    for one in ranges:
        inside |= (steps >= one.start) & (steps < one.stop) & ((steps - one.start) % one.step == 0)
    return inside


TOTALS: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("micro_step", pa.int64()),
        ("total_norm", pa.float64()),
        ("tensors", pa.int64()),
        ("missing", pa.string()),
    ]
)


def total_norms(rows: pa.Table, lacking: Lacking) -> pa.Table:
    """See ``OpenedRun.total_norm``.

    Args:
        rows: Of whole tensors, with the columns ``step micro_step term norm``.
    """
    keys = [rows["step"].to_numpy(), rows["micro_step"].fill_null(-1).to_numpy()]
    order = order_by(keys)
    rows = rows if order is None else rows.take(pa.array(order))
    keys = keys if order is None else [column[order] for column in keys]
    starts = starts_of_runs(keys)
    step, micro_step = (column[starts] for column in keys)
    norm = roots_of_squares(rows["norm"].fill_null(0.0).to_numpy(), starts)
    unknown, terms = (_counts(flags, starts) for flags in (rows["norm"].is_null(), rows["term"].fill_null(False)))
    missing = [
        _joined([*([said] if said else []), *_said(int(without), int(several))])
        for said, without, several in zip(lacking.at(step), unknown, terms, strict=True)
    ]
    found = pa.table(
        [
            pa.array(step),
            pa.array(micro_step, mask=micro_step < 0),
            pa.array(norm, mask=np.array([one is not None for one in missing], dtype=np.bool_)),
            pa.array(np.diff(starts, append=len(rows))),
            pa.array(missing, type=pa.string()),
        ],
        schema=TOTALS,
    )
    absent = [{"step": one, "tensors": 0, "missing": reason} for one, reason in lacking.steps_without_rows(step)]
    return pa.concat_tables([found, pa.Table.from_pylist(absent, schema=TOTALS)]).sort_by([("step", "ascending")])


def _said(without: int, terms: int) -> Iterator[str]:
    if without:
        yield f"{counted(without, 'tensor has', 'tensors have')} no norm, because it was not recorded"
    if terms:
        yield f"{counted(terms, 'row is a term', 'rows are terms')} of a sum that no rank recorded"


def _counts(flags: pa.ChunkedArray, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    values = flags.to_numpy().astype(np.int64)
    counted: NDArray[np.int64] = np.add.reduceat(values, starts) if len(starts) else values
    return counted
