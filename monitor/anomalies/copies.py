"""Copies of tensors on several ranks, compared while training runs: what each rank publishes and answers.

A rank publishes a digest of each kind for the latest steps (``CopyHistory``). The lowest rank of those that hold the same
tensors compares the digests (``odd_copies.GroupComparison``). Where they differ, it asks for digests of fewer tensors, down to
one (``CopyHistory.answer``).
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Annotated, Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Base64Bytes, Field, ValidationError, field_validator, model_validator

from monitor.anomalies.checked_rows import CheckedRows, Numbers
from monitor.coordinator.manifest_format import Natural, StrictRecord
from monitor.series import REPLICA_KIND, Ranks, SeriesTable
from monitor.stats.partials import Words

KEPT_STEPS: Final = 256
"""Steps whose digests a rank publishes. Ranks look at them at different moments, and all of them must still be there."""

KEPT_BYTES: Final = 32 << 20
"""Most bytes of checksums that are kept for questions. At least two steps are."""

CHUNKS: Final = 1_024
"""Most digests of an answer."""


# --- Messages, which other processes wrote: nothing in them is taken for granted.

MOST_CHARACTERS: Final = 1 << 17
"""Largest size of a message, in characters."""

Digests = Base64Bytes
"""Numbers, the lowest byte first."""


class Message(StrictRecord):
    """A value in the job's store."""

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Raises ``ValueError``."""
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"{len(text):,} characters, {MOST_CHARACTERS:,} are allowed")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"not a valid {cls.__name__}: {where + ': ' if where else ''}{first['msg']}") from None


class Published(Message):
    """What a rank publishes.

    Attributes:
        generation: How often training has gone back to an earlier step. Only ranks of the same one are compared.
        groups: By group and kind a digest of 32 bits for each of the steps; 0 where there is none.
    """

    generation: Natural = 0
    host: Annotated[str, Field(max_length=100)]
    steps: Annotated[tuple[Natural, ...], Field(max_length=KEPT_STEPS)]
    groups: dict[str, dict[str, Digests]]

    @model_validator(mode="after")
    def _has_a_digest_for_each_step(self) -> Self:
        if any(len(content) != 4 * len(self.steps) for kinds in self.groups.values() for content in kinds.values()):
            raise ValueError("the digests are not as many as the steps")
        return self

    def digests(self, group: str) -> dict[int, dict[str, int]]:
        """The digests of a group, by step and kind."""
        found: dict[int, dict[str, int]] = {step: {} for step in self.steps}
        for kind, content in self.groups.get(group, {}).items():
            for step, digest in zip(self.steps, np.frombuffer(content, "<u4").tolist(), strict=True):
                if digest:
                    found[step][kind] = digest
        return found


class Question(Message):
    """The lowest rank of a group asks others of it for digests of some of the tensors that they hold.

    Attributes:
        number: Of the board that it was first on.
        ranks: Those that are asked.
        generation: See ``Published``.
        begin, end: The range of the tensors.
    """

    number: int
    leader: Natural
    generation: Natural = 0
    ranks: tuple[Natural, ...]
    group: str
    step: Natural
    kind: str
    begin: Natural
    end: Natural


class Answer(Message):
    """Digests of 64 bits of equal chunks of a range: the checksums themselves if ``chunk`` is 1.

    Attributes:
        number: Of the question.
        total: The number of tensors of the group; 0 if the rank does not have the step any more.
        order: ``SharedTensors.order``.
    """

    number: int
    total: Natural = 0
    order: str = ""
    chunk: Annotated[int, Field(ge=1)] = 1
    digests: Digests = b""

    @field_validator("digests")
    @classmethod
    def _are_whole(cls, content: bytes) -> bytes:
        if len(content) % 8:
            raise ValueError("the digests are no numbers of 64 bits")
        return content

    @property
    def numbers(self) -> Words:
        """The digests."""
        return np.frombuffer(self.digests, "<u8").astype(np.uint64)


class CopyVerdict(Message):
    """What the lowest rank of a group has found, for the ranks that it is about, and for the lowest ranks of other groups.

    Attributes:
        number: Of the board that it was first on.
        ranks: Whose copies are odd.
        most_agree: Whether most of the other copies are alike.
        names: Of the tensors, the first ones, as ``SharedTensors.names``.
        agreed_until, good: See ``odd_copies.GroupComparison``.
    """

    number: int
    group: str
    step: Natural
    kind: str
    ranks: tuple[Natural, ...]
    most_agree: bool
    generation: Natural = 0
    agreed_until: Natural | None = None
    good: Natural | None = None
    names: tuple[str, ...]


MOST_VERDICTS: Final = 8


class Board(Message):
    """What all ranks read: the open question of the job, and the latest verdicts.

    Attributes:
        number: Grows with each change.
    """

    number: int = 0
    question: Question | None = None
    verdicts: Annotated[tuple[CopyVerdict, ...], Field(max_length=MOST_VERDICTS)] = ()


# --- What this rank has of the latest steps.


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """The rows of a kind that the same ranks hold, in the order of their names.

    Attributes:
        ranks: All that hold them, and are monitored.
        places: Of the rows in the step.
        series: Their numbers in the rank's ``SeriesTable``.
        names: Model chunk and name of each, without the kind: ``0:layers.3.weight``.
        order: A digest of the names. Ranks with the same have the same tensors in the same places.
    """

    ranks: Ranks
    places: Numbers
    series: Numbers
    names: tuple[str, ...]
    order: str


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The checksums of ``tensors`` in a step, and a digest of them."""

    tensors: SharedTensors
    checksums: Words
    call_id: Numbers
    digest: int


class CopyHistory:
    """The digests and checksums of the latest steps on this rank. The writer thread adds, another thread reads.

    Only one of k steps is kept, k a power of two, if the steps would otherwise be gone before all ranks have looked. So ranks
    that step at different speeds still have steps in common.

    Args:
        monitored: The monitored ranks; empty for all.

    Attributes:
        look_s: Within this time all ranks have looked.
        groups: The groups of ranks that hold tensors of this rank, by id.
        version: Grows with each step that is kept.
        generation: See ``Published``.
    """

    def __init__(self, rank: int, host: str, series: SeriesTable, monitored: Collection[int] = ()) -> None:
        self.rank, self._host, self._series, self._monitored = rank, host, series, frozenset(monitored)
        self.look_s = 0.0
        self.version = self.generation = 0
        self._every, self._latest = 1, -1
        self._steps: deque[tuple[int, float, dict[tuple[str, str], HeldPart]]] = deque()
        self._tensors: dict[str, tuple[Numbers, dict[str, SharedTensors]]] = {}
        self.groups: dict[str, Ranks] = {}
        self._lock = Lock()

    def add(self, step: int, rows: Mapping[str, CheckedRows], now: float) -> None:
        """Keep what this rank holds in ``step``; ``now`` in seconds."""
        held: dict[tuple[str, str], HeldPart] = {}
        for kind, one in rows.items():
            for group, tensors in self._tensors_of(kind, one.series).items():
                sums = one.checksums[tensors.places]
                held[group, kind] = HeldPart(tensors, sums, one.call_id[tensors.places], _digest(sums))
        with self._lock:
            if step <= self._latest:
                self._steps.clear()
                self.generation += 1
            self._latest = step
            if not held or _drawn(step) % self._every:
                return
            self._steps.append((step, now, held))
            if len(self._steps) > KEPT_STEPS and now - self._steps[0][1] < self.look_s:
                self._every *= 2
                self._steps = deque(one for one in self._steps if _drawn(one[0]) % self._every == 0)
            while len(self._steps) > KEPT_STEPS or (len(self._steps) > 2 and self._bytes() > KEPT_BYTES):
                self._steps.popleft()
            self.version += 1

    def use(self, monitored: Collection[int]) -> None:
        """Use other monitored ranks from the next step on."""
        if self._monitored != frozenset(monitored):
            self._monitored, self._tensors, self.groups = frozenset(monitored), {}, {}

    def published(self) -> Published:
        """What this rank publishes."""
        with self._lock:
            steps, generation = list(self._steps), self.generation
        places = sorted({place for _, _, held in steps for place in held})
        groups: dict[str, dict[str, bytes]] = {group: {} for group, _ in places}
        for group, kind in places:
            digests = [held[group, kind].digest if (group, kind) in held else 0 for _, _, held in steps]
            groups[group][kind] = _encoded(np.array(digests, "<u4"))
        numbers = tuple(step for step, _, _ in steps)
        return Published(generation=generation, host=self._host, steps=numbers, groups=groups)

    def part(self, group: str, step: int, kind: str) -> HeldPart | None:
        """What this rank holds of a group; None if it is gone."""
        with self._lock:
            return next((held.get((group, kind)) for number, _, held in self._steps if number == step), None)

    def names(self, group: str, kind: str, order: str) -> tuple[str, ...]:
        """The names of a group's tensors, by the digest of their order; none if this rank has others now."""
        known = self._tensors.get(kind)
        tensors = None if known is None else known[1].get(group)
        return tensors.names if tensors is not None and tensors.order == order else ()

    def find(self, verdict: CopyVerdict) -> list[tuple[int, int]]:
        """Number of the series and call of each tensor that the verdict names, as far as they are still known."""
        part = self.part(verdict.group, verdict.step, verdict.kind)
        if part is None:
            return []
        series, calls = part.tensors.series.tolist(), part.call_id.tolist()
        places = [part.tensors.names.index(name) for name in verdict.names if name in part.tensors.names]
        return [(series[place], calls[place]) for place in places]

    def answer(self, asked: Question) -> Answer:
        """The digests that are asked for."""
        number = asked.number
        part = self.part(asked.group, asked.step, asked.kind)
        if part is None or asked.generation != self.generation:
            return Answer(number=number)
        total = len(part.checksums)
        begin, end = min(asked.begin, total), min(asked.end, total)
        chunk = max(1, -(-(end - begin) // CHUNKS))
        sums = part.checksums[begin:end]
        if chunk > 1:
            sums = np.array([_digest(sums[at : at + chunk]) for at in range(0, len(sums), chunk)], np.uint64)
        return Answer(number=number, total=total, order=part.tensors.order, chunk=chunk, digests=_encoded(sums.astype("<u8")))

    def _bytes(self) -> int:
        return sum(16 * len(part.checksums) for _, _, held in self._steps for part in held.values())

    def _tensors_of(self, kind: str, series: Numbers) -> dict[str, SharedTensors]:
        known = self._tensors.get(kind)
        if known is None or not np.array_equal(known[0], series):
            known = self._tensors[kind] = series.copy(), self._grouped(kind, series)
            self.groups = self.groups | {group: tensors.ranks for group, tensors in known[1].items()}  # others read it
        return known[1]

    def _grouped(self, kind: str, series: Numbers) -> dict[str, SharedTensors]:
        members: dict[int, tuple[Ranks, list[tuple[str, int, int]]]] = {}  # by identity: thousands of series share their ranks
        for place, number in enumerate(series.tolist()):
            one = self._series[number]
            placement = self._series.placement(one)
            ranks = placement.replicas or (() if placement.assumed else placement.unclaimed)
            if not placement.partial and id(ranks) not in members:
                members[id(ranks)] = self._among(ranks), []
            if not placement.partial:
                name = one.name.removeprefix(f"{kind}/") if one.kind == REPLICA_KIND else one.name
                members[id(ranks)][1].append((f"{one.vpp_stage}:{name}", place, number))
        together: dict[Ranks, list[tuple[str, int, int]]] = {}
        for ranks, some in members.values():
            together.setdefault(ranks, []).extend(some)
        found: dict[str, SharedTensors] = {}
        for ranks, some in together.items():
            if self.rank not in ranks or len(ranks) < 2:
                continue
            some.sort()
            names, places, numbers = zip(*some, strict=True)
            order = blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
            group = blake2b(str(ranks).encode(), digest_size=4).hexdigest()
            found[group] = SharedTensors(ranks, np.array(places), np.array(numbers), names, order)
        return found

    def _among(self, ranks: Ranks) -> Ranks:
        """The monitored ones."""
        return tuple(rank for rank in ranks if not self._monitored or rank in self._monitored)


def _drawn(step: int) -> int:
    """A number that looks random, the same on all ranks: the steps that are collected may all be odd."""
    return (step * 0x9E3779B97F4A7C15 % 2**64) >> 40


def _digest(checksums: Words) -> int:
    """32 bits of all checksums; never 0, which says that there are none."""
    return int.from_bytes(blake2b(checksums.tobytes(), digest_size=4).digest(), "little") or 1


def _encoded(numbers: NDArray[Any]) -> bytes:
    return base64.b64encode(numbers.tobytes())
