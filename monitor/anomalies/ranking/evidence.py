"""The events of all ranks in one set of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from monitor.anomalies.ranking.job import Group, Member
from monitor.anomalies.ranking.subjects import Subject, subject_of
from monitor.series import Series

Columns = NDArray[np.int64]
Flags = NDArray[np.bool_]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Evidence:
    """An entry an event, members after one another, each in the order of its file.

    Attributes:
        members: Who wrote the events, in the order of ranks.
        member: Index into ``members``; likewise ``subject``, ``op`` and ``rule`` into what they stand for.
        mean: The running mean that a value was compared with; NaN where there is none.
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
    def of(cls, members: Sequence[Member]) -> Evidence:
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
        """A number for each series, the same for a replica and for what it stands for."""
        numbers: dict[Series, int] = {}
        return self._of_subject(lambda one: numbers.setdefault(one.series, len(numbers)))

    @cached_property
    def finite(self) -> Flags:
        """Whether the tensor had neither NaN nor Inf in it: a statistic of it deviated."""
        counts = [number for number, op in enumerate(self.ops) if op in ("nans", "infs")]
        found: Flags = np.isfinite(self.value) & ~np.isin(self.op, counts)
        return found

    @cached_property
    def stage(self) -> Columns:
        return self._of_member(lambda one: one.stage)

    @cached_property
    def place(self) -> Columns:
        """Of the chunk that an event is of, among all those of its pipeline."""
        return self.stage + self.chunk * self._of_member(lambda one: len(one.group.mates))

    @cached_property
    def rank(self) -> Columns:
        return self._of_member(lambda one: one.rank)

    @cached_property
    def recording(self) -> Columns:
        return self._of_member(lambda one: one.recording)

    @cached_property
    def groups(self) -> Sequence[Group]:
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
    """A number for each thing that was listed anywhere."""

    @property
    def listed(self) -> list[T]:
        return list(self)

    def map(self, listed: Iterable[T], pointers: Columns) -> Columns:
        """Pointers into ``listed`` as pointers into the list of all."""
        return np.array([self.setdefault(one, len(self)) for one in listed], dtype=np.int64)[pointers]


def _joined(columns: Sequence[Columns]) -> Columns:
    return np.concatenate([np.empty(0, np.int64), *columns])
