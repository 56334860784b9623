"""Which directories are there, of which job, and which steps of each count."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from monitor.coordinator import manifest_format
from monitor.coordinator.manifest_format import ManifestError, ManifestRecord, Natural, StepsRecord, StrictRecord
from monitor.coordinator.output import RankDirectory, timestamp_fields
from monitor.coordinator.resume import Span, in_order, moment, order_of
from monitor.coordinator.series_file import MeasuredColumns, MeasuredSeries, SeriesColumns, read_columns
from monitor.formats import FORMATS
from monitor.merge.execution import MergeError
from monitor.merge.restarts import RunPart, continued_jobs, cut, parts_of
from monitor.terminal import counted

NO_END: Final = 2**63 - 1

MOST_RANKS: Final = 10**6
MOST_CHUNKS: Final = 2**31
MOST_ELEMENTS: Final = 2**62
"""No job has more. Without these bounds a damaged number could make the merge count for hours."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file or directory that was not merged, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class RankRun:
    """A directory that one rank wrote.

    Attributes:
        end: Steps from here on are those of a later directory of the same rank, whose run was resumed before them.
        line: The runs of the job and of those that it continued, in order of time; empty if it continued none.
    """

    directory: Path
    manifest: ManifestRecord
    end: int = NO_END
    line: tuple[RunPart, ...] = ()

    @property
    def rank(self) -> int:
        return self.manifest.rank

    def counts(self, step: int) -> bool:
        """Whether rows of ``step`` here belong to the course of training that was carried on."""
        return step < self.end and not any(one.holds(step) for one in self.left_out)

    @property
    def left_out(self) -> tuple[StepsRecord, ...]:
        """Steps that do not count, although files may have rows of them."""
        return self.manifest.steps.abandoned, *self.manifest.thinned.steps.values()

    def thinned(self, step: int) -> bool:
        """Whether the step was removed to stay within ``max_output_bytes``, and no later directory has it."""
        return step < self.end and self.manifest.thinned.holds(step)

    def series(self) -> tuple[MeasuredSeries, ...]:
        """What was measured here, also by earlier runs.

        Of a series that two runs placed differently nothing can be said for all steps: it is left out.

        Raises:
            ManifestError: a series file is missing, damaged, or lies elsewhere.
        """
        found: dict[object, MeasuredSeries] = {}
        moved = set()
        for reference in self._references():
            columns = self._read(reference)
            for one in columns.series() if columns else ():
                known = found.setdefault(one.series, one)
                if known.placement != one.placement:
                    moved.add(one.series)
                elif known.layout != one.layout:
                    found[one.series] = replace(known, layout=known.layout or one.layout, varies=True)
        return tuple(one for series, one in found.items() if series not in moved)

    def _references(self) -> Iterable[ManifestRecord]:
        yield self.manifest
        for run in reversed(self.manifest.resumed):
            yield self.manifest.model_copy(update={"series": run.series})

    def measured(self) -> MeasuredColumns:
        """``series`` as columns, an order of magnitude faster where no earlier run recorded here. Raises as it does."""
        columns = None if self.manifest.resumed else self._read(self.manifest)
        return MeasuredColumns.of(self.series()) if columns is None else columns.measured()

    def _read(self, manifest: ManifestRecord) -> SeriesColumns | None:
        if manifest.series is not None:
            _check_file(self.directory / manifest.series.file)
        found = read_columns(self.directory, manifest)
        if found is not None and not _possible(found):
            raise ManifestError(f"the series of {self.directory} are damaged: a chunk or a shape cannot be that large")
        return found


def _possible(series: SeriesColumns) -> bool:
    shapes = [shape for shape, _ in series.layouts]
    shapes += [one.shard.global_shape for one in series.placements if one.shard is not None]
    return max(series.vpp_stage, default=0) < MOST_CHUNKS and all(math.prod(shape) < MOST_ELEMENTS for shape in shapes)


def leads_out(path: Path) -> bool:
    """Whether ``path`` is a link to somewhere else."""
    return path.is_symlink() and os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent)


def _check_file(path: Path) -> None:
    """Raises ``ManifestError`` for what is better not opened. To open a pipe would wait for somebody to write to it."""
    if leads_out(path):
        raise ManifestError(f"{path} leads to another directory")
    if os.path.lexists(path) and not path.is_file():
        raise ManifestError(f"{path} is not a file")


@dataclass(frozen=True, slots=True)
class Found:
    """The runs in a base directory.

    Attributes:
        jobs: Directories by job id.
        continued: By job, the earlier job that it continued in directories of its own.
    """

    jobs: Mapping[str, tuple[RankRun, ...]]
    set_aside: tuple[SetAside, ...]
    continued: Mapping[str, str] = field(default_factory=dict)

    def others_of_the_launch(self, job: str) -> set[int]:
        """Ranks that have recordings of the same launch, and none of this job."""
        launches = {run.manifest.launch for run in self.jobs[job]} - {""}
        ranks = {run.rank for runs in self.jobs.values() for run in runs if run.manifest.launch in launches}
        return ranks - {run.rank for run in self.jobs[job]}

    def job_ids(self) -> list[str]:
        """The ids of jobs that no later job continues, in order of time."""
        return self._in_time(set(self.jobs) - self.carried_on - set(self.continued.values()) or self.jobs)

    def matching(self, beginning: str | None) -> list[str]:
        """The ids that begin so, also of jobs that a later one continued; None: those that no later job continues."""
        if beginning is None:
            return self.job_ids()
        every = (set(self.jobs) - self.carried_on) or self.jobs
        return self._in_time(job for job in every if job.startswith(beginning))

    def line_of(self, job: str) -> list[str]:
        """The ids of a job and of all that it continued, in whichever directories."""
        found: dict[str, None] = {}
        waiting = [job]
        while waiting:
            one = waiting.pop()
            if one in self.jobs and one not in found:
                found[one] = None
                waiting += [run.job_id for each in self.jobs[one] for run in each.manifest.resumed]
                waiting += [self.continued[one]] if one in self.continued else []
        return list(found)

    @property
    def carried_on(self) -> set[str]:
        """The jobs whose directories a later job continued."""
        return {
            run.job_id for job, runs in self.jobs.items() for one in runs for run in one.manifest.resumed if run.job_id != job
        }

    def _in_time(self, jobs: Iterable[str]) -> list[str]:
        return sorted(jobs, key=lambda job: (min(_started(one) for one in self.jobs[job]), job))


def discover(base: Path, span: Span | None = None) -> Found:
    """Look at every directory of a rank in ``base``.

    Args:
        span: Only those of these moments and between.

    Raises:
        MergeError: ``base`` cannot be listed.
    """
    try:
        names = sorted(os.listdir(base))
    except OSError as error:
        raise MergeError(f"{base} cannot be read: {error.strerror or error}. Name the directory the ranks wrote to.") from error
    jobs: dict[str, list[RankRun]] = {}
    aside = []
    for name in names:
        known = RankDirectory.parse(name)
        if known is None or (span is not None and in_order(known.timestamp, span) is None):
            continue
        try:
            run = _run_in(base / name, known.rank)
        except ManifestError as error:
            aside.append(SetAside(name, str(error)))
        else:
            jobs.setdefault(run.manifest.job_id, []).append(run)
    found, unmatched = matched({job: tuple(runs) for job, runs in jobs.items()})
    aside += [SetAside(run.directory.name, reason) for run, reason in unmatched]
    later = continued_jobs({job: [run.manifest for run in runs] for job, runs in found.items()}) if len(found) > 1 else {}
    return Found(found, tuple(aside), later)


def choose(found: Found, job: str | None) -> str:
    """The id of the job to merge.

    Args:
        job: Its beginning, or None where there is only one that no later job continues.

    Raises:
        MergeError: there is none, or more than one.
    """
    ids = found.matching(job)
    if len(ids) == 1:
        return ids[0]
    every = found.matching("")
    known = "\n".join(f"  --job {one}  {_described(found.jobs[one])}" for one in every)
    if not known:
        why = sorted({f"\n  {one.path}: {one.reason}" for one in found.set_aside})
        raise MergeError("there is no directory here of a rank with a manifest that can be merged" + "".join(why[:5]))
    wrong = f"{job!r} begins the ids of {len(ids)} jobs" if job else f"there are {len(ids)} jobs here"
    raise MergeError(f"{wrong}. Choose one:\n{known}")


def runs_of(found: Found, job: str) -> tuple[RankRun, ...]:
    """The directories of a job and of those that it continued: by rank, and of a rank in order of time."""
    jobs = [found.jobs[one] for one in found.line_of(job)]
    runs = [run for each in jobs for run in each]
    by_rank: dict[int, list[RankRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.rank, *order_of(run.manifest), run.directory.name)):
        by_rank[run.rank].append(run)
    ranks = [_ended(rank) for rank in by_rank.values()]
    if len(jobs) == 1 and not any(run.manifest.resumed for run in runs):
        return tuple(chain.from_iterable(ranks))
    together = all(len({run.manifest.job_id for run in each}) == 1 for each in jobs)  # else ranks have ids of their own
    lines = [runs] if together else ranks
    return tuple(run for line in lines for run in _in_line(line, ranks if together else [line]))


def _in_line(line: Iterable[RankRun], ranks: Iterable[Sequence[RankRun]]) -> Iterator[RankRun]:
    """Directories of ranks without the steps that a later run of the line began anew, on this rank or on another."""
    parts = parts_of(run.manifest for run in line)
    for run in chain.from_iterable(ranks):
        end, manifest = cut(run.manifest, parts)
        yield replace(run, end=min(end, run.end), manifest=manifest, line=parts)


def unmerged_formats(runs: Iterable[RankRun]) -> list[SetAside]:
    """The directories of ranks that recorded in no format that can be merged."""
    return [
        SetAside(
            one.directory.name,
            f"rank {one.rank} recorded {' and '.join(formats)} alone, which cannot be merged: "
            "add parquet, hdf5 or csv to `format`",
        )
        for one in runs
        if (formats := one.manifest.formats) and not any(name in FORMATS and FORMATS[name].merged for name in formats)
    ]


def _ended(runs: Sequence[RankRun]) -> list[RankRun]:
    """Each with the first step of those after it as its end."""
    ends = [one.manifest.first_step for one in runs]
    return [
        replace(run, end=min((end for end in ends[index + 1 :] if end is not None), default=NO_END))
        for index, run in enumerate(runs)
    ]


class _UsedConfig(StrictRecord):
    """What the merge reads of the configuration that a rank used."""

    module_ranks: list[Natural] = Field(default_factory=list)
    ndigits: Natural = 6
    targets: dict[str, Any] = Field(default_factory=dict)


def _run_in(directory: Path, rank: int) -> RankRun:
    path = directory / manifest_format.MANIFEST_FILE
    _check_file(path)
    manifest = manifest_format.read_manifest(path)
    if manifest.rank != rank:
        raise ManifestError(f"{path} is that of rank {manifest.rank}")
    if manifest.world_size > MOST_RANKS:
        raise ManifestError(f"{path} is damaged: world_size: no job has {manifest.world_size} ranks")
    manifest_format.parsed(_UsedConfig, json.dumps(manifest.config).encode(), path)
    run = RankRun(directory, manifest)
    try:
        moment(manifest.started), moment(manifest.saved)
    except (ValueError, OverflowError) as error:
        raise ManifestError(f"{path} is damaged: started or saved: {error}") from error
    return run


def _started(run: RankRun) -> float:
    """Seconds since 1970."""
    return moment(run.manifest.started)


def _described(runs: Sequence[RankRun]) -> str:
    ranks = len({run.rank for run in runs})
    first = runs[0].manifest
    watched = "" if first.watched is None else f", {first.watched.role} (number {first.watched.number + 1} in its process)"
    return f"started {first.started}, {ranks} of {counted(first.world_size, 'rank')}{watched}"


# --- Which directories of one launch are of the same recording, where ranks began unequal numbers of them.
#
# Ranks agree on a job id for each model by what is the same on all ranks (``monitor.coordinator.manifest_format``).
# Where a rank watches one more model that looks like another's (an average of the weights, not wrapped either), that id
# goes by how many came before, and is another on each rank. All manifests together tell more: the names of the
# parameters, and which rank has how many.

Runs = tuple["RankRun", ...]

UNMATCHED: Final = (
    "ranks {ranks} of this launch have different numbers of recordings of models that look alike ({role}). It is not known "
    "which recordings belong to one model, so none is merged. Move the directories of the model that only some ranks "
    "watch elsewhere"
)


def matched(jobs: Mapping[str, Runs]) -> tuple[dict[str, Runs], list[tuple[RankRun, str]]]:
    """The recordings of all ranks that belong together, by a job id that one of them has.

    Args:
        jobs: Directories by the job id in their manifest.

    Returns:
        Directories by job id; and those that cannot be matched, with the reason.
    """
    found: dict[str, Runs] = {}
    alone: list[tuple[RankRun, str]] = []
    of_roles: dict[tuple[str, str], list[str]] = defaultdict(list)
    for job, runs in jobs.items():
        known = {(run.manifest.launch, _role(run)) for run in runs}
        if len(known) == 1 and all(next(iter(known))):
            of_roles[next(iter(known))].append(job)
        else:
            found[job] = runs
    for (_, role), ids in of_roles.items():
        every = [run for job in ids for run in jobs[job]]
        if len(ids) == 1 and not _repeats(every):
            found[ids[0]] = jobs[ids[0]]
            continue
        together, unmatched = _matched(every)
        found |= _named(together, found)
        reason = UNMATCHED.format(ranks=_spelled(every), role=role)
        alone += [(run, reason) for run in unmatched]
    return found, alone


def _role(run: RankRun) -> str:
    return "" if run.manifest.watched is None else run.manifest.watched.role


def _names(run: RankRun) -> str:
    return "" if run.manifest.watched is None else run.manifest.watched.names


def _repeats(runs: Iterable[RankRun]) -> bool:
    """Whether a rank is among them twice: as of two recordings, and not as of one that was carried on elsewhere."""
    seen = [(run.rank, run.manifest.recording) for run in runs]
    return len({rank for rank, _ in seen}) < len(set(seen))


def _matched(runs: Sequence[RankRun]) -> tuple[list[Runs], list[RankRun]]:
    """Recordings of one role: those of the same names in the order in which they began; failing that, all in that order."""
    ranks = {run.rank for run in runs}
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for run in runs:
        counts[_names(run)][run.rank] += 1
    everywhere = {names for names, each in counts.items() if set(each) == ranks and len(set(each.values())) == 1}
    of_names = [run for run in runs if _names(run) in everywhere]
    others = [run for run in runs if _names(run) not in everywhere]
    together = [one for names in everywhere for one in _in_order(run for run in of_names if _names(run) == names)]
    if not others:
        return together, []
    totals = Counter(run.rank for run in others)
    if set(totals) == ranks and len(set(totals.values())) == 1:  # stages of a pipeline, experts of their own
        return [*together, *_in_order(others)], []
    apart = {names for names in counts if everywhere and len(set(counts[names].values())) == 1} - everywhere
    together += [one for names in apart for one in _in_order(run for run in others if _names(run) == names)]
    return together, [run for run in others if _names(run) not in apart]


def _in_order(runs: Iterable[RankRun]) -> Iterator[Runs]:
    """The first of each rank, the second of each rank …"""
    by_rank: dict[int, list[RankRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.manifest.recording):
        by_rank[run.rank].append(run)
    for place in range(max(map(len, by_rank.values()))):
        yield tuple(each[place] for each in by_rank.values() if place < len(each))


def _named(together: Iterable[Runs], taken: Mapping[str, object]) -> dict[str, Runs]:
    """By the id of the lowest rank that has one of its own."""
    found: dict[str, Runs] = {}
    for runs in sorted(together, key=lambda runs: (len(runs), min((run.rank, run.directory.name) for run in runs))):
        ids = [run.manifest.job_id for run in sorted(runs, key=lambda run: run.rank)]
        own = sha256("".join(ids).encode()).hexdigest()[:32]
        found[next((one for one in ids if one not in found and one not in taken), own)] = runs
    return found


def _spelled(runs: Iterable[RankRun]) -> str:
    ranks = sorted({run.rank for run in runs})
    return ", ".join(map(str, ranks[:20])) + (f" and {len(ranks) - 20} more" if len(ranks) > 20 else "")


# --- Directories without manifests, as other tools write them. Nothing says which of them are of one job.


def without_manifests(base: Path, found: Found, span: Span | None) -> Found:
    """The directories that have no manifest, as those of a job without a name, each rank with one.

    Args:
        found: In ``base``, no job.

    Raises:
        MergeError: a rank has several, or there are none.
    """
    named = {one.path: RankDirectory.parse(one.path) for one in found.set_aside}
    known = {name: one for name, one in named.items() if one and _has_no_manifest(base / name)}
    if not known:
        raise MergeError(_why_none(base, span, found.set_aside))
    ranks = Counter(one.rank for one in known.values())
    for rank in sorted(rank for rank, count in ranks.items() if count > 1):
        names = ", ".join(sorted(name for name, one in known.items() if one.rank == rank))
        raise MergeError(
            f"rank {rank} has {ranks[rank]} directories in this range of time, and no manifest says that one continues the "
            f"other: {names}. Choose a narrower range."
        )
    runs = tuple(RankRun(base / name, _unknown(one, sorted(ranks))) for name, one in known.items())
    return Found({"": runs}, tuple(one for one in found.set_aside if one.path not in known))


def asked_of(runs: Iterable[RankRun]) -> frozenset[str]:
    """The words among the ops of configurations, and in changes of configurations."""
    manifests = [one.manifest for one in runs]
    asked = {repr(one.config.get("ops")) for one in manifests}  # whatever stands there
    changes = {change.changed for one in manifests for change in one.configurations}
    return frozenset(re.findall(r"\w+", " ".join(asked | changes)))


def _has_no_manifest(directory: Path) -> bool:
    return directory.is_dir() and not os.path.lexists(directory / manifest_format.MANIFEST_FILE)


def _unknown(directory: RankDirectory, ranks: list[int]) -> ManifestRecord:
    """A manifest that says no more than the names of directories do."""
    none, began = manifest_format.NO_STEPS, "1970-01-01T00:00:00+00:00"
    empty: dict[str, Any] = {name: {} for name in ("groups", "versions", "dropped", "lost", "failures", "notes")}
    return ManifestRecord(
        schema_version=manifest_format.SCHEMA_VERSION, job_id="", job_agreed=False, timestamp=directory.timestamp,
        started=began, saved=began, closed=True, rank=directory.rank, world_size=ranks[-1] + 1, host="", pid=0, config_path="",
        config={"module_ranks": ranks}, formats=(), series=None,
        steps=manifest_format.RecordedSteps(written=none, skipped=none, incomplete=none), **empty,
    )  # fmt: skip


def _why_none(base: Path, span: Span | None, set_aside: Sequence[SetAside]) -> str:
    if set_aside:
        first = f"{set_aside[0].path}: {set_aside[0].reason}"
        return f"no directory of a rank in {base} can be read. The first of {len(set_aside)}: {first}"
    if RankDirectory.parse(base.absolute().name) is not None:
        return f"{base} is the directory of one rank. Name the one that it lies in."
    known = [one.timestamp for name in os.listdir(base) if (one := RankDirectory.parse(name)) is not None]
    if span is None or not known:
        return f"there is no directory of a rank in {base}. Name the one that the ranks wrote to."
    first, *_, last = sorted((*known, known[0]), key=timestamp_fields)
    return f"there is no directory of a rank from {' to '.join(span)} in {base}. There are some from {first} to {last}."
