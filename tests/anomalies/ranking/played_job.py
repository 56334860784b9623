"""Jobs that are played: ranks with real manifests and series files, whose rows are numbered as a schedule runs them, and the
event files of what is made to fire.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from monitor.anomalies.events import EVENTS_FOLDER, Event, ScanSummary, Signal, events_file, judged_file, message
from monitor.anomalies.ranking.ranking import Ranked, Ranking, ranking_of
from monitor.coordinator.manifest import Manifest, RankFacts
from monitor.coordinator.manifest_format import StepRanges, StepsRecord
from monitor.coordinator.output import JobIdentity, RankDirectory
from monitor.coordinator.series_file import Edge, Flow, Pass
from monitor.failures import Failures
from monitor.series import NO_MICRO_STEP, Placement, Series, SeriesTable, Shard
from monitor.stats.partials import COLUMNS, KindRows, Partials, TensorLayout
from monitor.stats.table import StepRows

JOB = "1a2b3c4d" * 4
TIMESTAMP = "Dec03_21-34-40"
NAN = math.nan

FORWARD = ("", "a", "a.x", "a.y", "b")
"""A root of two modules, the first of which has two itself."""

ROWS = {
    "actv": (
        *(".input", "a.input", "a.x.input", "a.x.output", "a.y.input", "a.y.output"),
        *("a.output", "b.input", "b.output", ".output"),
    ),
    # A container's output is its last child's: one tensor, and the child's hook comes first.
    "actv_grad": (
        *("b.output", ".output", "b.input", "a.output", "a.y.output", "a.y.input", "a.x.output"),
        *("a.x.input", "a.input", ".input"),
    ),
}
EDGES = (
    *(("actv", ".input", "a.input"), ("actv", ".input", "a.x.input"), ("actv", "a.x.output", "a.y.input")),
    *(("actv", "b.output", ".output"), ("actv_grad", "b.output", ".output"), ("actv_grad", "b.input", "a.output")),
    *(("actv_grad", "a.y.input", "a.x.output"),),
)
"""Of the same tensor. What ``a`` gives is not what ``a.y`` gives, and ``b`` is given something else again: functions stand
between.
"""

PARAMETERS = ("a.x.weight", "b.weight")
AT_THE_STEP = ("grad_reduced", "param_origin", "exp_avg", "param_updated")


@dataclass
class PlayedRank:
    """One rank. What it measures may be left out, kind by kind and name by name.

    Attributes:
        groups: By role; ``pp`` among them.
        without: Kinds, or ``kind/name``, that are not measured.
        odd: Names of further activations.
        collectives: Names of what goes into collectives and comes out of them, after the backward.
        shards: ``kind/name`` of which the rank has a part.
        written: Steps that its manifest has; None: those that were judged.
        trained: The first and the last step of its training.
        not_judged: Steps by reason.
        kinds: Those that were judged in some of the steps only, and these steps.
        rows_judged: In all; None: as many as its steps have.
        config: What the manifest says of the configuration, beside ``module_ranks``.
        passes: In which the rank goes through its chunks; None: no one has seen.
        recorded_passes: What the manifest says of them, if something else.
        launch: What it shares with other recordings that were begun together.
    """

    rank: int = 0
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    passes: Sequence[Pass] | None = (Pass(True, 0, 0), Pass(False, 0, 0))
    without: Sequence[str] = ()
    steps: Sequence[int] = (0, 1, 2)
    skipped: Sequence[int] = ()
    recording: int = 0
    chunks: int = 1
    notes: Mapping[str, str] = field(default_factory=dict)
    job: str = JOB
    host: str = ""
    not_kept: Mapping[str, int] = field(default_factory=dict)
    closed: bool = True
    edges: Sequence[tuple[str, str, str]] = EDGES
    with_manifest: bool = True
    replicas: Sequence[str] = ()
    judged: bool = True
    each_micro_step: bool = False
    combined: bool = False
    module_ranks: Sequence[int] = ()
    odd: Sequence[str] = ()
    collectives: Sequence[str] = ()
    shards: Sequence[str] = ()
    recorded_passes: Sequence[Pass] | None = None
    launch: str = ""
    written: Sequence[int] | None = None
    trained: tuple[int, int] | None = None
    not_judged: Mapping[str, Sequence[int]] = field(default_factory=dict)
    kinds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    rows_judged: int | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    fired: list[tuple[str, str, int, int, int, str, float, str, float | None]] = field(default_factory=list)

    def fire(
        self,
        kind: str,
        name: str,
        step: int = 1,
        micro_step: int | None = None,
        chunk: int = 0,
        op: str = "nans",
        value: float = NAN,
        rule: str = "AnomalyNan",
        mean: float | None = None,
    ) -> PlayedRank:
        """Let a rule fire on a row; it is said of which micro-step where there are several."""
        if micro_step is None:
            micro_step = 0 if kind in ROWS and not self.combined else NO_MICRO_STEP
        self.fired.append((kind, name, step, micro_step, chunk, op, value, rule, mean))
        return self

    @property
    def mates(self) -> tuple[int, ...]:
        return tuple(self.groups.get("pp", (self.rank,)))

    @property
    def directory(self) -> str:
        return str(RankDirectory(TIMESTAMP, self.rank, f"{self.rank:04x}{self.recording:04x}"))

    def rows(self) -> Iterator[tuple[str, str, int, int]]:
        """Kind, name, chunk and micro-step, in the order of a step."""
        passes = self.passes or (Pass(True, 0, 0), Pass(False, 0, 0))
        last = {one.vpp_stage: one for one in passes if not one.forward}
        for one in passes:
            kind = "actv" if one.forward else "actv_grad"
            for name in ROWS[kind]:
                yield kind, name, one.vpp_stage, NO_MICRO_STEP if self.combined else one.micro_step
            if one.forward:
                yield from (("actv", name, one.vpp_stage, one.micro_step) for name in self.odd)
            if self.each_micro_step and not one.forward:
                yield from (("grad_unreduced", name, one.vpp_stage, one.micro_step) for name in reversed(PARAMETERS))
            elif last.get(one.vpp_stage) == one:
                yield from (("grad_unreduced", name, one.vpp_stage, NO_MICRO_STEP) for name in reversed(PARAMETERS))
        yield from (("other", name, 0, NO_MICRO_STEP) for name in self.collectives)
        for kind in AT_THE_STEP:
            yield from ((kind, name, chunk, NO_MICRO_STEP) for chunk in range(self.chunks) for name in PARAMETERS)
        yield from (("replica", name, 0, NO_MICRO_STEP) for name in self.replicas)
        yield "other", "loss", 0, NO_MICRO_STEP

    def _judged_kinds(self) -> dict[str, Sequence[int]]:
        """Of every kind the steps; nothing where no one asks for it, as in files of earlier versions."""
        measured = {kind for kind, name, *_ in self.rows() if self.measures(kind, name)}
        return {kind: self.kinds.get(kind, self.steps) for kind in measured} if self.kinds else {}

    def measures(self, kind: str, name: str) -> bool:
        return kind not in self.without and f"{kind}/{name}" not in self.without

    def write(self, base: Path) -> None:
        if self.with_manifest:
            self._write_manifest(base)
        if self.judged:
            self._write_events(base / EVENTS_FOLDER / f"rank{self.rank}")

    def _write_manifest(self, base: Path) -> None:
        table = SeriesTable()
        for kind, name, chunk, _ in self.rows():
            if self.measures(kind, name):
                table.index_of(Series(kind, chunk, name))
                if f"{kind}/{name}" in self.shards:
                    shard = Shard(tuple(self.groups["dp"]), (8,), (4 * self.rank,))
                    table.place(Series(kind, chunk, name), Placement(shard=shard))
        world = 1 + max([self.rank, *(rank for ranks in self.groups.values() for rank in ranks)])
        config = {"module_ranks": list(self.module_ranks), **self.config}
        job = JobIdentity(self.job, TIMESTAMP, launch=self.launch)
        facts = RankFacts(job, self.rank, world, self.groups, {}, config, "", ["csv"], self.chunks, self.recording)
        manifest = Manifest(base / self.directory, facts, table, Failures(self.rank))
        manifest.flows(Flow(tuple(self._edges(table)), tuple(self.recorded_passes or self.passes or ())))
        for key, note in self.notes.items():
            manifest.note(key, note)
        for step in self.steps if self.written is None else self.written:
            manifest.written(step_rows(step, table, "skipped" if step in self.skipped else "complete"))
        manifest.close()

    def _edges(self, table: SeriesTable) -> Iterator[Edge]:
        known = set(table)
        for kind, source, target in self.edges:
            for chunk in range(self.chunks):
                ends = Series(kind, chunk, source), Series(kind, chunk, target)
                if known.issuperset(ends):
                    yield Edge(*map(table.index_of, ends))

    def _write_events(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        call_ids = {row: call_id for call_id, row in enumerate(self.rows())}
        entries: dict[str, object] = {}
        for kind, name, step, micro_step, chunk, op, value, rule, mean in sorted(
            self.fired, key=lambda one: (one[2], call_ids[one[0], one[1], one[4], one[3]])
        ):
            tag = Series(kind, chunk, name).tag(self.rank, micro_step)
            event = Event(
                rank=self.rank,
                step=step,
                micro_step=micro_step,
                pp_stage=self.mates.index(self.rank),
                vpp_stage=chunk,
                call_id=call_ids[kind, name, chunk, micro_step],
                tag_name=tag,
                message=message(Signal(rule, op, value, mean), tag, step),
                group_mates=self.mates,
            )
            entries[f"{event.key}_{op}" if event.key in entries else event.key] = event.model_dump(mode="json")
        (folder / events_file(self.recording)).write_text(json.dumps(entries))
        judged = ScanSummary(
            schema_version=1,
            job_id=self.job,
            rank=self.rank,
            directory=self.directory,
            recording=self.recording,
            host=self.host or f"node{self.rank}",
            events=len(entries),
            not_kept=dict(self.not_kept),
            steps=StepsRecord.of(StepRanges(self.steps)),
            rows=len(call_ids) * len(self.steps) if self.rows_judged is None else self.rows_judged,
            trained=self.trained,
            not_judged={reason: StepsRecord.of(StepRanges(steps)) for reason, steps in self.not_judged.items()},
            kinds={kind: StepsRecord.of(StepRanges(steps)) for kind, steps in self._judged_kinds().items()},
            closed=self.closed,
        )
        (folder / judged_file(self.recording)).write_text(judged.model_dump_json())


def step_rows(step: int, table: SeriesTable, status: str) -> StepRows:
    index = np.arange(len(table))
    rows = KindRows(index, index * 0, index, index * 0, Partials(np.zeros((len(COLUMNS), len(index)))))
    return StepRows(step, ("norm",), {"actv": rows}, [TensorLayout((2,), "torch.float32")], status)


def pipeline(size: int = 2, micro_steps: int = 1, **options: object) -> list[PlayedRank]:
    """Ranks that run GPipe's schedule."""
    passes = [Pass(way, 0, m) for way in (True, False) for m in range(micro_steps)]
    return [PlayedRank(rank, {"pp": range(size)}, passes, **options) for rank in range(size)]


def replicas(size: int = 2, **options: object) -> list[PlayedRank]:
    """Data-parallel ranks."""
    return [PlayedRank(rank, {"dp": range(size)}, **options) for rank in range(size)]


def ranked(base: Path, *ranks: PlayedRank, most: int = 100) -> Ranking:
    """Write the files of these ranks, and rank their events."""
    for one in ranks:
        one.write(base)
    return ranking_of(base / EVENTS_FOLDER, most)


def told(ranking: Ranking) -> list[tuple[int, str, bool]]:
    """Rank, kind and name, and whether it is an origin; in order."""
    return [(one.member.rank, spelled(one), one.is_origin) for one in ranking.ranked]


def origins(ranking: Ranking) -> list[str]:
    """Kind and name of those that are, with the rank in front where there are several."""
    several = len({one.member.rank for one in ranking.ranked}) > 1
    return [f"{one.member.rank}:{spelled(one)}" if several else spelled(one) for one in ranking.ranked if one.is_origin]


def spelled(one: Ranked) -> str:
    return f"{one.subject.recorded_as.kind}/{one.subject.recorded_as.name}"
