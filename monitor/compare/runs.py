"""Two monitored runs: what they have recorded, row by row, whatever the formats and the layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from monitor.bars import Progress, silent
from monitor.compare.names import NameRules
from monitor.compare.rows import RowComparison, RowWatcher, phase_of
from monitor.compare.sides import Choice, Side, rank_name
from monitor.compare.tolerances import RATE, VALUE, Circumstances, Limits, Rounding, facts_of, judged
from monitor.compare.values import ALONE, ROW, Compared, ComparisonError, Finding
from monitor.compare.wholes import BATCH_ROWS, COMBINED, LayoutComparison, WholeTensors, layouts_differ, with_same_dimensions
from monitor.query.batches import Batch, batch_of, batches, kinds_in, ops_in, place_of
from monitor.query.sources import MergedSet, RunSource
from monitor.series import RUN_KIND
from monitor.sinks.files import StepSpan
from monitor.terminal import counted


@dataclass(frozen=True, slots=True)
class How:
    """How runs are compared.

    Attributes:
        exact: Whether everything is a finding that is not the same, also where rounding explains it.
        whole: Whether whole tensors are compared, and not ranks; None: if ranks of the runs hold other parts.
        names: Rules by which names of the left side become those of the right (``NameRules``).
        limits: What is allowed besides.
        jobs: Beginnings of ids, for sides that contain several jobs: the left one takes the first if it has that, the right one
            the second.
    """

    exact: bool = False
    whole: bool | None = None
    names: Sequence[str] = ()
    limits: Limits | None = None
    jobs: Sequence[str] = ()


def compare(
    left: Path, right: Path, how: How = How(), watcher: RowWatcher | None = None, progress: Progress = silent
) -> Compared:
    """Compare what was recorded below two directories: of ranks, or merged sets, in any format.

    CSV has rounded numbers. Where only one side has a row from CSV, the numbers of the other are rounded alike. What only one
    side has, and what is known to be missing on a side, is named.

    Args:
        watcher: Is shown the rows as they are compared.
        progress: Told how many pieces of each kind are compared.

    Raises:
        ComparisonError: There is nothing, or no kind and rank that both have, or a rule cannot be applied.
    """
    sides = Side(left, how.jobs), Side(right, [*how.jobs[1:], *how.jobs[:1]])
    _check_jobs(sides, how.jobs)
    choice = sides[0].choice.shared_with(sides[1].choice)
    places = [side.places(choice) for side in sides]
    if not any(places):  # both can be read, and neither has rows
        return Compared(0, [], unit=ROW)
    wrappers = [side.wrapper for side in sides]
    wrappers = wrappers if wrappers[0] != wrappers[1] else ["", ""]
    rules = NameRules(how.names, wrappers[0]), NameRules((), wrappers[1])
    spans = [side.span(choice) for side in sides]
    steps = max(first for first, _ in spans), min(last for _, last in spans)
    is_late = any(side.span(Choice()).first < steps[0] for side in sides) or choice.steps.first == steps[0] > 0
    rate = 0.0 if how.exact else max(_largest_rate(side.source) for side in sides)
    tables = [rule.renamed(side.series) for rule, side in zip(rules, sides, strict=True)]
    if layouts_differ(sides, tables) if how.whole is None else how.whole:
        whole = [WholeTensors(side, rule, choice) for side, rule in zip(sides, rules, strict=True)]
        whole[0].begin(whole[1])
        whole[1].begin(whole[0])
        facts = with_same_dimensions(whole[0].facts(), whole[1].facts())
        rounding = Rounding(facts, Circumstances(steps[0], is_late, rate, other_layout=True), how.limits)
        comparison = RowComparison(sides, None if how.exact else rounding, watcher, progress=progress)
        series = {(kind, name) for one in whole for kind, names in one.names.items() for name in names}
        LayoutComparison((whole[0], whole[1]), comparison).compare()
    else:
        rounding = Rounding(list(map(facts_of, tables)), Circumstances(steps[0], is_late, rate), how.limits)
        comparison = RowComparison(sides, None if how.exact else rounding, watcher, progress=progress)
        _compare_ranks(comparison, places, rules, choice)
        known = [] if how.limits is None else tables
        series = {(row["kind"], row["name"]) for one in known for row in one.select(["kind", "name"]).to_pylist()}
        if any(one.step == steps[0] and one.kind in COMBINED and _is_of_parts(one, sides) for one in comparison.findings):
            sides[0].note("If ranks or micro-steps were given other parts of the same batch, --whole compares them together")
    if sides[0].is_of_another_framework(sides[1]):
        sides[0].note(
            "In PyTorch a micro-step's unreduced gradients are the sum so far, in MindSpore its own: only the first is compared"
        )
    rules[0].check(left, right, set(tables[1]["name"].to_pylist()))
    if how.limits is not None and (unused := how.limits.unfit(series)):
        sides[0].note(f"Entries of --tolerances that no row fits: {', '.join(unused[:5])}{' …' if len(unused) > 5 else ''}")
    return _found(comparison, steps)


def _check_jobs(sides: tuple[Side, Side], jobs: Sequence[str]) -> None:
    """Refuse ids that no side has, and a job that would be compared with itself."""
    used = [side.job for side in sides]
    if unknown := [job for job in jobs if job not in used]:
        raise ComparisonError(f"--job {unknown[0]} is no job of {sides[0]} or {sides[1]}, or it is not needed.")
    ids = [side.source.told()["job_id"] for side in sides] if all(used) and str(sides[0]) == str(sides[1]) else [0, 1]
    if ids[0] == ids[1]:
        raise ComparisonError(f"--job {used[0]} would be compared with itself. Name the job of A, and then that of B.")


def _is_of_parts(finding: Finding, sides: Sequence[Side]) -> bool:
    """Whether the batch may be cut otherwise: there are several ranks, or rows that one side lacks."""
    return len(sides[0].source.ranks) > 1 or finding.what in ALONE


def _found(comparison: RowComparison, steps: tuple[int, int]) -> Compared:
    for kind, rows in (+comparison.not_judged).items():
        have = counted(rows, f"row of {kind} has", f"rows of {kind} have")
        comparison.sides[0].miss(f"{have} no number that can be judged of the same op on both sides")
    left, right = comparison.sides
    for side, other, what, there in ((left, right, "missing", ("there", "")), (right, left, "added", ("", "there"))):
        for step, rank, kind in side.lost_by(other, StepSpan(*steps)):
            comparison.findings.append(Finding(step, rank_name(rank), phase_of(kind, ""), f"{kind}/*", what, *there))
    findings = sorted(comparison.findings, key=lambda finding: finding.in_order)
    rounding = comparison.rounding
    found = Compared(
        comparison.compared,
        findings,
        not_compared=tuple(line for side in comparison.sides for line in side.lacks()),
        unit=ROW,
        notes=tuple(line for side in comparison.sides for line in side.notes),
        counted=tuple(comparison.kinds),
        steps=steps,
        seen={} if rounding is None else rounding.seen,
        precision=0.0 if rounding is None else rounding.precision,
    )
    return found if rounding is None else judged(found, rounding)


def _compare_ranks(
    comparison: RowComparison, places: Sequence[set[tuple[str, int]]], rules: Sequence[NameRules], choice: Choice
) -> None:
    """Rank by rank."""
    shared = places[0] & places[1]
    if not shared:
        raise ComparisonError(f"{comparison.sides[0]} and {comparison.sides[1]} have no kind of rows and no rank in common.")
    for side, own, other in zip(comparison.sides, places, reversed(places), strict=True):
        for kind, rank in sorted(own - other):
            side.has_kind(kind, rank)
    left, right = (side.source for side in comparison.sides)
    for kind in sorted({kind for kind, _ in shared}, key=place_of):
        pairs = list(_pairs(left, right, kind, [rank for each, rank in shared if each == kind], choice))
        for done, pair in enumerate(pairs, start=1):
            tables = []
            for side, rule, batch in zip(comparison.sides, rules, pair, strict=True):
                rows, torn = batch.read()
                tables.append(rule.renamed(rows))
                for one in torn:
                    side.miss(f"{side}: {one.path}: {one.reason}")
            comparison.add(kind, tables, [side.ndigits(pair[0].ranks) for side in comparison.sides])
            comparison.progress(kind, done, len(pairs))


def _pairs(left: RunSource, right: RunSource, kind: str, shared: list[int], choice: Choice) -> Iterator[tuple[Batch, Batch]]:
    """The same steps and ranks of both sides: all, cut as the files of a merged set are, which hold all ranks."""
    first, second = (right, left) if isinstance(right, MergedSet) else (left, right)
    others = [one.steps.last for one in batches(second, kind, BATCH_ROWS)]
    for of, lots in itertools.groupby(batches(first, kind, BATCH_ROWS), key=lambda one: one.ranks):
        if ranks := [rank for rank in of if rank in shared]:
            spans = (choice.cut(steps) for steps in _spans([one.steps.last for one in lots], others))
            for steps in (one for one in spans if one.first <= one.last):
                yield batch_of(left, kind, ranks, steps), batch_of(right, kind, ranks, steps)


def _spans(ends: Sequence[int], others: Sequence[int]) -> Iterator[StepSpan]:
    """All steps, cut after those of ``ends``, and after those of ``others`` that come later."""
    begin = 0
    for end in sorted({*ends, *(one for one in others if one > max(ends))}):
        yield StepSpan(begin, end)
        begin = end + 1


def _largest_rate(side: RunSource) -> float:
    """The largest learning rate of all steps; 0 if none was recorded."""
    found = [0.0]
    for batch in batches(side, RUN_KIND, BATCH_ROWS) if RUN_KIND in kinds_in(side) else ():
        rows, _ = batch.read()
        values = rows[VALUE].to_pylist() if VALUE in ops_in(rows) else []
        rates = zip(rows["name"].to_pylist(), values, strict=False)
        found += [abs(value) for name, value in rates if value is not None and RATE.fullmatch(name or "")]
    return max(filter(math.isfinite, found))
