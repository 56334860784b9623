"""What a report is made of: the rows of a merged set, read kind by kind, what ranks and events say, and what was not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from monitor.anomalies.overflows import has_loss_scale, overflows_among
from monitor.anomalies.ranking.loading import NothingReadError, folder_of
from monitor.anomalies.ranking.ranking import Ranking, ranking_of
from monitor.bars import Progress, silent
from monitor.coordinator.manifest_format import MANIFEST_FILE, ManifestError, ManifestRecord, read_manifest
from monitor.coordinator.series_file import read_columns
from monitor.failures import NEW_OPTIMIZERS, NOTHING_OF, SHORT_STEPS
from monitor.merge.execution import MergeError
from monitor.merge.merge import Wanted, merge
from monitor.merge.report import ranges_of, steps_in
from monitor.query.opened import Lacking, open_source, total_norms
from monitor.query.sources import MergedSet, NameFilter, QueryError, RankDirectories, RowChoice, in_order
from monitor.report.bands import Means, Numbers
from monitor.report.history import WINDOW, Axis, Exempt, Ints, KindHistory, SuddenBound
from monitor.report.kind_reader import VALUE, KindReader, spans_of
from monitor.series import (
    CLIPPED_NORM,
    DIRECTION_KIND,
    GRAD_NORM,
    KIND_TABLE,
    KINDS,
    LEARNING_RATE,
    MOMENT_KINDS,
    REPLICA_KIND,
    RUN_KIND,
)

TOTAL_KIND: Final = "total_norm"
"""The norm over all tensors, computed from rows, as if it were a kind with one series."""
NORMS_OF: Final = "grad_reduced"
"""The kind whose rows give the total norm where the run has no ``GRAD_NORM``."""

NOT_PICTURED: Final = ("replica",)
"""Kinds that are only compared."""
NOT_JUDGED: Final = (*NOT_PICTURED, DIRECTION_KIND)
"""Kinds that say nothing by themselves: a share of equal signs is finite, and any share may be healthy."""

MOST_BINS: Final = 2000
FEWEST_BINS: Final = 100
MOST_CELLS: Final = 20_000_000
"""Most cells of all heat maps of tensors and steps together."""
MOST_KEPT: Final = 8_000_000
"""Cells of single ranks of a kind, kept for curves. Beyond that, the rows of some tensors are read again."""
MOST_EVENTS: Final = 50

MOST_ASKED: Final = 8
"""Directories whose series files are read."""
_REGULAR: Final = {kind.name for kind in KIND_TABLE if kind.warned}
"""Kinds with rows in each step."""
_FIELDS: Final = {kind.name: kind.field for kind in KIND_TABLE}


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
        gradients: By step, as far as a check has asked, the weights with a gradient in it, and its norm as a share of the
            greatest one.
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
    gradients: dict[int, Mapping[str, float]] = field(default_factory=dict)

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

    def steps_of(self, what: str) -> Ints:
        """Steps of the merge's report, ascending."""
        return steps_in(ranges_of(self.told[what]))

    @cached_property
    def rates(self) -> dict[str, tuple[Ints, Numbers]]:
        """For each learning rate, all recorded steps, and the greatest number of all ranks."""
        rows = self.kinds.get(RUN_KIND)
        names = [name for name in rows.names if name.startswith(LEARNING_RATE)] if rows is not None else []
        means = Means(self.axis.steps)
        if rows is None or not names:
            return {}
        rows.feed(means, None, names)
        return {name: means.of(rows.numbers[name])[::2] for name in names}

    @cached_property
    def overflows(self) -> Ints:
        """Steps that the optimizer skipped because the loss scale was too high, ascending."""
        if not any(has_loss_scale(one.notes) for one in self.manifests.values()):
            return np.zeros(0, np.int64)
        return overflows_among(self.steps_of("skipped_steps"), self.steps_of("steps"))


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
    overflows = facts.overflows.tolist()
    for kind, rows in facts.kinds.items():
        bounds = MOST_KEPT, MOST_EVENTS, SuddenBound.of(kind), Exempt(rows.of_few, rows.scaled, overflows)
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
        read = rows.rows_at(range(first.first, first.first + 1), ("name",), None)
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
    written = steps_in(range(first, last + 1, interval) for first, last, interval in recorded)
    return len(np.setdiff1d(written, facts.axis.steps))


def ended_early(facts: Facts) -> dict[str, int]:
    """The kinds of which no rank has rows at the last steps, and of each the last step with rows."""
    last = {kind: rows.spans[-1].last for kind, rows in {**facts.kinds, **facts.others}.items() if kind in _REGULAR}
    return {kind: step for kind, step in last.items() if (regular_steps(facts, kind) > step).sum() >= 2}


def lacking_steps(facts: Facts) -> dict[str, Ints]:
    """The kinds of which no rank has rows at some steps, and has some before and after them.

    Gradients of as many short steps as a rank has counted are not among them, nor are moments of as many first steps of new
    optimizers.
    """
    read = {kind: rows.steps for kind, rows in facts.kinds.items() if kind in _REGULAR and len(rows.steps)}
    due = {kind: regular_steps(facts, kind) for kind in read}
    lacking = {kind: np.setdiff1d(due[kind][(due[kind] > of[0]) & (due[kind] < of[-1])], of) for kind, of in read.items()}
    short = max((one.failures.get(f"{NOTHING_OF}{SHORT_STEPS}", 0) for one in facts.manifests.values()), default=0)
    new = max((int(one.notes.get(NEW_OPTIMIZERS, 0)) for one in facts.manifests.values()), default=0)
    explained = {"grad_unreduced": short} | dict.fromkeys(MOMENT_KINDS, new)
    return {kind: of for kind, of in lacking.items() if len(of) > explained.get(kind, 0)}


def regular_steps(facts: Facts, kind: str) -> Ints:
    """Recorded steps in which the optimizer stepped, and in which ``intervals`` ask for the kind.

    If the configuration was changed while the run recorded, the steps of a kind with an interval are not known, and there are
    none.
    """
    steps: Ints = np.setdiff1d(facts.steps_of("steps"), facts.steps_of("skipped_steps"))
    asked = {"start_step": 0, "step_interval": 1, "intervals": {}, **facts.first}
    interval = asked["intervals"].get(_FIELDS.get(kind, ""), 1)
    if interval == 1:
        return steps
    changed = any(one.configurations for one in facts.manifests.values())
    return steps[:0] if changed else steps[(steps - asked["start_step"]) % (asked["step_interval"] * interval) == 0]


def _axis(told: Mapping[str, Any], series: int) -> Axis:
    """Recorded steps, and steps that are known to be missing."""
    known = [*ranges_of(told["steps"]), *(each for one in told["dropped"]["listed"] for each in ranges_of(one["steps"]))]
    steps = np.unique(steps_in(known))
    most = max(FEWEST_BINS, min(MOST_BINS, MOST_CELLS // max(series, 1)))
    return Axis(steps, max(min(len(steps), most), 1))


def _ranking(base: Path, told: Mapping[str, Any], manifests: Mapping[int, ManifestRecord]) -> tuple[Ranking | None, str]:
    known = {str(told["job_id"]), *(one.job_id for one in manifests.values())}
    known |= {str(one["continued"]) for one in told.get("joints", {}).get("listed", ())}
    try:
        return ranking_of(folder_of(base), MOST_EVENTS, jobs=known), ""
    except (NothingReadError, MergeError, OSError) as error:
        return None, str(error).partition("\n")[0]


def _read_total_norm(facts: Facts) -> None:
    """The total norm of each step from the rows of whole tensors, if the run does not have it."""
    own = facts.kinds.get(RUN_KIND)
    if (own is not None and (0, GRAD_NORM) in own.series) or NORMS_OF not in facts.source.kinds(whole=True):
        return
    exempt = Exempt(scaled=[0], overflows=facts.overflows.tolist())
    history = KindHistory(facts.axis, len(facts.ranks), MOST_KEPT, MOST_EVENTS, exempt=exempt)
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
