"""The checks of a report. A check is good, bad or not looked at; one that did not run is never good."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple

from monitor.anomalies.bounds import GROUPS, Bound
from monitor.anomalies.odd_copies import STATE_KINDS
from monitor.anomalies.ranking.origins import notes_a_change
from monitor.anomalies.ranking.ranking import Ranked, capitalized, listed
from monitor.anomalies.ranking.report import advice, counts, notes
from monitor.coordinator.manifest_format import THINNED
from monitor.failures import NOTHING_OF
from monitor.report.bounds import beyond, first_beyond, within
from monitor.report.data import data_of_ranks, data_of_steps
from monitor.report.facts import NOT_JUDGED, TOTAL_KIND, Facts, ended_early, lacking_steps
from monitor.report.findings import BAD, GOOD, LOG, NOT_LOOKED_AT, CheckFinding, Place, State
from monitor.report.history import WARM_UP, Sudden, is_moment
from monitor.report.kind_reader import shows_all
from monitor.report.load_of_experts import load_of_experts
from monitor.report.optimizer import UPDATES_KIND, clipping, peak_of_rate, updates_of_layers
from monitor.report.replicas import replicas_agree, unchanged_between_steps
from monitor.report.spikes import SPIKES, is_loss, spikes
from monitor.report.trained_weights import lacked_gradient, trained_weights
from monitor.series import CLIPPED_NORM, EVALUATION, GRAD_NORM, GRADIENT_KINDS, HEALTH_KIND, REPLICA_KIND, RUN_KIND
from monitor.stats.loads import LOAD_KIND
from monitor.terminal import counted

STILL_RUNS_S: Final = 120.0
"""A rank saves its manifest every 30 seconds."""
MOST_SAID: Final = 3
"""Entries of a list in a sentence; more are counted."""


@dataclass(frozen=True)
class CheckResult:
    """A check of a run, done.

    Attributes:
        look: The command or the field of the configuration that looks, or looks closer.
        is_needed, of_training: See ``CheckEntry``.
    """

    name: str
    finding: CheckFinding
    look: str
    is_needed: bool
    of_training: bool = True

    @property
    def state(self) -> State:
        return self.finding.state


class RowEvent(NamedTuple):
    """A value of a kind that is not finite or changes suddenly. ``name`` is that of the series."""

    kind: str
    name: str
    rank: int
    sudden: Sudden

    @property
    def place(self) -> Place:
        return Place(self.sudden.step, self.rank, self.kind, self.name)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.sudden.value)

    @property
    def is_loss(self) -> bool:
        return self.kind == RUN_KIND and is_loss(self.name)


def row_events(facts: Facts, *, only_infinite: bool = False) -> list[RowEvent]:
    """What rows alone show, in the order in which it happened as far as rows say. A loss comes between forward and backward.
    Weights and moments are read late in a step, and were there before it.

    Args:
        only_infinite: Only values that are not finite: the first one of each kind, and the first event of each series.
    """
    found = []
    forward = list(facts.histories).index("actv") if "actv" in facts.histories else -1
    for number, (kind, history) in enumerate(facts.histories.items()):
        names = facts.kinds[kind].names
        infinite = (one for one in (history.first_infinite, *history.events) if one and not math.isfinite(one.value))
        for one in filter(partial(_is_fault, facts, kind), infinite if only_infinite else history.events):
            event = RowEvent(kind, names[one.series], facts.ranks[one.rank], one)
            late = (kind not in STATE_KINDS, forward + 0.5 if event.is_loss else number)
            found.append((one.step, late, one.micro_step, one.series, event))
    return [one[-1] for one in sorted(found)]


def _is_fault(facts: Facts, kind: str, one: Sudden) -> bool:
    """Whether a sudden change is a fault. Schedules change ratios of updates, and data changes the load of experts."""
    if not math.isfinite(one.value):
        return True
    rows = facts.kinds[kind]
    if kind == UPDATES_KIND:  # schedules end at zero, too, but not before the last step
        return not one.value and not lacked_gradient(facts, rows, one.series, one.step)
    return kind != LOAD_KIND and may_not_jump(kind, rows.series[one.series][1])


def may_not_jump(kind: str, name: str) -> bool:
    """Whether a change says something. Learning rates change by plan. Of other numbers that a loop logs nothing is known."""
    if kind == HEALTH_KIND:  # it has bounds
        return False
    return kind != RUN_KIND or is_loss(name) or name in (GRAD_NORM, CLIPPED_NORM)


def said(one: RowEvent, facts: Facts) -> str:
    """An event in a few words: the tensor, the place and the value."""
    sudden = one.sudden
    op = facts.kinds[one.kind].op
    what = one.name if one.kind in (RUN_KIND, TOTAL_KIND) else f"{one.kind} {one.name}"
    micro_step = "" if sudden.micro_step < 0 else f", micro-step {sudden.micro_step}"
    where = "" if one.kind == TOTAL_KIND else f" on rank {one.rank}"
    before = "" if math.isnan(sudden.typical) else f", {sudden.typical:.3g} before"
    return f"{what}{where} in step {sudden.step}{micro_step}: its {op} is {sudden.value:.6g}{before}"


# --- The checks, one function each.


def _alerts(facts: Facts) -> CheckFinding:
    ranking = facts.ranking
    if ranking is None:
        return CheckFinding(NOT_LOOKED_AT, facts.why_not_ranked)
    if ranking.has_faults:
        one = ranking.first_origin or ranking.ranked[0]
        return CheckFinding(BAD, f"{counts(ranking)}.", place_of(one, facts))
    if ranking.events:
        return CheckFinding(
            GOOD, f"{counts(ranking)}, all of gradients in steps that the optimizer skipped: the loss scale was too high."
        )
    if ranking.is_well:
        return CheckFinding(GOOD, advice(ranking))
    return CheckFinding(NOT_LOOKED_AT, " ".join([advice(ranking), *notes(ranking)]))


def place_of(one: Ranked, facts: Facts) -> Place:
    """The place of an event of the ranking, with the name that the tensor has in the pictures."""
    series = one.subject.recorded_as
    kind, name = (series.kind, series.name)
    if kind == REPLICA_KIND:
        kind, _, name = name.partition("/")
    if kind in facts.kinds:
        name = facts.kinds[kind].name_of(one.step, one.member.rank, series.vpp_stage, name)
    return Place(one.step, one.member.rank, kind, name)


_TOGETHER: Final = " Gradients had been changed together before, as by clipping: any of them may be the cause."
_RULES: Final = "Alert rules say where it began: switch them on, and run trainermon rank-anomalies."


def _finite(facts: Facts) -> CheckFinding:
    number = sum(one.infinite for one in facts.histories.values())
    if number:
        first = row_events(facts, only_infinite=True)[0]
        together = first.kind == "grad_reduced" and any(map(notes_a_change, facts.manifests.values()))
        values = counted(number, "value is", "values are")
        says = f"First came {said(first, facts)}.{_TOGETHER if together else ''} {values} NaN or infinite."
        return CheckFinding(BAD, says, first.place, _RULES)
    every = {**facts.kinds, **facts.others}
    asked = {kind: rows for kind, rows in every.items() if not shows_all(kind, [rows.op] if rows.op else [])}
    not_finite = (
        Bound((), "nans", 1, True, "elements are NaN"),
        Bound((), "infs", 1, True, "elements are infinite"),
        Bound((), "min", -math.inf, False, "an element is infinite"),
    )
    found = [
        one
        for kind, rows in asked.items()
        for bound in not_finite
        if bound.column in rows.ops and bound.column != rows.op
        for one in beyond(facts, kind, bound.column, bound)
    ]
    if found:
        return first_beyond(facts, found, _RULES)
    partly = {kind: rows.ops for kind, rows in asked.items() if not shows_all(kind, rows.ops)}
    unseen = [f"{kind} has only {', '.join(ops) or 'no op'}" for kind, ops in partly.items()]
    for kind, rows in facts.kinds.items():
        if rows.unseen:
            unseen.append(f"{counted(rows.unseen, f'row of {kind} has', f'rows of {kind} have')} no {rows.op}")
    if unseen or not facts.histories:
        return CheckFinding(NOT_LOOKED_AT, f"Not all can be seen: {_few(unseen, len(unseen))}." if unseen else _NO_NUMBER)
    masks = sum(one.masks for one in every.values())
    are = counted(masks, "row of inputs that is a mask", "rows of inputs that are masks")
    but = f", but for {are} of 0 and -Inf" if masks else ""
    skipped = _skipped(facts)
    says = f"No NaN and no infinity in {counted(sum(facts.told['rows'].values()), 'row')}{but}. {skipped}".strip()
    return CheckFinding(GOOD, says, then=skipped)


def _skipped(facts: Facts) -> str:
    """What is said of steps in which a loss scale was too high."""
    if not len(facts.overflows):
        return ""
    number = "1 step" if len(facts.overflows) == 1 else f"{len(facts.overflows):,} steps, first"
    return f"The optimizer skipped {number} {facts.overflows[0]}: the loss scale was too high, and gradients were not finite."


_NO_NUMBER: Final = "The run has no rows with a number."


_JUMPED: Final = "Look at its curve, at the learning rate and at the data of this step."
_STOPPED: Final = (
    "No optimizer changes this weight any more: look at the learning rate, and at what was frozen or loaded before this step. "
    "MindSpore's optimizers do not see weights that are loaded after their first step."
)
_CUT_OFF: Final = "The loss no longer depends on this weight: look at what was frozen or detached before this step."
_RESET: Final = "Look at what resets the optimizer's state, such as a checkpoint without it."
_ENDED: Final = {UPDATES_KIND: _STOPPED, **dict.fromkeys(GRADIENT_KINDS, _CUT_OFF)}
"""What is said of values of a kind that have become zero."""


def _sudden(facts: Facts) -> CheckFinding:
    if not (judged := sum(one.judged for one in facts.histories.values())):
        return CheckFinding(
            NOT_LOOKED_AT, f"No tensor has more than {WARM_UP} recorded values: there is no history to compare with."
        )
    found = [one for one in row_events(facts) if one.is_finite]
    peak = peak_of_rate(facts)
    if peak is not None and (not found or (peak.place.step or 0) <= found[0].sudden.step):
        return peak
    if not found:
        return CheckFinding(GOOD, f"{counted(judged, 'value is', 'values are')} like those before.")
    ended = _RESET if is_moment(found[0].kind) else _ENDED.get(found[0].kind, _JUMPED)
    then = _JUMPED if found[0].sudden.value else ended
    return CheckFinding(BAD, f"First came {said(found[0], facts)}.", found[0].place, then)


def _all_ranks(facts: Facts) -> CheckFinding:
    missing = facts.told["missing_ranks"]
    if missing:
        first = Place(rank=missing[0])
        return CheckFinding(BAD, f"{capitalized(listed(missing))} recorded nothing.", first, "See whether they ran at all.")
    known = facts.told["ranks"], facts.told["world_size"]
    return CheckFinding(GOOD, f"{len(known[0]):,} of {counted(known[1], 'rank')} recorded.")


def _to_the_end(facts: Facts) -> CheckFinding:
    stopped = facts.told["not_closed"]["listed"]
    if not stopped:
        return CheckFinding(GOOD, "Every rank ended cleanly.")
    first = min(stopped, key=lambda one: (one["after"], one["rank"]))
    last = max(one["after"] for one in stopped)
    ranks = sorted({one["rank"] for one in stopped})
    if len(ranks) == len(facts.ranks) and all(_still_runs(facts, [rank]) for rank in ranks):
        ends = f"step {last}" if first["after"] == last else f"steps {first['after']} to {last}, where its ranks are"
        return CheckFinding(NOT_LOOKED_AT, f"The job still runs. What is there ends with {ends}.")
    place = Place(first["after"] + 1, first["rank"])
    says = f"Rank {first['rank']} stopped after step {first['after']} without ending cleanly."
    others = f" {len(ranks)} ranks did not end cleanly." if len(ranks) > 1 else ""
    return CheckFinding(BAD, says + others, place, f"See what rank {first['rank']} logged last, or what killed it.")


def _still_runs(facts: Facts, ranks: Collection[int]) -> bool:
    """Whether one of these ranks has just saved its manifest, and will again."""
    manifests = [facts.manifests[one] for one in ranks if one in facts.manifests]
    saved = [datetime.fromisoformat(one.saved) for one in manifests if not one.closed]
    now = datetime.now(UTC)
    return any((now - one.astimezone(UTC)).total_seconds() < STILL_RUNS_S for one in saved)


_DROPPED: Final = "docs/performance.md says why steps are dropped."
_IN_EVALUATION: Final = "forwards have no rows then. Call model.train() after each evaluation."


def _steps(facts: Facts) -> CheckFinding:
    """Whether steps are missing; if none is known to be, whether files show all steps."""
    changed = any(len(one.configurations) > 1 for one in facts.manifests.values())
    found = _missing_steps(facts, changed=changed) or _unseen_steps(facts, changed=changed)
    return found or CheckFinding(GOOD, "No step is missing on any rank.")


def _missing_steps(facts: Facts, *, changed: bool) -> CheckFinding | None:
    """The steps that ranks dropped or lack, and the kinds that ended early, which a ``changed`` configuration may explain."""
    dropped, gaps = facts.told["dropped"]["listed"], facts.told["gaps"]["listed"]
    if _still_runs(facts, facts.ranks):  # ranks may be a few steps apart
        gaps = [one for one in gaps if _first(one["steps"]) <= _newest_saved(facts, one["rank"])]
    ended = {} if changed else ended_early(facts)
    lost = [f"rank {one['rank']}, {_of(one)}: {one['reason']}" for one in dropped]
    lost += [f"no rank has {kind} after step {step}" for kind, step in ended.items()]
    lost += [f"rank {one['rank']} has no {one['kind']} at {_of(one)}" for one in gaps]
    if not lost:
        return None
    places = [Place(_first(one["steps"]), one["rank"], one.get("kind", "")) for one in (*dropped, *gaps)]
    places += [Place(step + 1, None, kind) for kind, step in ended.items()]
    first = min(places, key=lambda one: (one.step or 0, one.kind))
    count = len(lost) + facts.count("dropped") + facts.count("gaps") - len(dropped) - len(facts.told["gaps"]["listed"])
    modes = [str(one.notes[EVALUATION]) for one in facts.manifests.values() if EVALUATION in one.notes]
    why = f"{capitalized(modes[0])}: {_IN_EVALUATION}" if modes and first.kind in ended else _DROPPED
    return CheckFinding(BAD, f"Steps are missing: {_few(lost, count)}.", first, why)


def _unseen_steps(facts: Facts, *, changed: bool) -> CheckFinding | None:
    """Why the rows at hand do not show whether steps are missing; None if they do."""
    known = {*facts.kinds, *facts.others, *NOT_JUDGED}
    if thinned := facts.told.get("thinned", {}).get("listed"):  # an earlier version knew none
        removed = [f"rank {one['rank']}, {one['steps']['count']:,} of {_of(one)}" for one in thinned]
        return CheckFinding(NOT_LOOKED_AT, f"Steps were {THINNED}: {_few(removed, len(removed))}.")
    with_rows = {kind for kind, count in facts.told["rows"].items() if count}
    if absent := sorted((facts.measured | with_rows) - known):
        return CheckFinding(NOT_LOOKED_AT, f"Ranks recorded {_few(absent, len(absent))}, and the files have no rows of it.")
    read = {kind: (rows.read, facts.told["rows"].get(kind, 0)) for kind, rows in facts.kinds.items()}
    if few := [f"{there:,} of {counted(every, 'row')} of {kind}" for kind, (there, every) in read.items() if there < every]:
        return CheckFinding(NOT_LOOKED_AT, f"Files of the merged set have gone. There are {_few(few, len(few))}.")
    lacking = [f"{kind} at {counted(len(of), 'step')}, the first is {of[0]}" for kind, of in lacking_steps(facts).items()]
    off = ended_early(facts) if changed else {}
    if lacking := [*(f"{kind} after step {step}" for kind, step in off.items()), *lacking]:
        why = " The configuration was changed while the run recorded, and may have switched this off." if changed else ""
        return CheckFinding(NOT_LOOKED_AT, f"No rank has {_few(lacking, len(lacking))}.{why}")
    if facts.left_out:
        return CheckFinding(NOT_LOOKED_AT, f"Ranks recorded {counted(facts.left_out, 'step')} more than these files have.")
    return None


def _newest_saved(facts: Facts, rank: int) -> int:
    return facts.manifests[rank].steps.written.newest if rank in facts.manifests else -1


def _whole(facts: Facts) -> CheckFinding:
    lacking, place = _tensors_of(facts, "incomplete", "unplaced")
    new = {one["rank"] for one in facts.told["unplaced"]["listed"]}
    if lacking and not facts.count("incomplete") and all(_still_runs(facts, [rank]) for rank in new):
        return CheckFinding(NOT_LOOKED_AT, f"The job still runs, and its manifests do not know all tensors yet: {lacking}.")
    if lacking:
        return CheckFinding(BAD, f"Tensors lack a part: {lacking}.", place)
    apart, place = _tensors_of(facts, "without_global")
    if apart:
        reason = facts.told["without_global"]["listed"][0]["reason"]
        return CheckFinding(BAD, f"No number of the whole tensor is known of {apart}: {reason}.", place)
    if not any(facts.told["tensors"].values()):
        return CheckFinding(NOT_LOOKED_AT, "There are no rows of whole tensors.")
    return CheckFinding(GOOD, "Every tensor has all its parts.")


def _tensors_of(facts: Facts, *lists: str) -> tuple[str, Place]:
    """The names of the tensors in lists of the merge's report, empty if there are none, and the place of the first."""
    every = [one for what in lists for one in facts.told[what]["listed"]]
    names = [f"{one['kind']} {one.get('name', '')}".strip() for one in every]
    place = Place(kind=every[0]["kind"], name=every[0].get("name", "")) if every else Place()
    return _few(names, sum(map(facts.count, lists))), place


def _files(facts: Facts) -> CheckFinding:
    torn = [f"{one['path']}: {one['reason']}" for one in facts.told["set_aside"]["listed"]]
    return (
        CheckFinding(BAD, f"Files were not read: {_few(torn, facts.count('set_aside'))}.")
        if torn
        else CheckFinding(GOOD, "All were read.")
    )


def _of_the_run(facts: Facts, kind: str, name: str) -> CheckFinding | None:
    """What was found of one of the run's own numbers; None if it was not recorded."""
    history = facts.histories.get(kind)
    if history is None or (0, name) not in facts.kinds[kind].series:
        return None
    first = next((one for one in row_events(facts) if (one.kind, one.name) == (kind, name)), None)
    if first is not None:
        return CheckFinding(
            BAD, f"{said(first, facts)}.", first.place, "Look at the learning rate and at the data of this step."
        )
    number = facts.kinds[kind].series.index((0, name))
    if (history.at[history.pair_series == number] >= 0).any():
        return CheckFinding(GOOD, "Every value is finite and like those before it.")
    return CheckFinding(NOT_LOOKED_AT, f"It has no more than {WARM_UP} recorded values.")


def _loss(facts: Facts) -> CheckFinding:
    nothing = CheckFinding(NOT_LOOKED_AT, "The run recorded no loss. Pass it to log(loss=...).")
    return _of_the_run(facts, RUN_KIND, "loss") or nothing


def _total_norm(facts: Facts) -> CheckFinding:
    found = _of_the_run(facts, RUN_KIND, GRAD_NORM)
    if found is None and TOTAL_KIND in facts.kinds:
        found = _of_the_run(facts, TOTAL_KIND, facts.kinds[TOTAL_KIND].series[0][1])
    if found is None:
        why = next(iter(facts.no_total_norm), "")
        return CheckFinding(NOT_LOOKED_AT, f"It is not known: {why}." if why else "No gradients were recorded.")
    return found


def _monitor(facts: Facts) -> CheckFinding:
    if not facts.manifests:
        return CheckFinding(NOT_LOOKED_AT, "The manifests of the ranks are not beside the merged set.")
    failed: dict[str, dict[int, int]] = {}
    lacking: dict[str, dict[int, int]] = {}
    for rank, one in facts.manifests.items():
        for cause, count in one.failures.items():
            said = one.said.get(cause, cause).rstrip(".")
            (lacking if cause.startswith(NOTHING_OF) else failed).setdefault(said, {})[rank] = count
    messages = [f"{_said_by(times)}: {said}" for said, times in (*failed.items(), *lacking.items())]
    told = capitalized(_few(messages, len(messages)))
    if failed:
        return CheckFinding(BAD, f"The monitor warned or failed. {told}.")
    if lacking:
        says = f"Some of the requested rows or numbers are missing. {told}."
        return CheckFinding(NOT_LOOKED_AT, says, then=says)
    return CheckFinding(GOOD, "It had no failure, and no warning of missing rows.")


class CheckEntry(NamedTuple):
    """A check in the list.

    Attributes:
        look: See ``CheckResult``.
        is_needed: Whether a run is healthy only if it is good.
        of_training: Whether it is about training; otherwise about the recording.
    """

    name: str
    judge: Callable[[Facts], CheckFinding]
    look: str
    is_needed: bool = False
    of_training: bool = True


_MERGE: Final = "trainermon merge DIR"

CHECKS: Final = (
    CheckEntry(
        "Alert rules", _alerts, '"alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": true}; trainermon rank-anomalies DIR'
    ),
    CheckEntry("NaN and infinity", _finite, '"wg_distribution": true and "xy_distribution": true', True),
    CheckEntry(
        "Replicas agree", replicas_agree, '"replica_check": true and "param_distribution": true; dp_group for gradients'
    ),
    CheckEntry("Data of ranks", data_of_ranks, '"wg_distribution": true; dp_group if no wrapper shows it'),
    CheckEntry("Data of steps", data_of_steps, '"targets": {"": {"input": "all"}} and "xy_distribution": true'),
    CheckEntry("Unchanged between steps", unchanged_between_steps, '"replica_check": true and "param_distribution": true'),
    CheckEntry("Sudden changes", _sudden, f'"step_interval": 1, and more than {WARM_UP} steps', True),
    CheckEntry("All ranks recorded", _all_ranks, _MERGE, True, False),
    CheckEntry("Ranks ended cleanly", _to_the_end, _MERGE, True, False),
    CheckEntry("No step missing", _steps, _MERGE, True, False),
    CheckEntry("Tensors whole", _whole, _MERGE, True, False),
    CheckEntry("Files readable", _files, _MERGE, True, False),
    CheckEntry("Loss", _loss, LOG),
    CheckEntry("Total gradient norm", _total_norm, '"wg_distribution": true'),
    CheckEntry(SPIKES, spikes, LOG),
    *(CheckEntry(one.check, partial(within, one), one.look) for one in GROUPS),
    CheckEntry("Load of experts", load_of_experts, '"recording_l2_features": true and l2_targets'),
    CheckEntry("Weights are trained", trained_weights, '"wg_distribution": true'),
    CheckEntry("Clipping", clipping, '"wg_distribution": true, where the loop clips'),
    CheckEntry("Updates of layers", updates_of_layers, f'"update_ratio": true, and more than {WARM_UP} steps'),
    CheckEntry("Monitoring itself", _monitor, "manifest.json of each rank", False, False),
)
"""In the order in which the page shows them. Where no alert rule fired, the verdict is the bad check of the earliest step.
Those of training come before those of the recording."""


def checks_of(facts: Facts) -> list[CheckResult]:
    """All checks, done."""
    return [CheckResult(one.name, one.judge(facts), *one[2:]) for one in CHECKS]


# --- Parts of sentences.


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _said_by(times: Mapping[int, int]) -> str:
    """The ranks of a message, and how often it came on each."""
    least, most = min(times.values()), max(times.values())
    each = " each" if len(times) > 1 else ""
    return f"{listed(list(times))} ({_times(most) if least == most else f'{least:,} to {most:,} times'}{each})"


def _few(texts: Sequence[str], count: int) -> str:
    more = f"; and {count - MOST_SAID:,} more" if count > MOST_SAID else ""
    return "; ".join(texts[:MOST_SAID]) + more


def _first(steps: Mapping[str, Any]) -> int:
    return int(steps["ranges"][0][0]) if steps["ranges"] else int(steps.get("rest", {}).get("first", 0))


def _of(entry: Mapping[str, Any]) -> str:
    ranges = entry["steps"]["ranges"]
    first, last = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
    return f"step {first}" if first == last else f"steps {first} to {last}"
