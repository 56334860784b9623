"""What a merge has to say beside the rows: what is there, what is missing, and what does not agree."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from monitor.coordinator import manifest_format as schema
from monitor.merge import bits
from monitor.merge.combine import NOT_JOINED, NOT_RECORDED, Disagreement, Outcome
from monitor.merge.discovery import NO_END, RankRun, SetAside
from monitor.merge.restarts import joints
from monitor.series import NO_MICRO_STEP
from monitor.sinks.files import ALL_STEPS, StepSpan

MOST_LISTED: Final = 1000
"""Entries of each list of a report; more are counted."""

_Steps = dict[tuple[str, ...], list[int]]


Chosen = Mapping[str, Sequence[Any] | None]


def chosen_of(kinds: Collection[str] | None = None, steps: StepSpan = ALL_STEPS) -> Chosen:
    """What was to be merged: ``kinds`` and ``steps`` (the first and the last), each None if all were."""
    return {"kinds": None if kinds is None else sorted(set(kinds)), "steps": None if steps == ALL_STEPS else list(steps)}


@dataclass
class Report:
    """Gathered while pieces are done, in any order.

    Attributes:
        runs: The directories that were merged.
        missing_ranks: Those that should have one.
        chosen: What was to be merged (``chosen_of``).
    """

    job: str
    world_size: int
    runs: Sequence[RankRun]
    missing_ranks: Sequence[int]
    set_aside: list[SetAside]
    chosen: Chosen = field(default_factory=chosen_of)
    rows: Counter[str] = field(default_factory=Counter)
    tensors: Counter[str] = field(default_factory=Counter)
    steps: set[int] = field(default_factory=set)
    disagreements: list[Disagreement] = field(default_factory=list)
    _newest: dict[str, int] = field(default_factory=dict)  # by directory, the last step of which rows were found
    _thinned: dict[tuple[int, int | None], bool] = field(default_factory=dict)
    _gaps: _Steps = field(default_factory=dict)
    _duplicates: _Steps = field(default_factory=dict)
    _incomplete: _Steps = field(default_factory=dict)
    _without_global: _Steps = field(default_factory=dict)
    _missing: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _unplaced: Counter[tuple[str, int]] = field(default_factory=Counter)
    _not_compared: Counter[tuple[str, int]] = field(default_factory=Counter)
    _bits: dict[str, bits.BitsOfKind] = field(default_factory=dict)

    def add(self, kind: str, outcome: Outcome) -> None:
        """Take in what came of a piece of a kind, or of reading for it."""
        self.rows[kind] += outcome.rows
        self.tensors[kind] += outcome.tensors
        self.steps.update(outcome.steps)
        for directory, step in outcome.newest.items():
            self._newest[directory] = max(step, self._newest.get(directory, -1))
        gaps = {rank: [one for one in steps if not self._is_thinned(one, rank)] for rank, steps in outcome.gaps.items()}
        incomplete = {name: [one for one in steps if not self._is_thinned(one)] for name, steps in outcome.incomplete.items()}
        for known, found in (
            (self._gaps, gaps),
            (self._duplicates, outcome.duplicates),
            (self._incomplete, incomplete),
        ):
            for what, steps in found.items():
                if steps:
                    known.setdefault((kind, str(what)), []).extend(steps)
        for (name, reason), steps in outcome.without_global.items():
            self._without_global.setdefault((kind, name, reason), []).extend(steps)
        self.set_aside += [one for one in outcome.set_aside if one not in self.set_aside]
        self.disagreements += outcome.disagreements
        self._missing.update({(kind, *key): count for key, count in outcome.missing.items()})
        self._unplaced.update({(kind, rank): count for rank, count in outcome.unplaced.items()})
        self._not_compared.update({(kind, rank): count for rank, count in outcome.not_compared.items()})
        in_bits = bits.FoundBits(outcome.bits_compared, outcome.bits_differing, outcome.bit_differences)
        self._bits.setdefault(kind, bits.BitsOfKind()).add(in_bits)

    def _is_thinned(self, step: int, rank: int | None = None) -> bool:
        """Whether a rank, or any of them, has removed the step: its rows are not missing for another reason."""
        if (step, rank) not in self._thinned:
            own = (run for run in self.runs if rank is None or run.rank == rank)
            self._thinned[step, rank] = any(run.thinned(step) for run in own)
        return self._thinned[step, rank]

    @property
    def clean(self) -> bool:
        """Whether nothing is missing and everything agrees. Ops that were never recorded are not missed."""
        told = self._told_of_bits()
        lost = (self.missing_ranks, self.set_aside, self.disagreements, self._gaps, self._incomplete, self._unplaced)
        return (
            not any((*lost, self._without_global, told["first"], told["while_running"]))
            and not any(self._dropped())
            and not any(self._removed())
            and not any(self._not_closed())
        )

    def spelled(self) -> str:
        """The report as JSON."""
        return json.dumps(self.told(), indent=1) + "\n"

    def told(self) -> dict[str, Any]:
        """All of it, in an order that does not depend on that in which it came."""
        return {
            "job_id": self.job,
            "world_size": self.world_size,
            "clean": self.clean,
            "directories": [run.directory.name for run in self.runs],
            "ranks": sorted({run.rank for run in self.runs}),
            "missing_ranks": list(self.missing_ranks),
            "chosen": dict(self.chosen),
            "steps": listed_steps(self.steps),
            "rows": dict(sorted(self.rows.items())),
            "tensors": dict(sorted(self.tensors.items())),
            "gaps": _listed(self._stepwise(self._gaps, "rank")),
            "dropped": _listed(self._dropped()),
            "thinned": _listed(self._removed()),
            "not_closed": _listed(self._not_closed()),
            "skipped_steps": listed_steps(self._skipped()),
            "duplicate_steps": _listed(self._stepwise(self._duplicates, "rank")),
            "replaced_steps": _listed(self._replaced()),
            "joints": _listed(self._joints()),
            "set_aside": _listed(
                {"path": one.path, "reason": one.reason}
                for one in sorted(self.set_aside, key=lambda one: (one.path, one.reason))
            ),
            "disagreements": _listed(map(_spelled, sorted(self.disagreements, key=_place))),
            "bits": self._told_of_bits(),
            "incomplete": _listed(self._stepwise(self._incomplete, "name")),
            "without_global": _listed(
                {"kind": kind, "name": name, "reason": reason, "steps": listed_steps(steps)}
                for (kind, name, reason), steps in sorted(self._without_global.items())
            ),
            "not_combined": _listed(
                {"kind": kind, "op": op, "rows": count, "reason": reason}
                for (kind, op, reason), count in sorted(self._not_combined().items())
            ),
            "unplaced": _listed(_by_rank(self._unplaced)),
            "not_compared": _listed(_by_rank(self._not_compared)),
            "notes": _notes(self.runs),
        }

    def _not_combined(self) -> Counter[tuple[str, str, str]]:
        """Ops without a value. An op that was recorded may have none: a tensor without a finite element has no histogram."""
        manifests = [run.manifest for run in self.runs]
        changed = any("ops" in one.changed for manifest in manifests for one in manifest.configurations)
        known = set() if changed else set.intersection(*map(_ops, manifests))
        found = Counter[tuple[str, str, str]]()
        for (kind, op, reason), count in self._missing.items():
            if op not in known or reason != NOT_RECORDED:
                found[kind, op, NOT_RECORDED if op not in known and reason == NOT_JOINED else reason] += count
        return found

    def _told_of_bits(self) -> dict[str, Any]:
        found = bits.told(self._bits, self._host_at)
        # What ranks found together is in the rows as well, unless these were lost.
        shown = min((one["step"] for one in found["first"]), default=NO_END)
        alone = (one for one in self._while_running() if one["check"] != "copies" or one["step"] < shown)
        told = found | {"while_running": list(alone)[:MOST_LISTED]}
        for first in told["first"]:
            own = (one for one in told["while_running"] if one["step"] == first["step"] and first["name"] in one["names"])
            first["changed_on"] = sorted({one["rank"] for one in own if one["rank"] in first["odd_ranks"]})
        return told

    def _while_running(self) -> list[dict[str, Any]]:
        """What the ranks themselves have found, the earliest first."""
        found = {
            (one.step, run.rank, one.host or run.manifest.host, one) for run in self.runs for one in run.manifest.wrong_bits
        }
        return [
            {**one.model_dump(mode="json"), "rank": rank, "host": host}
            for _, rank, host, one in sorted(found, key=lambda each: (*each[:3], each[3].said))
        ]

    def _host_at(self, rank: int, step: int) -> str:
        """The host that a rank was on in a step; empty if an earlier run of the directory recorded it."""
        there = (one for one in self.runs if one.rank == rank and one.counts(step) and one.manifest.steps.written.holds(step))
        run = next(there, None)
        begun = None if run is None else run.manifest.first_step
        return run.manifest.host if run is not None and begun is not None and begun <= step else ""

    @staticmethod
    def _stepwise(found: Mapping[tuple[str, ...], list[int]], what: str) -> Iterator[dict[str, Any]]:
        for (kind, which), steps in sorted(found.items(), key=lambda one: (one[0][0], _numeric(one[0][1]))):
            yield {"kind": kind, what: int(which) if what == "rank" else which, "steps": listed_steps(steps)}

    def _skipped(self) -> Iterator[int]:
        """Steps of which there are rows. Ranks that say the same are asked once."""
        said = {(one.manifest.steps.skipped, one.manifest.steps.abandoned, one.end) for one in self.runs}
        for skipped, abandoned, end in said:
            if skipped.count:
                yield from (one for one in self.steps if one < end and skipped.holds(one) and not abandoned.holds(one))

    def _dropped(self) -> Iterator[dict[str, Any]]:
        """What the manifests say was dropped before it reached a file."""
        for run in self.runs:
            for reason, steps in run.manifest.dropped.items():
                yield {"rank": run.rank, "reason": reason, **_recorded(steps)}
            for sink, causes in run.manifest.lost.items():
                for reason, steps in causes.items():
                    yield {"rank": run.rank, "format": sink, "reason": reason, **_recorded(steps)}

    def _removed(self) -> Iterator[dict[str, Any]]:
        """What ranks removed to stay within ``max_output_bytes``, level by level."""
        for run in self.runs:
            for level, steps in run.manifest.thinned.steps.items():
                if steps.count and steps.ranges and steps.ranges[0][0] < run.end:
                    yield {"rank": run.rank, "level": level, **_recorded(steps)}

    def _not_closed(self) -> Iterator[dict[str, Any]]:
        """Runs that were killed or still write, and their unknown steps: up to where a later directory continues."""
        for run in self.runs:
            after = max(schema.newest_step(run.manifest), self._newest.get(run.directory.name, -1))
            if (
                schema.was_killed(run.manifest)
                and schema.steps_between(after, run.end, schema.collected_every(run.manifest)) is not None
            ):
                yield {"rank": run.rank, "directory": run.directory.name, "after": after}

    def _joints(self) -> Iterator[dict[str, Any]]:
        """Where a restart continued an earlier run."""
        first = self.runs[0]
        for one in joints(first.line, schema.collected_every(first.manifest)) if first.line else ():
            yield {**one._asdict(), "redone": _spelled_steps(one.redone)}

    def _replaced(self) -> Iterator[dict[str, Any]]:
        """What an earlier run wrote, and a later one that was resumed before it did again."""
        for run in self.runs:
            recorded = run.manifest.steps
            for steps in (recorded.written.between(run.end, NO_END), recorded.abandoned):
                if steps.count:
                    yield {"rank": run.rank, "directory": run.directory.name, **_recorded(steps)}


def summary(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines to print of a report: a label and a text each."""
    yield "job", told["job_id"]
    yield "ranks", f"{len(told['ranks'])} of {told['world_size']}"
    yield "steps", said_steps(told["steps"])
    yield "rows", f"{sum(told['rows'].values()):,} recorded, {sum(told['tensors'].values()):,} after merging replicas"
    if told["missing_ranks"]:
        yield "missing ranks", ", ".join(map(str, told["missing_ranks"][:20])) + _more(len(told["missing_ranks"]) - 20)
    for what, line in _LINES.items():
        about = told.get(what, _listed(())) if what in ("joints", "thinned") else told[what]  # not in earlier versions
        listed, more = about["listed"], about["count"] - len(about["listed"])
        if what == "set_aside":
            listed = list(_by_reason(listed))
        for one in listed[:5]:
            yield (
                what.replace("_", " "),
                line.format(**{**one, "at": said_steps(one.get("steps", one.get("redone", {"ranges": []})))}),
            )
        if len(listed) + more > 5:
            yield "", f"and {len(listed) + more - 5} more"
    yield from bits.lines(told["bits"]) if "bits" in told else ()  # an earlier version compared none
    yield from _ops_without_a_value(told["not_combined"]["listed"])
    for one in told["notes"][:5]:
        yield "notes", f"{one['about']}: {one['note']}"


def _by_reason(listed: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Files of one directory that were set aside for the same reason, as one entry."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in listed:
        alike.setdefault((os.path.dirname(one["path"]), one["reason"]), []).append(one["path"])
    for (_, reason), paths in alike.items():
        yield {"path": f"{paths[0]}{_more(len(paths) - 1)}", "reason": reason}


def _ops_without_a_value(listed: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """A line a reason: what a configuration leaves out, it leaves out of every kind."""
    ops: dict[str, dict[str, None]] = {}
    for one in listed:
        ops.setdefault(one["reason"], {})[one["op"]] = None
    for reason, missing in ops.items():
        if reason == NOT_RECORDED:
            yield "not recorded", f"{', '.join(missing)}; add them to `ops` if you need them"
            continue
        yield "not combined", f"{', '.join(missing)}: {reason}"


_LINES: Final = {
    "joints": "job {job_id:.8} continued job {continued:.8} at step {step}; known to be recorded again: {at}",
    "gaps": "rank {rank} has no {kind} at {at}",
    "dropped": "rank {rank}, {at}: {reason}",
    "thinned": f"rank {{rank}}, {{at}}: {schema.THINNED}",
    "not_closed": "rank {rank}, {directory}: not ended cleanly, or still writing; steps after {after} may be missing",
    "duplicate_steps": "rank {rank} has {kind} twice at {at}; the last file counts",
    "replaced_steps": "rank {rank}, {at} in {directory}: a later run did them again",
    "set_aside": "{path}: {reason}",
    "disagreements": "{kind} {name} at step {step}: {op} is {value} on rank {rank}, {others_value} on rank {other_rank}",
    "incomplete": "{kind} {name} has not all its parts at {at}",
    "without_global": "{kind} {name} at {at}: {reason}",
    "unplaced": "rank {rank}: {rows} rows of {kind} that its manifest does not know",
    "not_compared": "rank {rank}: {rows} replicas of {kind} whose owner has no row to compare them with",
}


def _spelled(one: Disagreement) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "name": one.name,
        "step": one.step,
        "micro_step": None if one.micro_step == NO_MICRO_STEP else one.micro_step,
        "rank": one.rank,
        "other_rank": one.other,
        "op": one.op,
        "value": _number(one.value),
        "others_value": _number(one.others_value),
        "difference": _number(one.difference),
    }


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


def _place(one: Disagreement) -> tuple[int, str, str, int, int]:
    return one.step, one.kind, one.name, one.micro_step, one.rank


def _listed(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    every = iter(entries)
    listed = list(islice(every, MOST_LISTED))
    return {"count": len(listed) + sum(1 for _ in every), "listed": listed}


def listed_steps(steps: Iterable[int]) -> dict[str, Any]:
    """Ranges of steps as in a manifest, (first, last, interval) each."""
    found = schema.StepRanges()
    for step in sorted(set(steps)):
        found.add(step)
    return _spelled_steps(schema.StepsRecord.of(found))


def _recorded(steps: schema.StepsRecord) -> dict[str, Any]:
    return {"steps": _spelled_steps(steps)}


def _by_rank(rows: Counter[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    return ({"kind": kind, "rank": rank, "rows": count} for (kind, rank), count in sorted(rows.items()))


def _spelled_steps(steps: schema.StepsRecord) -> dict[str, Any]:
    return steps.model_dump(mode="json", exclude_none=True)


def said_steps(steps: Mapping[str, Any]) -> str:
    """A report's steps in words: ``steps 0 to 9, 20 to 30 by 2``."""
    ranges = schema.without_pairs(schema.StepRange(*one) for one in steps["ranges"])
    spelled = [
        f"{first}" if first == last else f"{first} to {last}{f' by {interval}' if interval > 1 else ''}"
        for first, last, interval in ranges[:5]
    ]
    if not spelled:
        return "no steps"
    one = len(ranges) == 1 and ranges[0].size == 1
    return f"step{'' if one else 's'} {', '.join(spelled)}{_more(len(ranges) - 5)}"


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _numeric(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (-1, text)


def _notes(runs: Iterable[RankRun]) -> list[dict[str, Any]]:
    """What manifests say of the numbers, and how many ranks say so."""
    counts = Counter((key, str(value)) for run in runs for key, value in run.manifest.notes.items())
    return [{"about": key, "note": value, "ranks": count} for (key, value), count in sorted(counts.items())[:MOST_LISTED]]


# --- Steps as ranges.

MOST_STEPS: Final = 10**8
"""Most steps of a range. A damaged report may state any number."""


def ranges_of(steps: Mapping[str, Any]) -> list[range]:
    """Steps of a report as ranges; those that it only counts as all steps between the first and the last of them."""
    rest = steps.get("rest")
    more = [range(rest["first"], rest["last"] + 1)] if rest else []
    ranges = [range(first, last + 1, interval) for first, last, interval in steps["ranges"]]
    return [one[:MOST_STEPS] for one in (*ranges, *more)]


def steps_in(ranges: Iterable[range]) -> NDArray[np.int64]:
    """The steps of ranges, one after the other."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(one.start, one.stop, one.step) for one in ranges)])


def cut(steps: NDArray[np.int64], spans: Iterable[StepSpan]) -> list[range]:
    """The steps that are in one of the spans, as ranges.

    Args:
        steps: Ascending.
    """
    inside = np.zeros(len(steps), dtype=np.bool_)
    for first, last in set(spans):
        inside[np.searchsorted(steps, first) : np.searchsorted(steps, last, "right")] = True
    found = steps[inside].tolist()
    return [range(first, last + 1, interval) for first, last, interval in schema.StepRanges(found, most=len(found) + 1).ranges]


def _ops(manifest: schema.ManifestRecord) -> set[str]:
    """The ops that were configured."""
    ops = manifest.config.get("ops")
    return {one for one in ops if isinstance(one, str)} if isinstance(ops, list) else set()
