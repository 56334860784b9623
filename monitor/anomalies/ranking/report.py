"""What the command prints: a table of the earliest events, what else there is to know, and what to look at next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from monitor.anomalies.ranking.coverage import Gap
from monitor.anomalies.ranking.ranking import Ranked, Ranking
from monitor.anomalies.wording import SHOWN, capitalized, listed
from monitor.series import NO_MICRO_STEP
from monitor.terminal import plain

_ANY_WIDTH: Final = 10_000
"""Of a console on which every line of a table fits."""

_COUNTED: Final = {"nans": "NaN", "infs": "infinite"}


def listing(ranking: Ranking, console: Console) -> RenderableType:
    """The earliest events, in order: as a table, or where the console is too narrow for one, a few lines each."""
    wide = _table(ranking)
    whole = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), wide).maximum
    return wide if whole <= console.width else Text("\n".join(plain(line) for one in ranking.ranked for line in _lines(one)))


def _lines(one: Ranked) -> Iterator[str]:
    micro_step = "" if one.micro_step == NO_MICRO_STEP else f", micro-step {one.micro_step}"
    yield f"{_origin(one)}: rank {one.member.rank} ({one.member.host}), step {one.step}{micro_step}"
    yield f"  {tensor(one)}"
    yield f"  {one.op} {one.value:.6g}{_mean(one)}, {one.rule}"
    if remark(one):
        yield f"  {remark(one)}"


def _origin(one: Ranked) -> str:
    return "origin" if one.is_origin else "propagated"


def _table(ranking: Ranking) -> Table:
    found = Table(box=None, pad_edge=False)
    with_micro_steps = any(one.micro_step != NO_MICRO_STEP for one in ranking.ranked)
    for name in ("rank", "host", "step", *(["micro-step"] if with_micro_steps else [])):
        found.add_column(name, no_wrap=True)
    for name in ("tensor", "statistic", "value", "rule", "", "remark"):
        found.add_column(name)
    for one in ranking.ranked:
        micro_step = [] if not with_micro_steps else ["" if one.micro_step == NO_MICRO_STEP else str(one.micro_step)]
        cells = [
            str(one.member.rank),
            one.member.host,
            str(one.step),
            *micro_step,
            tensor(one),
            one.op,
            f"{one.value:.6g}{_mean(one)}",
        ]
        cells += [one.rule, _origin(one), remark(one)]
        found.add_row(*(Text(plain(cell)) for cell in cells))  # as text: what looks like markup in a name is none
    return found


def tensor(one: Ranked) -> str:
    """Its kind, chunk and name, as in a tag."""
    series = one.subject.spelled
    return f"{series.kind} {series.vpp_stage}:{series.name}"


def remark(one: Ranked) -> str:
    """The span of an origin, and whether other replicas have it too."""
    if one.span is None:
        return "on this replica only" if one.alone else ""
    return f"{one.span.told}; {one.alone}" if one.alone else one.span.told


def counts(ranking: Ranking) -> str:
    """How much there is, in a line."""
    judged = [one.events.judged for one in ranking.job.members]
    not_kept = sum(sum(one.not_kept.values()) for one in judged)
    parts = [
        f"{ranking.events:,} events of {ranking.ranks:,} of {len({one.rank for one in judged}):,} ranks",
        f"{ranking.origins:,} origin{'' if ranking.origins == 1 else 's'}",
    ]
    if not_kept:
        parts.append(f"{not_kept:,} more were not kept")
    return "; ".join(parts)


def notes(ranking: Ranking) -> Iterator[str]:
    """What a reader must know of the order and of what is missing."""
    job = ranking.job
    if ranking.events:
        yield from _of_the_order(ranking)
    if job.missing:
        origins = ": what is called an origin may have come from there" if ranking.events else ""
        yield f"{listed(job.missing)} left no events and judged no step{origins}."
    open_ranks = sorted({one.rank for one in job.members if not one.events.judged.closed})
    if open_ranks:
        yield f"{listed(open_ranks)} did not end cleanly, or still run: later events may be missing."
    yield from _not_looked_at(ranking)
    for flaw in job.flaws[:SHOWN]:
        yield f"{flaw.path}: {flaw.reason}"
    if len(job.flaws) > SHOWN:
        yield f"and {len(job.flaws) - SHOWN} more files"


def _of_the_order(ranking: Ranking) -> Iterator[str]:
    job = ranking.job
    yield from (
        f"Forwards and backwards are in order of micro-steps and stages alone: {reason}."
        for reason in dict.fromkeys(ranking.unordered.values())
    )
    if job.without_manifest:
        yield (
            f"{_without_manifest(job.without_manifest)} first event of each step is called an origin, unless another rank or "
            "the update before may have caused it."
        )
    if len({one.recording for one in job.members}) > 1:
        yield "The ranks have several recordings each. What one passes to another is not known: each has origins of its own."


def _without_manifest(ranks: Sequence[int]) -> str:
    has, their = ("has", "its") if len(ranks) == 1 else ("have", "their")
    return f"{capitalized(listed(ranks))} {has} no manifest. Only {their} order of calls is known, so {their}"


def _not_looked_at(ranking: Ranking) -> Iterator[str]:
    """Steps, ranks and replicas that no rule has judged."""
    coverage, job = ranking.coverage, ranking.job
    everybody = {one.rank for one in job.members}
    if coverage.is_empty and coverage.steps:
        yield (
            'Not looked at: no rank recorded a row that alert rules judge. Switch a kind on, such as "wg_distribution": true '
            'for gradients or "xy_distribution" for activations.'
        )
    elif coverage.is_empty:
        yield "Not looked at: no rank has judged any of these steps."
    for gap in coverage.gaps[:SHOWN]:
        on = "" if set(gap.ranks) == everybody else f" of {listed(gap.ranks)}"
        yield f"Not looked at: {_spelled(gap)}{on}: {gap.reason}."
    if len(coverage.gaps) > SHOWN:
        yield f"Not looked at: more steps, for {len(coverage.gaps) - SHOWN} other reasons."
    if coverage.idle:
        yield f"Not looked at: {listed(coverage.idle)} recorded no row that alert rules judge."
    if job.not_monitored:
        yield f"Not monitored, as module_ranks says: {listed(job.not_monitored)}."
    if any(one.manifest is not None and one.manifest.config.get("replica_check") is False for one in job.members):
        yield "replica_check is false: tensors that several ranks hold were judged on one rank only."


def _spelled(gap: Gap) -> str:
    if gap.count == 1:
        return f"step {gap.first}"
    between = f"{gap.first} to {gap.last}"
    return f"steps {between}" if gap.count == gap.last - gap.first + 1 else f"{gap.count:,} of the steps {between}"


def told_value(one: Ranked) -> str:
    """What became of the statistic, in words."""
    if one.op in _COUNTED:
        return f"{one.value:g} elements are {_COUNTED[one.op]}" if one.value > 1 else f"an element is {_COUNTED[one.op]}"
    return f"{one.op} is {one.value:.6g}{_mean(one)}"


def _mean(one: Ranked) -> str:
    return "" if one.mean is None else f", running mean {one.mean:.6g}"
