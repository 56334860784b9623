"""What is to be done, as tasks that a worker can do on its own: each has all that it needs, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from monitor.merge.arrow_files import write_file
from monitor.merge.columns import Columns
from monitor.merge.discovery import RankRun
from monitor.merge.naming import LayerNames
from monitor.merge.ordering import Index
from monitor.merge.planning import Planner, Window, by_kind, chosen, recorded_steps
from monitor.merge.reading import Share, Source, files_of
from monitor.merge.reduction import ROLES, RUNS, Piece
from monitor.merge.shards import Shard
from monitor.merge.survey import SHARDS, Findings, Visit
from monitor.merge.tensors import Kind
from monitor.placement import Ranks
from monitor.series import CALL_KIND, DIRECTION_KIND, REPLICA_KIND
from monitor.sinks.files import Steps
from monitor.stats.histograms import HISTOGRAM_OPS

RUNS_A_VISIT = 16

HISTOGRAM_ROWS: Final = 8
"""As many rows of ordinary kinds take as much memory as one with a histogram."""


def visits(runs: Sequence[RankRun], work: Path) -> Iterator[Visit]:
    """To look at the directories, some at a time and those of a rank together."""
    first = 0
    for end in range(1, len(runs) + 1):
        if end == len(runs) or (end - first >= RUNS_A_VISIT and runs[end].rank != runs[end - 1].rank):
            yield Visit(first, tuple(runs[first:end]), work / f"series-{first}")
            first = end


def kinds(runs: Sequence[RankRun], findings: Mapping[int, Findings], work: Path) -> list[Kind]:
    """Whose catalogues are to be made.

    Args:
        findings: Of each visit, by its first directory.
    """
    in_order = [findings[first] for first in sorted(findings)]
    groups: dict[Ranks, int] = {}
    numbers = [np.array([groups.setdefault(one, len(groups)) for one in each.groups], dtype=np.int64) for each in in_order]
    names, ranks = _layer_names(runs, in_order), frozenset(run.rank for run in runs)
    files: dict[str, list[tuple[Path, Index]]] = {}
    for each, own in zip(in_order, numbers, strict=True):
        for kind, path in each.series.items():
            files.setdefault(kind, []).append((path, own))
    return [
        Kind(kind, tuple(own), tuple(groups), ranks, names, work / f"catalogue-{number}.arrow")
        for number, (kind, own) in enumerate(files.items())
    ]


def _layer_names(runs: Sequence[RankRun], findings: Iterable[Findings]) -> LayerNames:
    """Of all pipelines of the job, which are alike: what one rank of a stage does not hold another one does."""
    names: dict[int, set[str]] = {}
    for one in findings:
        for stage, own in one.names.items():
            names.setdefault(stage, set()).update(own)
    pipelines = [run.manifest.pipeline for run in runs if run.manifest.pipeline is not None]
    count = max((len(one.ranks) * len(one.stages) for one in pipelines), default=0)
    return LayerNames(names, count, whole=not any(run.manifest.config.get("targets") for run in runs))


def shards_found(findings: Mapping[int, Findings]) -> dict[str, pa.Table]:
    """By kind, in the columns ``SHARDS``, by run."""
    tables = [findings[first].shards for first in sorted(findings)]
    return by_kind(pa.concat_tables([SHARDS.empty_table(), *tables]).unify_dictionaries().combine_chunks())


def write_runs(runs: Sequence[RankRun], path: Path) -> None:
    """What the pieces need to know of the directories."""
    rows = [(one.rank, *(_place(one.rank, one.manifest.groups.get(role, ())) for role in ROLES)) for one in runs]
    columns = [pa.array(column, type=pa.int64()) for column in zip(*rows, strict=True)]
    write_file(path, pa.table(columns, schema=RUNS), RUNS)


def _place(rank: int, group: Ranks) -> int | None:
    return group.index(rank) if rank in group else None


@dataclass(frozen=True)
class Plan:
    """The work on the rows.

    Attributes:
        shards: By kind, in the columns ``SHARDS``, by run.
        catalogues: Files by kind.
        about_runs: See ``write_runs``.
        work: For files that are needed for a while.
        output: The directory for what is made.
        rows: Of a piece, about.
    """

    runs: Sequence[RankRun]
    shards: Mapping[str, pa.Table]
    catalogues: Mapping[str, Path]
    about_runs: Path
    work: Path
    output: Path
    suffix: str
    rows: int

    @cached_property
    def _ndigits(self) -> int:
        every = (one.manifest.config.get("ndigits") for one in self.runs)
        return min(number if isinstance(number, int) else 6 for number in every)

    def windows(self, kinds: Iterable[str] | None, steps: Steps) -> list[Window]:
        """Of the kinds that are asked for; None: of all."""
        asked_for = sorted(set(self.shards) if kinds is None else set(self.shards) & set(kinds))
        recorded = recorded_steps({one.manifest.steps.written for one in self.runs}, self.shards.values())
        planners = {kind: Planner(steps, self._rows_of_a_piece(kind), recorded) for kind in asked_for}
        return [
            one for kind, planner in planners.items() for one in planner.windows(kind, self.shards[kind], self._replicas(kind))
        ]

    @cached_property
    def _histograms(self) -> bool:
        """Whether the job has counted magnitudes: by its configuration, or one that came into force later."""
        asked = (one.manifest.config.get("ops") for one in self.runs)
        changes = (change.changed for one in self.runs for change in one.manifest.configurations)
        texts = [*map(repr, asked), *changes]  # whatever stands there
        return any(op in text for text in texts for op in HISTOGRAM_OPS)

    def _columns(self, kind: str) -> Columns:
        return Columns.of(kind, histograms=self._histograms)

    def _rows_of_a_piece(self, kind: str) -> int:
        return max(1, self.rows // HISTOGRAM_ROWS) if self._columns(kind).histogram else self.rows

    def _replicas(self, kind: str) -> pa.Table:
        """That are to be compared with rows of the kind."""
        nothing = SHARDS.empty_table()
        return nothing if kind == REPLICA_KIND else self.shards.get(REPLICA_KIND, nothing)

    def shares(self, window: Window) -> Iterator[Share]:
        """What to do before the pieces of a window can be done."""
        for number, places in enumerate(window.shares):
            sources, columns = self._sources(window, window.steps, places), self._columns(window.kind)
            catalogue, others = self._catalogues(window.kind)
            output = self._shared(window, number)
            yield Share(columns, window.steps, window.pieces, sources, catalogue, others, output)

    def pieces(self, window: Window) -> Iterator[Piece]:
        sources = () if window.shares else self._sources(window, window.steps, range(len(self.runs)))
        shares = tuple(self._shared(window, number) for number in range(len(window.shares)))
        catalogue, others = self._catalogues(window.kind)
        for number, steps in enumerate(window.pieces):
            outputs, columns = self._outputs(window.kind, steps), self._columns(window.kind)
            about, ndigits = self.about_runs, self._ndigits
            yield Piece(columns, steps, sources, shares, number, catalogue, others, about, outputs, ndigits)

    def _catalogues(self, kind: str) -> tuple[Path | None, Path | None]:
        """Of the kind, and of the one whose rows stand in the same files of CSV."""
        return self.catalogues.get(kind), self.catalogues.get(DIRECTION_KIND) if kind == CALL_KIND else None

    def clear_up(self, window: Window) -> None:
        """Remove what only the pieces of this window needed."""
        for number in range(len(window.shares)):
            for path in files_of(self._shared(window, number)):
                path.unlink(missing_ok=True)

    def _shared(self, window: Window, share: int) -> Path:
        return self.work / f"{window.kind}_{window.steps.first}-{window.steps.last}-{share}"

    def _outputs(self, kind: str, steps: Steps) -> tuple[Path, Path]:
        name = f"{kind}_{steps.first}-{steps.last}{self.suffix}"
        return self.output / "per_rank" / name, self.output / "global" / name

    def _sources(self, window: Window, steps: Steps, places: range) -> tuple[Source, ...]:
        own, replicas = (
            self._shards_by_run(shards, steps, places) for shards in (self.shards[window.kind], self._replicas(window.kind))
        )
        return tuple(self._source(run, own.get(run, ()), replicas.get(run, ())) for run in sorted({*own, *replicas}))

    def _shards_by_run(self, shards: pa.Table, steps: Steps, places: range) -> dict[int, tuple[Shard, ...]]:
        first, end = np.searchsorted(shards["run"].to_numpy(), [places.start, places.stop]).tolist()
        rows = chosen(shards.slice(first, end - first), steps).to_pylist()
        return {run: tuple(map(self._shard, own)) for run, own in groupby(rows, key=lambda row: row["run"])}

    def _shard(self, row: dict[str, Any]) -> Shard:
        path = self.runs[row["run"]].directory / row["file"]
        return Shard(path, row["kind"], Steps(row["first"], row["last"]), row["rows"])

    def _source(self, run: int, shards: tuple[Shard, ...], replicas: tuple[Shard, ...]) -> Source:
        one = self.runs[run]
        steps = one.manifest.steps
        return Source(run, one.rank, one.end, steps.abandoned, steps.written, shards, replicas)
