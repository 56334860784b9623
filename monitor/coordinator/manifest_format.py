"""The schema of ``manifest.json``, and a reader that checks every type."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

# --- Sets of step numbers, stored as ranges with an interval, so that a long run takes only a few lines of a manifest.

LAST_STEP: Final = 2**63 - 1
MOST_RANGES: Final = 1000
MOST_RANGES_OF_A_CAUSE: Final = 200
MOST_CAUSES: Final = 16
MOST_CHARACTERS_OF_A_CAUSE: Final = 300
OTHER_CAUSES: Final = "other causes"
KILLED: Final = "killed before it was written"
THINNED: Final = "thinned to stay within max_output_bytes"


class StepRange(NamedTuple):
    """``first, first + interval, ..., last``. A single step has the interval 1."""

    first: int
    last: int
    interval: int = 1

    @property
    def size(self) -> int:
        return (self.last - self.first) // self.interval + 1

    def holds(self, step: int) -> bool:
        return self.first <= step <= self.last and (step - self.first) % self.interval == 0

    def steps(self) -> range:
        return range(self.first, self.last + 1, self.interval)


@dataclass(frozen=True, slots=True)
class Rest:
    """Steps beyond the bound on ranges: their number (a step added twice counts twice), the lowest and the highest."""

    count: int
    first: int
    last: int

    def with_step(self, step: int) -> Rest:
        return Rest(self.count + 1, min(self.first, step), max(self.last, step))


class StepRanges:
    """A set of steps. It is exact up to ``most`` ranges; further steps are only counted.

    Steps may come in any order and more than once. Every n-th step is one range, for any n. Not safe across threads.
    """

    def __init__(self, steps: Iterable[int] = (), most: int = MOST_RANGES) -> None:
        self._most = most
        self._ranges: list[StepRange] = []  # in order, and no two overlap, not even between their steps
        self._rest: Rest | None = None
        self._held = 0
        for step in steps:
            self.add(step)

    @classmethod
    def restored(cls, ranges: Iterable[tuple[int, int, int]], rest: Rest | None, most: int = MOST_RANGES) -> StepRanges:
        """From the ranges of a manifest, which are in order and do not overlap."""
        steps = cls(most=most)
        steps._ranges = [StepRange(*one) for one in ranges]
        steps._rest = rest
        steps._held = sum(one.size for one in steps._ranges)
        return steps

    @property
    def ranges(self) -> tuple[StepRange, ...]:
        return tuple(self._ranges)

    @property
    def rest(self) -> Rest | None:
        return self._rest

    @property
    def newest(self) -> int:
        """The last step, ``rest`` included; -1 if there are none."""
        return max(self._ranges[-1].last if self._ranges else -1, self._rest.last if self._rest else -1)

    @property
    def interval(self) -> int | None:
        """The interval of the last range; None if the range is a single step, or there is no range."""
        return self._ranges[-1].interval if self._ranges and self._ranges[-1].size > 1 else None

    @property
    def count(self) -> int:
        """Number of steps, those of ``rest`` included."""
        return self._held + (self._rest.count if self._rest else 0)

    def holds(self, step: int) -> bool:
        """Whether the step is in a range; those of ``rest`` are not."""
        at = bisect_right(self._ranges, step, key=_first)
        return at > 0 and self._ranges[at - 1].holds(step)

    def between(self, first: int, last: int) -> Iterator[int]:
        """The steps of ranges from ``first`` to ``last``, both included, ascending."""
        for one in self._ranges[max(bisect_right(self._ranges, first, key=_first) - 1, 0) :]:
            if one.first > last:
                return
            if (cut := _between(one, first, last)) is not None:
                yield from cut.steps()

    def around(self, step: int) -> list[int]:
        """``step``, and the nearest steps before and after it."""
        at = bisect_right(self._ranges, step, key=_first)
        near = [one.steps() for one in self._ranges[max(at - 2, 0) : at + 1]]
        before = [steps[place - 1] for steps in near if (place := bisect_left(steps, step))]
        after = [steps[place] for steps in near if (place := bisect_right(steps, step)) < len(steps)]
        return [*before[-1:], step, *after[:1]]

    def add(self, step: int) -> None:
        at = bisect_right(self._ranges, step, key=_first)
        begin, end = max(at - 1, 0), at + 1
        neighbours = self._ranges[begin:end]
        if any(neighbour.holds(step) for neighbour in neighbours):
            return
        parted = [*_below(neighbours, step), StepRange(step, step), *_above(neighbours, step)]
        joined = list(_joined(parted))
        if len(self._ranges) - len(neighbours) + len(joined) > self._most:
            self._rest = self._rest.with_step(step) if self._rest else Rest(1, step, step)
            return
        self._ranges[begin:end] = joined
        self._held += 1

    def take(self, first: int, last: int = LAST_STEP) -> list[StepRange]:
        """Remove the steps from ``first`` to ``last``, both included, and return them. Steps in ``rest`` cannot be removed."""
        taken = [cut for one in self._ranges if (cut := _between(one, first, last)) is not None]
        below = [cut for one in self._ranges if (cut := _between(one, 0, first - 1)) is not None]
        above = [cut for one in self._ranges if (cut := _between(one, last + 1, LAST_STEP)) is not None]
        if taken:
            self._ranges = list(_joined([*below, *above])) if below or above else []
            self._held -= sum(one.size for one in taken)
        return taken

    def add_all(self, ranges: Iterable[StepRange]) -> None:
        """Like ``add`` for each step; a range that does not touch others is added at once."""
        for one in ranges:
            at = bisect_right(self._ranges, one.first, key=_first)
            clear = (not at or self._ranges[at - 1].last < one.first) and all(
                one.last < following.first for following in self._ranges[at : at + 1]
            )
            if clear and len(self._ranges) < self._most:
                self._ranges[at:at] = [one]
                self._held += one.size
            else:
                for step in one.steps():
                    self.add(step)


def without_pairs(ranges: Iterable[StepRange]) -> list[StepRange]:
    """The same steps for people, without ranges of two distant steps: 0, 10 to 15 instead of 0 to 10 by 10, 11 to 15."""
    found: list[StepRange] = []
    for one in ranges:
        pair = one.size == 2 and one.interval > 1
        for part in (StepRange(one.first, one.first), StepRange(one.last, one.last)) if pair else (one,):
            last = found[-1] if found else None
            if last is not None and last.interval == part.interval == 1 and last.last + 1 == part.first:
                found[-1] = StepRange(last.first, part.last)
            else:
                found.append(part)
    return found


class StepsByCause:
    """Sets of steps by cause. The number and length of causes are bounded."""

    def __init__(self) -> None:
        self._sets: dict[str, StepRanges] = {}

    def add(self, step: int, cause: str) -> None:
        cause = cause[:MOST_CHARACTERS_OF_A_CAUSE]
        if cause not in self._sets and len(self._sets) >= MOST_CAUSES:
            cause = OTHER_CAUSES
        self._sets.setdefault(cause, StepRanges(most=MOST_RANGES_OF_A_CAUSE)).add(step)

    def add_range(self, steps: StepRange, cause: str) -> None:
        """Like ``add`` for each step."""
        self._sets.setdefault(cause, StepRanges(most=MOST_RANGES_OF_A_CAUSE)).add_all([steps])

    @property
    def newest(self) -> int:
        """The last step under any cause; -1 if there are none."""
        return max((one.newest for one in self._sets.values()), default=-1)

    def restore(self, cause: str, steps: StepRanges) -> None:
        """Set the steps of a cause, as read from a manifest."""
        self._sets[cause] = steps

    def take(self, first: int, last: int = LAST_STEP) -> None:
        """Remove the steps from ``first`` to ``last``, both included, and causes without steps."""
        for steps in self._sets.values():
            steps.take(first, last)
        self._sets = {cause: steps for cause, steps in self._sets.items() if steps.count}

    def __contains__(self, step: int) -> bool:
        """Whether any cause lists the step."""
        return any(one.holds(step) for steps in self._sets.values() for one in steps.ranges)

    def items(self) -> Iterable[tuple[str, StepRanges]]:
        return self._sets.items()


def _between(steps: StepRange, first: int, last: int) -> StepRange | None:
    """The part of ``steps`` from ``first`` to ``last``; None if empty."""
    low = steps.first + max(-((steps.first - first) // steps.interval), 0) * steps.interval
    high = steps.first + (min(last, steps.last) - steps.first) // steps.interval * steps.interval
    return _plain(low, high, steps.interval) if low <= high else None


def _first(steps: StepRange) -> int:
    return steps.first


def _below(ranges: Iterable[StepRange], step: int) -> Iterator[StepRange]:
    """The parts of ``ranges`` before ``step``. No range holds ``step``."""
    for first, last, interval in ranges:
        if first < step:
            yield _plain(first, min(last, first + (step - first) // interval * interval), interval)


def _above(ranges: Iterable[StepRange], step: int) -> Iterator[StepRange]:
    for first, last, interval in ranges:
        if last > step:
            yield _plain(max(first, last - (last - step) // interval * interval), last, interval)


def _plain(first: int, last: int, interval: int) -> StepRange:
    return StepRange(first, last, interval if first < last else 1)


def _joined(ranges: Iterable[StepRange]) -> Iterator[StepRange]:
    """Ranges in order; neighbours that continue at the same interval are merged."""
    ranges = iter(ranges)
    current = next(ranges)
    for following in ranges:
        gap = following.first - current.last
        if all(one.size == 1 or one.interval == gap for one in (current, following)):
            current = StepRange(current.first, following.last, gap)
        else:
            yield current
            current = following
    yield current


# --- Identifies the model of a recording, so that recordings of the same model can be matched across ranks.
#
# A rank may record more models than the others (an average of the weights, a teacher). Ranks do not wait for each other:
# each numbers its recordings alone. The role is the same on every rank that trains a model; recordings of one role are
# numbered in the order in which they began.


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """Identifies the model that a recording watches.

    Attributes:
        role: A readable text, the same on all ranks that record the same model.
        names: Digest of the names of all parameters of this rank; stages of a pipeline differ.
        number: How many recordings of the role this process had begun before.
        ordinal: How many recordings of any role this process had begun before.
        shapes: Digest of the shapes of these parameters, as this rank holds them; "" if they are not known.
    """

    role: str
    names: str
    number: int = 0
    ordinal: int = 0
    shapes: str = ""

    @property
    def key(self) -> str:
        """The store key under which ranks agree on a name."""
        return f"{_digest([self.role])}/{self.number}"


class Recordings:
    """Counts the recordings of a process."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()

    def begin(self, role: str, names: Iterable[str], shapes: Iterable[str] = ()) -> RecordedModel:
        """Count and identify a new recording."""
        watched = RecordedModel(role, _digest(names), self._begun[role], self._begun.total(), _digest(shapes))
        self._begun[role] += 1
        return watched


RECORDINGS: Final = Recordings()
"""The recordings of this process."""


def _digest(texts: Iterable[str]) -> str:
    return sha256("\0".join(texts).encode("utf-8", "backslashreplace")).hexdigest()[:16]


SCHEMA_VERSION: Final = 1
MANIFEST_FILE: Final = "manifest.json"
MANIFEST_LIMIT: Final = 16 * 2**20
"""Largest size in bytes. Manifests stay far below, however long the run."""

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class ManifestError(ValueError):
    """A manifest, or a file that it names, is missing, damaged or of another kind. The message names the file and the error."""


class StrictRecord(BaseModel):
    """Base of records in JSON files: strictly typed; fields that a later version added are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class RestRecord(StrictRecord):
    """Steps between ``first`` and ``last`` that are only counted."""

    count: Positive
    first: Natural
    last: Natural


class StepsRecord(StrictRecord):
    """A set of steps: ``ranges`` of (first, last, interval) in ascending order, and a ``rest`` beyond the bound on ranges."""

    count: Natural
    ranges: tuple[tuple[Natural, Natural, Positive], ...]
    rest: RestRecord | None = None

    @classmethod
    def of(cls, steps: StepRanges) -> StepsRecord:
        over = steps.rest
        rest = RestRecord(count=over.count, first=over.first, last=over.last) if over else None
        return cls(count=steps.count, ranges=steps.ranges, rest=rest)

    def restored(self, most: int = MOST_RANGES) -> StepRanges:
        """The steps, to be continued."""
        over = self.rest
        return StepRanges.restored(self.ranges, Rest(over.count, over.first, over.last) if over else None, most)

    @model_validator(mode="after")
    def _consistent(self) -> StepsRecord:
        end = -1
        for first, last, interval in self.ranges:
            if first <= end or last < first or (last - first) % interval:
                raise ValueError(f"[{first}, {last}, {interval}] is not a range of steps after {end}")
            end = last
        listed = sum(StepRange(*one).size for one in self.ranges)
        if self.count != listed + (self.rest.count if self.rest else 0):
            raise ValueError(f"the count is {self.count}, the ranges hold {listed}")
        return self

    @property
    def newest(self) -> int:
        """The last step, ``rest`` included; -1 if there are none."""
        return max(self.ranges[-1][1] if self.ranges else -1, self.rest.last if self.rest else -1)

    def holds(self, step: int) -> bool:
        return any(StepRange(*one).holds(step) for one in self.ranges)

    def between(self, first: int, last: int) -> StepsRecord:
        """The listed steps from ``first`` to ``last``, both included."""
        ranges = []
        for begin, end, interval in self.ranges:
            begin += max(0, -((begin - first) // interval)) * interval
            end -= max(0, -((last - end) // interval)) * interval
            if begin <= end:
                ranges.append((begin, end, interval))
        return StepsRecord(count=sum(StepRange(*one).size for one in ranges), ranges=tuple(ranges))

    def steps(self) -> Iterator[int]:
        """The steps listed, ascending."""
        for one in self.ranges:
            yield from StepRange(*one).steps()


NO_STEPS: Final = StepsRecord(count=0, ranges=())


class RecordedSteps(StrictRecord):
    """Steps that every sink wrote, and those of them that the optimizer skipped or the end of the run cut short.

    Attributes:
        abandoned: Steps that an earlier run wrote, before which a later run resumed and which it has not reached again. They
            are not among ``written``, but files may still hold them.
    """

    written: StepsRecord
    skipped: StepsRecord
    incomplete: StepsRecord
    abandoned: StepsRecord = NO_STEPS


class ThinnedRecord(StrictRecord):
    """Steps that were written, and then removed from the files to stay within ``max_output_bytes``.

    Attributes:
        steps: By level: ``"4"`` has the steps that were removed so that every fourth step stayed.
        unfinished: Those of them of which files may still have rows. These rows do not count.
        kept: Steps at which an alert rule fired, or bits were wrong, and their neighbours. They stay.
    """

    steps: dict[str, StepsRecord] = Field(default_factory=dict)
    unfinished: StepsRecord = NO_STEPS
    kept: StepsRecord = NO_STEPS

    def holds(self, step: int) -> bool:
        """Whether the step was removed."""
        return any(one.holds(step) for one in self.steps.values())


class PipelineRecord(StrictRecord):
    """The position of a rank in its pipeline.

    Attributes:
        ranks: Ranks of the pipeline group, in the order of the forward pass.
        stage: Index of this rank in ``ranks``.
        stages: For each model chunk on this rank, its index among the chunks of all ranks. Chunk ``c`` of the first rank
            follows chunk ``c - 1`` of the last rank.
    """

    ranks: tuple[Natural, ...]
    stage: Natural
    stages: tuple[Natural, ...]

    @classmethod
    def of(cls, rank: int, ranks: Sequence[int], chunks: int) -> PipelineRecord | None:
        """The record of a rank; None for a rank without a pipeline."""
        if rank not in ranks:
            return None
        stage = ranks.index(rank)
        return cls(ranks=tuple(ranks), stage=stage, stages=tuple(stage + chunk * len(ranks) for chunk in range(chunks)))


class WatchedRecord(StrictRecord):
    """``monitor.coordinator.manifest_format.RecordedModel``."""

    role: str
    names: str
    number: Natural
    shapes: str = ""

    @classmethod
    def of(cls, watched: RecordedModel) -> WatchedRecord:
        return cls(role=watched.role, names=watched.names, number=watched.number, shapes=watched.shapes)


class SeriesReference(StrictRecord):
    """The file beside the manifest that holds the series table."""

    file: Annotated[str, Field(pattern=r"^series-[0-9a-f]{16}\.json\.gz$")]
    count: Natural


class ConfigurationRecord(StrictRecord):
    """A configuration that came into force on a rank.

    Attributes:
        number: Number of the agreement, the same on all ranks; 0: the configuration that training began with. A change for
            some steps has two entries, the second for the return to the configuration before.
        origin: ``start``, ``file``, ``alert`` or ``return``.
        from_step: The step from which on all ranks agreed to use the configuration.
        since: The first step for which this rank used it; later than ``from_step`` if it learned of the agreement too late.
        on: ``dynamic_on``.
        digest: Digest of all fields.
        changed: The fields that differ from the configuration before, as a text for people, shortened if long.
    """

    number: Natural
    origin: str
    from_step: Natural
    since: Natural
    on: bool
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    changed: str


class EarlierRun(StrictRecord):
    """A run that recorded to the same directory before.

    Attributes:
        first_step: As in ``ManifestRecord``: the run's steps begin here and end before the first step of the next run.
        last_step: The last step that was written when the next run began; None if there was none, and in earlier versions.
        series: The series that the run measured. The file stays.
    """

    job_id: str
    timestamp: str
    started: str
    saved: str
    closed: bool
    first_step: Natural | None
    last_step: Natural | None = None
    series: SeriesReference | None


class WrongBits(StrictRecord):
    """Bits that were found to be wrong while training ran.

    Attributes:
        check: ``copies``: ranks hold different bits. ``between steps``: a tensor of this rank changed between two steps.
        kind: Of the rows that show it.
        names: Of the tensors, the first ones; none if they are not known.
        ranks: Whose bits they are, the first ones. Of two copies, both.
        host: Of the rank that found it.
        said: The sentence for people.
    """

    check: Literal["copies", "between steps"]
    step: Natural
    kind: str
    names: tuple[str, ...]
    ranks: tuple[Natural, ...]
    said: str
    host: str = ""


class ManifestRecord(StrictRecord):
    """The manifest of one rank: what it wrote, and what a reader must know of it.

    Attributes:
        job_agreed: False if the job id and the timestamp are this rank's own, and other ranks may have others.
        started: ISO 8601 with the offset from UTC; ``timestamp`` has no year. ``saved``, the time of writing, likewise.
        groups: Ranks of the groups that this rank belongs to, by their role (``dp``, ``tp``, ``pp``), in the group's order.
        pipeline: None if no pipeline group is known, or an earlier version of the monitor wrote the manifest.
        config: The configuration as used, every default filled in.
        series: The series measured so far; None before the first.
        dropped: Steps that never reached a sink, by reason.
        lost: By sink, steps that it could not write, by reason. Other sinks may have them.
        thinned: Steps that were removed from the files later.
        failures: The number of failures of each cause.
        said: What was logged at the first failure of each cause.
        notes: What a reader must know of the numbers and the numbers do not show.
        closed: True once the run has ended and everything was written.
        recording: How many recordings the process had begun before this one.
        launch: The same for all recordings of all processes that were started together and share a store, or of one process
            without a store. Earlier versions left it empty without one.
        watched: Identifies the recorded model across ranks; None in manifests of earlier versions.
        first_step: The first step that this run has written or lost; None before. Earlier steps belong to the runs in
            ``resumed``.
        resumed: The runs that this run continues, oldest first; only the latest if there are many.
        configurations: Under dynamic monitoring, the configurations in force, in order; only the latest if there are many.
        undecided_since: The step from which on this rank does not know the decision of the others; None: it knows.
        wrong_bits: What the checks of bits have found on this rank, or as the lowest of the ranks that hold a tensor.
    """

    schema_version: int
    job_id: str
    job_agreed: bool
    timestamp: str
    started: str
    saved: str
    closed: bool
    rank: Natural
    world_size: Positive
    groups: dict[str, tuple[Natural, ...]]
    pipeline: PipelineRecord | None = None
    host: str
    pid: Natural
    versions: dict[str, str]
    config_path: str
    config: dict[str, Any]
    formats: tuple[str, ...]
    recording: Natural = 0
    launch: str = ""
    watched: WatchedRecord | None = None
    series: SeriesReference | None
    resumed: tuple[EarlierRun, ...] = ()
    first_step: Natural | None = None
    steps: RecordedSteps
    dropped: dict[str, StepsRecord]
    lost: dict[str, dict[str, StepsRecord]]
    thinned: ThinnedRecord = ThinnedRecord()
    failures: dict[str, Natural]
    said: dict[str, str] = {}
    configurations: tuple[ConfigurationRecord, ...] = ()
    undecided_since: Natural | None = None
    wrong_bits: tuple[WrongBits, ...] = ()
    notes: dict[str, str | int | float | bool]

    @field_validator("schema_version")
    @classmethod
    def _known(cls, version: int) -> int:
        return known_version(version)

    @model_validator(mode="after")
    def _rank_of_the_world(self) -> ManifestRecord:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not one of {self.world_size}")
        return self

    def to_json(self) -> bytes:
        """JSON with one line per field, readable in a pager."""
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self.model_dump(mode="json").items()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def checks_replicas(config: Mapping[str, Any]) -> bool:
    """What ``MonitorConfig.checks_replicas`` says, of a configuration as a manifest has it."""
    asked, alert = config.get("replica_check"), config.get("alert")
    return bool(isinstance(alert, Mapping) and alert.get("rules")) if asked is None else bool(asked)


def collected_every(record: ManifestRecord) -> int:
    """The interval between two collected steps, as configured."""
    interval = record.config.get("step_interval", 1)
    return interval if isinstance(interval, int) and interval > 0 else 1


def steps_between(known: int, resumed: int, interval: int) -> StepRange | None:
    """The steps after ``known`` at this interval, before ``resumed``; None if there are none."""
    last = known + (resumed - 1 - known) // interval * interval
    return StepRange(known + interval, last, interval if last > known + interval else 1) if last > known else None


def was_killed(record: ManifestRecord) -> bool:
    """Whether the last run that reported steps, or a run after it, did not end cleanly."""
    runs: list[ManifestRecord | EarlierRun] = [record, *reversed(record.resumed)]
    for run in runs:
        if not run.closed:
            return True
        if run.first_step is not None:
            return False
    return False


def newest_step(record: ManifestRecord | None) -> int:
    """The last written step; -1 if there is none."""
    return -1 if record is None else record.steps.written.newest


def known_version(version: int) -> int:
    """``version``, if this monitor can read it; otherwise raises ``ValueError``."""
    if not 1 <= version <= SCHEMA_VERSION:
        raise ValueError(f"schema version {version} is not known: this monitor reads up to {SCHEMA_VERSION}")
    return version


def read_manifest(path: str | PathLike[str]) -> ManifestRecord:
    """Read a ``manifest.json``.

    Raises:
        ManifestError: the file is missing, too large, truncated, or not a manifest.
    """
    path = Path(path)
    return parsed(ManifestRecord, content_of(path, MANIFEST_LIMIT, "manifest"), path)


def content_of(path: Path, limit: int, what: str) -> bytes:
    """The bytes of a file of at most ``limit`` bytes. ``what`` names the kind of file for the message.

    Raises:
        ManifestError: the file is larger than ``limit`` bytes, or cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("this is not a regular file")  # a read of a pipe would block
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > limit:
        raise ManifestError(f"{path} is larger than any {what} ({limit} bytes)")
    return content


R = TypeVar("R", bound=StrictRecord)


def parsed(record: type[R], content: bytes, path: Path) -> R:
    """Parse ``content`` as JSON. ``path`` is for the message of the ``ManifestError`` raised on failure."""
    try:
        return record.model_validate_json(content)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        more = f" (and {len(others)} more)" if others else ""
        raise ManifestError(f"{path} is damaged or not a manifest's: {place}: {first['msg']}{more}") from error
