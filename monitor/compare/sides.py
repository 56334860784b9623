"""The two runs of a comparison: how each is opened, and what one of them has alone or lacks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from monitor.compare.names import wrapper_of
from monitor.compare.values import ComparisonError
from monitor.coordinator.manifest_format import ManifestError
from monitor.merge.report import listed_steps, said_steps, summary
from monitor.query.batches import files_of, kinds_in
from monitor.query.opened import open_source
from monitor.query.sources import MergedSet, QueryError, RunSource
from monitor.series import GRADIENT_KINDS, PARAMETER_KINDS, shown_kind
from monitor.sinks.files import ALL_STEPS, StepSpan

ALL_RANKS: Final = -1
"""The rank in rows of whole tensors."""

MISSING: Final = ("missing ranks", "gaps", "dropped", "thinned", "not closed", "set aside", "incomplete", "unplaced")
"""What a side's own report says of rows that are not there. The last two are known of rows of whole tensors only."""

NOT_JUDGED: Final = "{} of {}: rounding changes them, and there is no other op. --tolerance 0 compares them"

NDIGITS: Final = 6
"""Decimals of a merged set that was made from CSV, which does not say its own: the default."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kinds and steps that a merged set was made of, and the only ones that are compared.

    Attributes:
        kinds: None: all.
    """

    kinds: frozenset[str] | None = None
    steps: StepSpan = ALL_STEPS

    def has(self, kind: str) -> bool:
        return self.kinds is None or kind in self.kinds

    def cut(self, steps: StepSpan) -> StepSpan:
        """The steps of these that it has; the last is before the first if there is none."""
        return StepSpan(max(steps.first, self.steps.first), min(steps.last, self.steps.last))

    def shared_with(self, other: Choice) -> Choice:
        """The kinds and steps that both have."""
        kinds = [one for one in (self.kinds, other.kinds) if one is not None]
        return Choice(frozenset.intersection(*kinds) if kinds else None, self.cut(other.steps))


class Side:
    """One of two runs, with what it has alone or lacks.

    Args:
        jobs: Beginnings of ids, of which the first that the directory has is taken.

    Attributes:
        job: The id by which it was chosen; empty if it was not.
        source: Its rows.
        derives_ops: Whether it has all ops, not only those that were recorded.
        notes: What is compared otherwise or not at all, because the other side has another layout: a line each.

    Raises:
        ComparisonError: The directory holds no run that can be read.
    """

    def __init__(self, directory: Path, jobs: Sequence[str] = ()) -> None:
        self._directory = directory
        try:
            self.job, self.source = _opened(directory, jobs)
        except QueryError as error:
            raise ComparisonError(
                f"{directory} holds neither a precision dump nor a monitored run that can be read: {error}"
            ) from error
        self.derives_ops = isinstance(self.source, MergedSet)
        self.notes: list[str] = []
        self._missing: dict[str, None] = {}
        self._kinds: dict[str, list[int]] = defaultdict(list)
        self._steps: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._begun: dict[tuple[str, int], int] = {}
        self._ops: dict[str, dict[str, None]] = defaultdict(dict)
        self._texts: dict[str, dict[str, None]] = defaultdict(dict)

    def __str__(self) -> str:
        return str(self._directory)

    def places(self, choice: Choice) -> set[tuple[str, int]]:
        """The kinds and ranks that have files; in a merged set, whose files are of all ranks, those that have rows."""
        kinds = [kind for kind in kinds_in(self.source) if choice.has(kind)]
        found = {(kind, rank) for kind in kinds for ranks, _ in files_of(self.source, kind) for rank in ranks}
        if not isinstance(self.source, MergedSet):
            return found
        rows = self.series.select(["kind", "rank"]).group_by(["kind", "rank"]).aggregate([]).to_pylist()
        there = {(shown_kind(row["kind"]), row["rank"]) for row in rows}
        unknown = set(kinds) - {kind for kind, _ in there}
        return {one for one in found if one in there or one[0] in unknown}

    @property
    def choice(self) -> Choice:
        """The kinds and steps that a merged set was made of."""
        chosen = self.source.told().get("chosen") or {}  # not in reports of earlier versions
        kinds, steps = chosen.get("kinds"), chosen.get("steps")
        shown = None if kinds is None else frozenset(map(shown_kind, kinds))
        return Choice(shown, StepSpan(*steps) if steps else ALL_STEPS)

    @cached_property
    def series(self) -> pa.Table:
        """See ``RunSource.series``."""
        try:
            return self.source.series()
        except (pa.ArrowException, ManifestError, LookupError) as error:  # a damaged footer may name other columns
            raise QueryError(f"the series of {self} cannot be read: {error}") from error

    @property
    def wrapper(self) -> str:
        """The prefix of all names of parameters that comes from a wrapper of the model."""
        rows = self.series.select(["kind", "name"]).group_by(["kind", "name"]).aggregate([]).to_pylist()
        return wrapper_of(row["name"] for row in rows if row["kind"] in (*PARAMETER_KINDS, *GRADIENT_KINDS))

    @cached_property
    def framework(self) -> str:
        """``torch`` or ``mindspore``, as dtypes are called; empty if none are known."""
        dtypes = [one for one in self.series["dtype"].unique().to_pylist() if one]
        return ("torch" if any(one.startswith("torch.") for one in dtypes) else "mindspore") if dtypes else ""

    def is_of_another_framework(self, other: Side) -> bool:
        return self.framework != other.framework and bool(self.framework and other.framework)

    def wholes(self, choice: Choice) -> MergedSet:
        """Rows of whole tensors, merged once into a temporary directory if that was not done before."""
        self.derives_ops = True
        kinds = tuple(kind for kind in self.source.kinds(whole=False) if choice.has(shown_kind(kind)))
        return self.source.merged(kinds, choice.steps)

    def ndigits(self, ranks: Iterable[int]) -> int:
        """Decimals of its rows, if they are from CSV."""
        known = [one for one in self.source.configured("ndigits", set(ranks)) if isinstance(one, int)]
        return min(known, default=NDIGITS)

    def span(self, choice: Choice) -> StepSpan:
        """The first and the last recorded step that is chosen."""
        steps = [one for spans in self.source.steps.values() for one in spans]
        chosen = [one[bisect_left(one, choice.steps.first) : bisect_right(one, choice.steps.last)] for one in steps]
        some = [one for one in chosen if one]
        return StepSpan(min((one[0] for one in some), default=0), max((one[-1] for one in some), default=0))

    def add(self, kind: str, places: Iterable[tuple[int, int]]) -> None:
        """It alone has rows of a kind of these ranks and steps."""
        for rank, step in places:
            self._steps[kind, rank].append(step)

    def begins(self, kind: str, rows: pa.Table) -> None:
        """It has these rows of a kind. Rows are added in order of steps."""
        ranks, steps = rows["rank"].to_numpy(), rows["step"].to_numpy()
        for rank in np.unique(ranks).tolist():
            self._begun.setdefault((kind, rank), int(steps[ranks == rank].min()))

    def lost_by(self, other: Side, common: StepSpan) -> Iterator[tuple[int, int, str]]:
        """Steps, ranks and kinds: where the other side stops to have rows of a kind, among the steps that both have."""
        for (kind, rank), steps in self._steps.items():
            had = other._begun.get((kind, rank), common.last)
            inside = [step for step in steps if max(had, common.first) < step <= common.last]
            if inside:
                yield min(inside), rank, kind

    def has_ops(self, kind: str, ops: Iterable[str]) -> None:
        """It alone has values of these ops of a kind. The other may have recorded them: tensors of NaN have no kurtosis."""
        self._ops[kind].update(dict.fromkeys(ops))

    def is_not_judged(self, kind: str, ops: Iterable[str]) -> None:
        """Both have these texts of a kind, and no number."""
        self._texts[kind].update(dict.fromkeys(ops))

    def has_kind(self, kind: str, rank: int) -> None:
        """It alone has a kind on this rank, or ``ALL_RANKS``."""
        self._kinds[kind].append(rank)

    def miss(self, said: str) -> None:
        """Something is not compared."""
        self._missing[said] = None

    def note(self, said: str) -> None:
        """Add a note."""
        self.notes.append(said)

    def lacks(self) -> Iterator[str]:
        """What is missing on one side, a line each."""
        told = [(what, line) for what, line in summary(self.source.told()) if what in MISSING]
        yield from (f"{self._directory}: {f'{what} ' if what == MISSING[0] else ''}{line}" for what, line in told)
        yield from (f"{self._directory} alone has {kind} of {_ranks(of)}" for kind, of in sorted(self._kinds.items()))
        yield from self._missing
        yield from self._said_steps()
        yield from self._said_ops()

    def _said_ops(self) -> Iterator[str]:
        """A line for kinds with the same ops."""
        for found, said in ((self._ops, f"{self._directory} alone has values of {{}} of {{}}"), (self._texts, NOT_JUDGED)):
            kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
            for kind, ops in found.items():
                kinds[tuple(ops)].append(kind)
            yield from (said.format(", ".join(ops), ", ".join(of)) for ops, of in kinds.items() if ops)

    def _said_steps(self) -> Iterator[str]:
        """A line for kinds of the same steps and ranks."""
        ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
        for (kind, rank), steps in self._steps.items():
            ranks[kind, said_steps(listed_steps(steps))].append(rank)
        kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (kind, at), of in ranks.items():
            kinds[_ranks(of), at].append(kind)
        return (f"{self._directory} alone has {', '.join(some)} of {of} at {at}" for (of, at), some in kinds.items())


def _opened(directory: Path, jobs: Sequence[str]) -> tuple[str, RunSource]:
    """The first of the ids that the directory has, and its run. The id is empty if it has none."""
    for job in jobs:
        with suppress(QueryError):
            return job, open_source(directory, job)
    return "", open_source(directory)


def rank_name(rank: int) -> str:
    """For people."""
    return "all ranks" if rank == ALL_RANKS else f"rank{rank}"


def _ranks(ranks: Iterable[int]) -> str:
    some = list(ranks)
    return rank_name(ALL_RANKS) if ALL_RANKS in some else said_steps(listed_steps(some)).replace("step", "rank")
