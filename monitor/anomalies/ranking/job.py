"""The ranks of a job with events, their manifests and groups, and a table of all their events."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.listeners import MOST
from monitor.anomalies.overflows import has_loss_scale, overflows_among
from monitor.anomalies.ranking.graph import SCALED, DataflowGraph, DataflowGraphs, Subject, subject_of
from monitor.anomalies.ranking.loading import Flaw, RecordingEvents
from monitor.config.model import CHECKSUM
from monitor.coordinator.manifest_format import MANIFEST_FILE, ManifestError, ManifestRecord, read_manifest
from monitor.coordinator.output import RankDirectory
from monitor.merge.discovery import Found, RankRun, discover
from monitor.merge.execution import MergeError
from monitor.merge.report import steps_in
from monitor.series import Series

MOST_RANKS: Final = 1_000_000
"""Upper bound on ranks, so that a damaged number does not cost hours of counting."""

ONE_BY_ONE: Final = frozenset({"dp", "pp"})
"""Roles of groups whose ranks do not exchange activations inside a module. Ranks of all other groups do."""


@dataclass(frozen=True, slots=True)
class PipelineGroup:
    """A pipeline of one recording.

    Attributes:
        recording: The recording's number, the same on all ranks.
    """

    recording: int
    mates: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Member:
    """One recording of one rank.

    Attributes:
        stage: Index of the rank in its pipeline group.
        manifest: The manifest of the events' run; None if it is missing or does not match.
        graph: The dataflow graph of all steps; None without a manifest.
    """

    events: RecordingEvents
    group: PipelineGroup
    manifest: ManifestRecord | None = None
    graph: DataflowGraph | None = None

    def graph_in(self, step: int) -> DataflowGraph | None:
        """The graph of the kinds that were judged in a step: a configuration may record some in few steps."""
        if step not in self._graphs:  # each event of the step asks
            judged, graph = self.events.judged, self.graph
            if graph is not None and judged.kinds and judged.steps.holds(step):
                graph = graph.without(frozenset(kind for kind, _ in graph.kinds if not judged.has(kind, step)))
            self._graphs[step] = graph
        return self._graphs[step]

    @cached_property
    def _graphs(self) -> dict[int, DataflowGraph | None]:
        return {}

    @property
    def rank(self) -> int:
        return self.events.files.rank

    @property
    def recording(self) -> int:
        return self.group.recording

    @property
    def host(self) -> str:
        return self.events.judged.host

    @cached_property
    def stage(self) -> int:
        return self.group.mates.index(self.rank)

    def place(self, chunk: int) -> int:
        """The index of a chunk among the chunks of all ranks of the pipeline."""
        return self.stage + chunk * len(self.group.mates)

    @property
    def places(self) -> int:
        """The number of chunks of the pipeline."""
        chunks = 1
        if self.manifest is not None and self.manifest.pipeline is not None:
            chunks = len(self.manifest.pipeline.stages)
        return chunks * len(self.group.mates)

    def ranks(self, role: str) -> tuple[int, ...]:
        """The ranks of this rank's group of a role; empty if unknown."""
        return () if self.manifest is None else self.manifest.groups.get(role, ())

    def has_judged_all(self, step: int) -> bool:
        """Whether every event of the step was found and kept: then tensors without an event are clean.

        In a flood, the first events of each step are kept. So a step without a kept event had none, unless steps were dropped.
        """
        judged = self.events.judged
        if not judged.steps.holds(step):
            return False
        return not judged.not_kept or (len(self.events) < MOST and not (self.events.step == step).any())

    def skipped(self, step: int) -> bool:
        """Whether the optimizer is known to have skipped the step."""
        return self.manifest is not None and self.manifest.steps.skipped.holds(step)

    @property
    def has_loss_scale(self) -> bool:
        """Whether the rank is known to have trained with a loss scale."""
        return self.manifest is not None and has_loss_scale(self.manifest.notes)

    @cached_property
    def overflows(self) -> frozenset[int]:
        """Steps that the optimizer skipped because the loss scale was too high."""
        if self.manifest is None or not self.manifest.steps.skipped.count or not self.has_loss_scale:
            return frozenset()
        of = self.manifest.steps
        skipped, written = (
            steps_in(range(first, last + 1, interval) for first, last, interval in one.ranges)
            for one in (of.skipped, of.written)
        )
        return frozenset(overflows_among(skipped, written).tolist())


@dataclass
class RankedJob:
    """All members, in the order of their ranks.

    Attributes:
        missing: Ranks of the job's groups that have judged no step.
        not_monitored: Ranks of the job that ``module_ranks`` leaves out.
        without_manifest: Ranks whose manifest, or series, could not be read.
    """

    members: Sequence[Member]
    flaws: list[Flaw] = field(default_factory=list)
    missing: Sequence[int] = ()
    not_monitored: Sequence[int] = ()
    without_manifest: Sequence[int] = ()

    @cached_property
    def _by_rank(self) -> Mapping[tuple[int, int], int]:
        return {(one.recording, one.rank): number for number, one in enumerate(self.members)}

    def member_of(self, recording: int, rank: int) -> Member | None:
        number = self._by_rank.get((recording, rank))
        return None if number is None else self.members[number]

    @cached_property
    def has_several_recordings(self) -> bool:
        return len({one.recording for one in self.members}) > 1

    def at_place(self, group: PipelineGroup, place: int) -> Member | None:
        """The member with the chunk at index ``place`` of the pipeline."""
        return self.member_of(group.recording, group.mates[place % len(group.mates)])

    def replicas(self, member: Member) -> list[Member]:
        """The data-parallel replicas of a member: members of the same stage with other data, itself included."""
        found = (self.member_of(member.recording, rank) for rank in member.ranks("dp"))
        return [one for one in found if one is not None]

    @cached_property
    def joined(self) -> Sequence[int]:
        """A number for each member. Members that exchange activations inside modules share the number."""
        number = list(range(len(self.members)))
        for one, member in enumerate(self.members):
            for other in self._exchanging(member):
                a, b = _first(number, one), _first(number, other)
                number[max(a, b)] = min(a, b)
        return [_first(number, one) for one in number]

    def _exchanging(self, member: Member) -> Iterator[int]:
        roles = () if member.manifest is None else set(member.manifest.groups) - ONE_BY_ONE
        for rank in {rank for role in roles for rank in member.ranks(role)}:
            other = self._by_rank.get((member.recording, rank))
            if other is not None and self.members[other].stage == member.stage:
                yield other


def job_of(folder: Path, read: Iterable[RecordingEvents | Flaw]) -> RankedJob:
    """Combine the read events with the manifests around ``folder``."""
    every = list(read)
    flaws = [one for one in every if isinstance(one, Flaw)]
    found = _manifests(folder.absolute().parent)
    matching = _Matching(found, flaws)
    judged = [one for one in every if isinstance(one, RecordingEvents)]
    members = [matching.member(one) for one in _of_one_job(judged, matching, flaws)]
    job = RankedJob(members, flaws, without_manifest=sorted({one.rank for one in members if one.graph is None}))
    ranks, chosen = _ranks(members, found)
    known = {one.rank for one in members}
    job.missing = sorted(chosen - known - {one.rank for one in flaws})
    job.not_monitored = sorted(ranks - chosen - known)
    return job


def _manifests(base: Path) -> Found:
    try:
        return discover(base)
    except MergeError:
        return Found({}, ())


def _of_one_job(events: Sequence[RecordingEvents], matching: _Matching, flaws: list[Flaw]) -> Sequence[RecordingEvents]:
    """The events of the most frequent job or its launch; others become flaws."""
    of_launches: dict[str, list[RecordingEvents]] = {}
    for one in events:
        of_launches.setdefault(matching.launch(one), []).append(one)
    most = max(of_launches, key=lambda launch: (len(of_launches[launch]), launch), default="")
    chosen = of_launches.pop(most, [])
    for one in itertools.chain.from_iterable(of_launches.values()):
        reason = f"is of job {one.judged.job_id}, most others are of {chosen[0].judged.job_id}: it was not ranked"
        flaws.append(Flaw(one.files.rank, one.files.label, reason))
    return chosen


class _Matching:
    """Finds the manifest of each recording."""

    def __init__(self, found: Found, flaws: list[Flaw]) -> None:
        self._runs = {run.directory.name: run for runs in found.jobs.values() for run in runs}
        self._unreadable = {one.path: one.reason for one in found.set_aside}
        self._wirings = DataflowGraphs()
        self._flaws = flaws
        self._numbers = dict(_numbered(found))
        self._launches = {run.manifest.job_id: run.manifest.launch for run in self._runs.values()}
        self._numbers_of_jobs: dict[str, set[int]] = {}
        for directory, number in self._numbers.items():
            self._numbers_of_jobs.setdefault(self._runs[directory].manifest.job_id, set()).add(number)

    def launch(self, events: RecordingEvents) -> str:
        """The id that recordings share that were started together: the launch or, if unknown, the job."""
        run, job = self._runs.get(events.judged.directory), events.judged.job_id
        if run is None:  # other ranks of the job may have the launch
            return self._launches.get(job) or job
        return run.manifest.launch or job if run.manifest.job_id == job else job

    def member(self, events: RecordingEvents) -> Member:
        mates = events.mates or (events.files.rank,)
        try:
            manifest, graph = self._with_graph(self._run(events), events)
            pipeline = manifest.pipeline.ranks if manifest.pipeline else (manifest.rank,)
            if events.mates and pipeline != events.mates:
                raise ManifestError(f"its pipeline group is {list(pipeline)}, that of the events is {list(mates)}")
        except ManifestError as error:
            self._flaws.append(Flaw(events.files.rank, events.files.label, f"has no manifest to go with it: {error}"))
            return Member(events, PipelineGroup(self._recording(events), mates))
        return Member(events, PipelineGroup(self._recording(events), pipeline), manifest, graph)

    def _recording(self, events: RecordingEvents) -> int:
        """The recording's number, from its directory; without a directory, the number on other ranks of the job."""
        known = self._numbers.get(events.judged.directory)
        of_job = self._numbers_of_jobs.get(events.judged.job_id, set())
        if known is not None or len(of_job) == 1:
            return known if known is not None else next(iter(of_job))
        return max(self._numbers.values(), default=-1) + 1 + events.files.recording

    def _with_graph(self, run: RankRun, events: RecordingEvents) -> tuple[ManifestRecord, DataflowGraph | None]:
        """The manifest and graph. Read again if a running rank has replaced its series file meanwhile."""
        manifest = _manifest(run, events)
        try:
            return manifest, self._wirings.read(run.directory, manifest)
        except ManifestError:
            now = read_manifest(run.directory / MANIFEST_FILE)
            if now.series == run.manifest.series:
                raise
            manifest = _manifest(replace(run, manifest=now), events)
            return manifest, self._wirings.read(run.directory, manifest)

    def _run(self, events: RecordingEvents) -> RankRun:
        name = events.judged.directory
        if RankDirectory.parse(name) is None:
            raise ManifestError(f"{name!r} is not the name of a rank's directory")
        run = self._runs.get(name)
        if run is None:
            raise ManifestError(self._unreadable.get(name, f"there is no directory {name} with a manifest"))
        return run


def _numbered(found: Found) -> Iterator[tuple[str, int]]:
    """The number of the recording of each directory with a known launch. A rank with more models counts differently."""
    of_launches: dict[str, list[Sequence[RankRun]]] = {}
    for _, runs in sorted(found.jobs.items(), key=lambda one: (min(run.manifest.recording for run in one[1]), one[0])):
        launches = {run.manifest.launch for run in runs}
        if len(launches) == 1 and all(launches):
            of_launches.setdefault(launches.pop(), []).append(runs)
    for recordings in of_launches.values():
        for number, one in enumerate(recordings):
            yield from ((run.directory.name, number) for run in one)


def _manifest(run: RankRun, events: RecordingEvents) -> ManifestRecord:
    """The manifest, reduced to the earlier run if the events are of one."""
    manifest, judged = run.manifest, events.judged
    if (manifest.rank, manifest.recording) != (judged.rank, judged.recording):
        raise ManifestError(f"{run.directory.name} belongs to recording {manifest.recording} of rank {manifest.rank}")
    if manifest.job_id == judged.job_id:
        return manifest
    for earlier in manifest.resumed:
        if earlier.job_id == judged.job_id:
            return manifest.model_copy(update={"series": earlier.series, "job_id": earlier.job_id})
    raise ManifestError(f"{run.directory.name} is of job {manifest.job_id}, the events are of {judged.job_id}")


def _ranks(members: Sequence[Member], found: Found) -> tuple[set[int], set[int]]:
    """All ranks of the job, and the ranks that should have judged."""
    ranks = {rank for member in members for rank in member.group.mates}
    manifests = [member.manifest for member in members if member.manifest is not None]
    ranks.update(rank for manifest in manifests for group in manifest.groups.values() for rank in group)
    ranks.update(range(min(max((one.world_size for one in manifests), default=0), MOST_RANKS)))
    for job in {manifest.job_id for manifest in manifests}:
        ranks.update(run.rank for run in found.jobs.get(job, ()))
    chosen = {rank for manifest in manifests for rank in manifest.config.get("module_ranks") or ()}
    return ranks, ranks & chosen if chosen else ranks


def _first(number: list[int], one: int) -> int:
    while number[one] != one:
        one = number[one]
    return one


# --- The events of all ranks in one set of columns.

Columns = NDArray[np.int64]
Flags = NDArray[np.bool_]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class EventTable:
    """Columns with one entry per event, member by member, each in the order of its file.

    Attributes:
        members: The members that wrote the events, in the order of ranks.
        member: Index into ``members``; likewise ``subject``, ``op`` and ``rule`` index ``subjects``, ``ops`` and ``rules``.
        mean: The running mean that a value was compared with; NaN without one.
    """

    members: Sequence[Member]
    subjects: Sequence[Subject]
    ops: Sequence[str]
    rules: Sequence[str]
    member: Columns
    step: Columns
    micro_step: Columns
    call_id: Columns
    subject: Columns
    op: Columns
    rule: Columns
    value: NDArray[np.float64]
    mean: NDArray[np.float64]

    @classmethod
    def of(cls, members: Sequence[Member]) -> EventTable:
        """All events of these members."""
        series, ops, rules = _Numbers[Series](), _Numbers[str](), _Numbers[str]()
        every = [one.events for one in members]
        subject = [series.map(one.all_series, one.series) for one in every]
        op = [ops.map(one.all_ops, one.op) for one in every]
        rule = [rules.map(one.all_rules, one.rule) for one in every]
        member = np.repeat(np.arange(len(every)), [len(one) for one in every])
        values = np.concatenate([np.empty(0), *(one.value for one in every)])
        subjects = [subject_of(one) for one in series.listed]
        return cls(
            members,
            subjects,
            ops.listed,
            rules.listed,
            member,
            _joined([one.step for one in every]),
            _joined([one.micro_step for one in every]),
            _joined([one.call_id for one in every]),
            _joined(subject),
            _joined(op),
            _joined(rule),
            values,
            np.concatenate([np.empty(0), *(one.mean for one in every)]),
        )

    def __len__(self) -> int:
        return len(self.member)

    @cached_property
    def role(self) -> Columns:
        return self._of_subject(lambda one: one.role)

    @cached_property
    def chunk(self) -> Columns:
        return self._of_subject(lambda one: one.series.vpp_stage)

    @cached_property
    def meant(self) -> Columns:
        """A number for each series, the same for a series and its replicas."""
        numbers: dict[Series, int] = {}
        return self._of_subject(lambda one: numbers.setdefault(one.series, len(numbers)))

    @cached_property
    def finite(self) -> Flags:
        """Whether the tensor held neither NaN nor Inf: one of its statistics deviated."""
        counts = [number for number, op in enumerate(self.ops) if op in ("nans", "infs")]
        found: Flags = np.isfinite(self.value) & ~np.isin(self.op, counts)
        return found

    @cached_property
    def of_bits(self) -> Flags:
        """Whether a check of bits found that copies differ, or that something changed between steps. Such events have no value,
        and all ranks have them if nothing says which copy is wrong.
        """
        found: Flags = np.isin(self.op, [number for number, op in enumerate(self.ops) if op == CHECKSUM])
        return found

    @cached_property
    def not_finite(self) -> Flags:
        """Whether the tensor held a NaN or an Inf."""
        return ~self.finite & ~self.of_bits

    @cached_property
    def overflowed(self) -> Flags:
        """Whether a gradient was not finite because the loss scale was too high. The optimizer skipped the step."""
        skipped = np.zeros(len(self), np.bool_)
        for number, one in enumerate(self.members):
            if one.overflows:
                first, end = np.searchsorted(self.member, [number, number + 1])
                skipped[first:end] = np.isin(self.step[first:end], list(one.overflows))
        return skipped & self.not_finite & np.isin(self.role, SCALED)

    @cached_property
    def stage(self) -> Columns:
        return self._of_member(lambda one: one.stage)

    @cached_property
    def place(self) -> Columns:
        """The index of the event's chunk among all chunks of its pipeline."""
        return self.stage + self.chunk * self._of_member(lambda one: len(one.group.mates))

    @cached_property
    def rank(self) -> Columns:
        return self._of_member(lambda one: one.rank)

    @cached_property
    def recording(self) -> Columns:
        return self._of_member(lambda one: one.recording)

    @cached_property
    def groups(self) -> Sequence[PipelineGroup]:
        return list(dict.fromkeys(one.group for one in self.members))

    @cached_property
    def group(self) -> Columns:
        number = {group: index for index, group in enumerate(self.groups)}
        return self._of_member(lambda one: number[one.group])

    def _of_subject(self, what: Callable[[Subject], int]) -> Columns:
        return np.array([what(one) for one in self.subjects], dtype=np.int64)[self.subject]

    def _of_member(self, what: Callable[[Member], int]) -> Columns:
        return np.array([what(one) for one in self.members], dtype=np.int64)[self.member]


class _Numbers(dict[T, int]):
    """Numbers distinct values from several lists."""

    @property
    def listed(self) -> list[T]:
        return list(self)

    def map(self, listed: Iterable[T], pointers: Columns) -> Columns:
        """Convert indices into ``listed`` to indices into the list of all values."""
        return np.array([self.setdefault(one, len(self)) for one in listed], dtype=np.int64)[pointers]


def _joined(columns: Sequence[Columns]) -> Columns:
    return np.concatenate([np.empty(0, np.int64), *columns])
