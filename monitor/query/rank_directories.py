"""Rows of the directories that ranks wrote, read as a merge reads them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final
from weakref import finalize

import pyarrow as pa

from monitor.failures import LOGGER
from monitor.merge import merge
from monitor.merge.combine import per_rank_rows
from monitor.merge.discovery import SetAside, choose, discover, runs_of, unmerged_formats
from monitor.merge.execution import MergeError
from monitor.merge.outputs import GLOBAL, PER_RANK, columns_of
from monitor.merge.report import Report
from monitor.merge.rows import Told, gathered, read
from monitor.merge.tables import Texts, read_file
from monitor.merge.tensors import Catalogue, catalogue, look
from monitor.query.merged_sets import ALL, SERIES, Folder, MergedSet, RowChoice, cut
from monitor.series import REPLICA_KIND
from monitor.sinks.files import StepSpan

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
        findings = {visit.first: look(visit) for visit in merge.visits(self._runs, self._work)}
        for one in findings.values():
            self._set_aside(one.set_aside)
        catalogues = {}
        for kind in merge.kinds(self._runs, findings, self._work):
            catalogue(kind)
            catalogues[kind.name] = kind.output
        about = self._work / "runs.arrow"
        merge.write_runs(self._runs, about)
        shards = merge.shards_found(findings)
        return merge.Plan(self._job, self._runs, shards, catalogues, about, self._work, self._work, "", _ONE_PIECE)

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
