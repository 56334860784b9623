"""The schema of ``manifest.json``, and a reader that checks every type."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from monitor.coordinator.step_ranges import StepRange, StepRanges

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
    """

    role: str
    names: str
    number: int = 0
    ordinal: int = 0

    @property
    def key(self) -> str:
        """The store key under which ranks agree on a name."""
        return f"{_digest([self.role])}/{self.number}"


class Recordings:
    """Counts the recordings of a process."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()

    def begin(self, role: str, names: Iterable[str]) -> RecordedModel:
        """Count and identify a new recording."""
        watched = RecordedModel(role, _digest(names), self._begun[role], self._begun.total())
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


class ManifestError(Exception):
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

    @classmethod
    def of(cls, watched: RecordedModel) -> WatchedRecord:
        return cls(role=watched.role, names=watched.names, number=watched.number)


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
        series: The series that the run measured. The file stays.
    """

    job_id: str
    timestamp: str
    started: str
    saved: str
    closed: bool
    first_step: Natural | None
    series: SeriesReference | None


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
        failures: The number of failures of each cause.
        notes: What a reader must know of the numbers and the numbers do not show.
        closed: True once the run has ended and everything was written.
        recording: How many recordings the process had begun before this one.
        launch: The same for all recordings of all processes that were started together and share a store; empty without one.
        watched: Identifies the recorded model across ranks; None in manifests of earlier versions.
        first_step: The first step that this run has written or lost; None before. Earlier steps belong to the runs in
            ``resumed``.
        resumed: The runs that this run continues, oldest first; only the latest if there are many.
        configurations: Under dynamic monitoring, the configurations in force, in order; only the latest if there are many.
        undecided_since: The step from which on this rank does not know the decision of the others; None: it knows.
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
    failures: dict[str, Natural]
    configurations: tuple[ConfigurationRecord, ...] = ()
    undecided_since: Natural | None = None
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
        fields = self.model_dump(mode="json")
        return (
            "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()) + "\n}\n"
        ).encode()


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
