"""The identity of a recording, which its ranks agree on through the job's key-value store, and the names made from it.

Each rank proposes an identity with one ``compare_set`` and adopts the value that the store then holds: the first proposal. No
rank waits for another, and no collective is issued. All processes that share the store agree on a launch name likewise.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from datetime import datetime
from threading import Thread
from typing import Final, Protocol

from monitor.failures import Failures

# --- The format of a job's timestamp and of a rank's directory name: ``Dec03_21-34-40-rank0-1a2b3c4d``.

MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_LEAP_YEAR: Final = 2000
"""A timestamp has no year; in this one each of its days exists, February 29 too."""

_TIMESTAMP: Final = re.compile(r"([A-Z][a-z]{2})([0-9]{2})_([0-9]{2})-([0-9]{2})-([0-9]{2})")
_DIRECTORY: Final = re.compile(
    rf"(?P<timestamp>{_TIMESTAMP.pattern})-rank(?P<rank>0|[1-9][0-9]{{0,8}})-(?P<suffix>[0-9a-f]{{8}})"
)


def timestamp_of(moment: datetime) -> str:
    """``Dec03_21-34-40``, with the month in English whatever the locale."""
    return f"{MONTHS[moment.month - 1]}{moment:%d_%H-%M-%S}"


def timestamp_fields(timestamp: str) -> tuple[int, int, int, int, int]:
    """Month, day, hour, minute, second: tuples sort by time within one year.

    Raises:
        ValueError: ``timestamp`` is not one.
    """
    match = _TIMESTAMP.fullmatch(timestamp)
    if match is None or match[1] not in MONTHS:
        raise ValueError(f"{timestamp!r} is not a timestamp like 'Dec03_21-34-40'")
    day, hour, minute, second = (int(field) for field in match.groups()[1:])
    try:
        moment = datetime(_LEAP_YEAR, MONTHS.index(match[1]) + 1, day, hour, minute, second)
    except ValueError as error:
        raise ValueError(f"{timestamp!r} is not a timestamp like 'Dec03_21-34-40': {error}") from None
    return moment.month, moment.day, moment.hour, moment.minute, moment.second


@dataclass(frozen=True, slots=True)
class RankDirectory:
    """The name of the directory that one rank of one run writes into.

    Attributes:
        timestamp: When the job began, the same on all of its ranks, local time of the rank that proposed it.
        suffix: Eight hexadecimal characters that keep two runs of the same second apart.
    """

    timestamp: str
    rank: int
    suffix: str

    @classmethod
    def new(cls, timestamp: str, rank: int) -> RankDirectory:
        """A unique name. The suffix comes from the system, not from the training's random state."""
        return cls(timestamp, rank, secrets.token_hex(4))

    @classmethod
    def parse(cls, name: str) -> RankDirectory | None:
        """The parts of a directory's name; None if it is not a rank's directory."""
        match = _DIRECTORY.fullmatch(name)
        if match is None:
            return None
        try:
            timestamp_fields(match["timestamp"])
        except ValueError:
            return None
        return cls(match["timestamp"], int(match["rank"]), match["suffix"])

    def __str__(self) -> str:
        return f"{self.timestamp}-rank{self.rank}-{self.suffix}"


TIMEOUT_S: Final = 30.0
"""A new connection looks up the name of its peer; an unresponsive name server takes some ten seconds of this."""

LAUNCH: Final = "monitor/launch"

_JOB_ID: Final = re.compile(r"[0-9a-f]{32}")


class IdentityStore(Protocol):
    """The method used of a torch store (``TCPStore``, ``FileStore``, ``HashStore``, ``PrefixStore``).

    ``clone`` is used too, if the store has it.
    """

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set ``key`` if it holds ``expected``, or is new and ``expected`` is empty; return its value afterwards."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Identifies the run that a file belongs to.

    Attributes:
        job_id: 32 hexadecimal characters. The timestamp alone does not identify a job: two may start in one second.
        timestamp: When the job began, as in the names of its directories.
        agreed: False if the store did not answer, and other ranks may have other identities.
        launch: The same for all recordings of processes that share a store; empty without a store.
    """

    job_id: str
    timestamp: str
    agreed: bool = True
    launch: str = ""

    @classmethod
    def new(cls, moment: datetime | None = None) -> JobIdentity:
        """A new identity. Draws from the system, not from the training's random state."""
        return cls(uuid.uuid4().hex, timestamp_of(moment or datetime.now()))

    def of_launch(self) -> JobIdentity:
        """An identity that all recordings of the launch share, if the launch is known."""
        return replace(self, job_id=self.launch or self.job_id)

    def serialized(self) -> str:
        return f"{self.job_id} {self.timestamp}"

    @classmethod
    def parse(cls, text: str) -> JobIdentity:
        """Raises ``ValueError`` for what is not an identity."""
        job_id, _, timestamp = text.partition(" ")
        if not _JOB_ID.fullmatch(job_id):
            raise ValueError(f"{text!r} is not the identity of a job")
        timestamp_fields(timestamp)
        return cls(job_id, timestamp)


def agree(store: IdentityStore | None, name: str | int, failures: Failures, timeout_s: float = TIMEOUT_S) -> JobIdentity:
    """The identity that all ranks of the job share.

    Args:
        store: The process group's store; None for a single process.
        name: Name of the recording. Ranks that use the same name agree.
        timeout_s: Timeout for the store's answer. If the store is slower or fails, this rank uses its own identity, and
            the failure is reported to ``failures``.
    """
    proposal = JobIdentity.new()
    if store is None:
        return proposal
    try:
        return _within(timeout_s, lambda: _first_proposals(store, f"monitor/job/{name}", proposal))
    except Exception as error:
        advice = "This rank uses its own job id and timestamp; those of other ranks may differ."
        failures.report("agreeing with the other ranks on the name of the job", error, advice)
        return replace(proposal, agreed=False)


def _first_proposals(store: IdentityStore, key: str, proposal: JobIdentity) -> JobIdentity:
    """The first proposal for the recording, with the first one for the launch."""
    connection = _own_connection(store)
    launch, found = (
        JobIdentity.parse(connection.compare_set(one, "", proposal.serialized()).decode()) for one in (LAUNCH, key)
    )
    return replace(found, launch=launch.job_id)


def _own_connection(store: IdentityStore) -> IdentityStore:
    """A clone, if the store supports it: a call that hangs on the job's connection would block training's calls on it."""
    try:
        clone: IdentityStore = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError):
        return store
    return clone


def _within(seconds: float, ask: Callable[[], JobIdentity]) -> JobIdentity:
    """Run ``ask`` on a daemon thread, which is abandoned after the timeout.

    A store call can hang past the store's own timeout, and cannot be interrupted.
    """
    answer: Future[JobIdentity] = Future()
    Thread(target=_answer, args=(answer, ask), name="monitor-job-identity", daemon=True).start()
    try:
        return answer.result(seconds)
    except FutureTimeout:
        raise TimeoutError(f"the job's store did not answer within {seconds:g} s") from None


def _answer(answer: Future[JobIdentity], ask: Callable[[], JobIdentity]) -> None:
    try:
        answer.set_result(ask())
    except BaseException as error:
        answer.set_exception(error)
