"""The consensus protocol between ranks, from one rank's side. docs/dynamic-protocol.md has the proof sketch.

Proposals are numbered from 1. Each number is a slot with four keys:

- ``proposal`` is written once: the first rank to write it has proposed.
- Each rank promises not to begin some step h before the decision. It raises ``horizon`` to h if ``horizon`` is lower, then
  adds 1 to ``acknowledged``.
- The rank that brings ``acknowledged`` to the number of ranks writes ``commit:S`` into ``decision``. S is the value of
  ``horizon`` at that time, the largest h.
- A rank that has waited at its h for long enough writes ``abort`` into ``decision``. A rank that cannot use the configuration
  writes ``refuse:`` with the reason.

``decision`` is written once, too, and every rank obeys it. The next slot is used once this one is decided.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from threading import Event, Lock
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from monitor.coordinator.job_store import SAY_AFTER_S, SharedStore, StoreConnection, StoreThread
from monitor.coordinator.store_memory import LocalStore
from monitor.dynamic.proposals import FROM_START, C, ConfigTimeline, Proposal, ProposalQueue, Switch
from monitor.dynamic.step_boundary import PollingIntervals, StepBoundary
from monitor.failures import Failures
from monitor.terminal import counted

# --- Operations on the job's store, as values: so the caller of a routine controls what happens between any two of them.

T = TypeVar("T")


class Check(NamedTuple):
    """Whether ``key`` exists: a bool."""

    key: str


class Get(NamedTuple):
    """The value of ``key``, which exists: a text."""

    key: str


class Add(NamedTuple):
    """Add to the counter ``key``: its new value, an integer."""

    key: str
    amount: int


class CompareSet(NamedTuple):
    """Set ``key`` if it holds ``expected`` ("": if the key does not exist): its value afterwards, a text."""

    key: str
    expected: str
    desired: str


Operation = Check | Get | Add | CompareSet | None
"""One atomic operation. None does nothing: other ranks may run between two operations."""

StoreRoutine = Generator[Operation, Any, T]
"""A generator of store operations that is sent the result of each. The caller controls what happens between any two of them:
in production nothing in particular, in the tests every possible interleaving.
"""


def run_routine(conversation: StoreRoutine[T], store: SharedStore, prefix: str) -> T:
    """Run a routine on ``store``, under keys that begin with ``prefix``.

    Raises:
        Exception: Any error of the store. The routine ends there, and can be started again.
    """
    try:
        operation = next(conversation)
        while True:
            operation = conversation.send(_done(operation, store, prefix))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        conversation.close()


def _done(operation: Operation, store: SharedStore, prefix: str) -> Any:
    match operation:
        case Check(key):
            return store.check([prefix + key])
        case Get(key):
            return store.get(prefix + key).decode()
        case Add(key, amount):
            return store.add(prefix + key, amount)
        case CompareSet(key, expected, desired):
            return store.compare_set(prefix + key, expected, desired).decode()
    return None


ABORT: Final = "abort"
COMMIT: Final = "commit:"
REFUSE: Final = "refuse:"
MEMBERS: Final = "members"
START: Final = "start"
MOST_CHARACTERS: Final = 1_000


class ConsensusListener(Protocol):
    """Receives the results of the protocol. Called on the thread that talks to the store; must not raise."""

    def started_differently(self) -> None:
        """Training begins with another rank's configuration, which differs from this rank's."""

    def settled(self) -> None:
        """This rank now knows the decision that it had stopped waiting for."""

    def rejected(self, proposal: Proposal, reason: str) -> None:
        """A proposal of this rank ended without an agreement."""


class ConsensusProtocol(Generic[C]):
    """One rank's part in the protocol. ``poll`` is for one thread at a time.

    Args:
        world: The number of ranks.
        start: The configuration that this rank has read. The first rank to write its own sets it for all.

    Attributes:
        joined: Whether this rank knows what training began with, and is counted among the members.
        missing: The number of ranks that had not joined at the last attempt to propose.
    """

    def __init__(
        self,
        world: int,
        start: Proposal,
        course: ConfigTimeline[C],
        boundary: StepBoundary[C],
        queue: ProposalQueue,
        listener: ConsensusListener,
    ) -> None:
        self.joined = False
        self.missing = 0
        self._world, self._start = world, start
        self._course, self._boundary, self._queue, self._listener = course, boundary, queue, listener
        self._slot = _Slot(1)

    @property
    def open(self) -> bool:
        """Whether a proposal is open."""
        return self._slot.proposal is not None

    def poll(self) -> StoreRoutine[None]:
        """Do this rank's part of all open slots. Never waits for another rank."""
        if not self.joined:
            yield from self._join()
        while (yield from self._find_proposal()):
            decision = yield from self._decision()
            if decision is None:
                return
            self._obey(decision)
            self._slot = _Slot(self._slot.number + 1)

    def leave(self) -> StoreRoutine[None]:
        """This rank will not answer any more: no rank proposes from now on."""
        if self.joined:
            yield Add(MEMBERS, -1)

    def _join(self) -> StoreRoutine[None]:
        """Agree on the configuration that training begins with: the first rank's. No rank waits for another."""
        held = yield CompareSet(START, "", self._start.serialized())
        start = Proposal.parse(held)
        if start.is_same_change(self._start):
            self._boundary.decide()
        else:
            config = self._course.prepared(start)
            self._course.base = start.fields
            self._boundary.decide([Switch(self._boundary.first_step, config, 0, FROM_START)])
            self._listener.started_differently()
        # If the answer is lost, this rank may be counted twice. That is harmless: a proposal that not all acknowledge aborts.
        yield Add(MEMBERS, 1)
        self.joined = True
        self._listener.settled()

    def _find_proposal(self) -> StoreRoutine[bool]:
        """Whether the slot has a proposal. If it has none, propose what this rank has pending."""
        slot = self._slot
        if slot.proposal is None:
            if (yield Check(slot.key("proposal"))):
                slot.proposal = Proposal.parse((yield Get(slot.key("proposal"))))
            elif (pending := self._queue.due()) is not None and (yield from self._are_all_here()):
                slot.proposal = Proposal.parse((yield CompareSet(slot.key("proposal"), "", pending.serialized())))
        return slot.proposal is not None

    def _are_all_here(self) -> StoreRoutine[bool]:
        """Whether all ranks have joined. With a rank missing, the others would wait until the bound, and then abort."""
        self.missing = self._world - int((yield Get(MEMBERS)))
        return self.missing <= 0

    def _decision(self) -> StoreRoutine[str | None]:
        """The decision, after this rank has done its part; None while there is none."""
        decision = self._slot.key("decision")
        if (yield Check(decision)):
            held: str = yield Get(decision)
            return held
        own = yield from self._own_decision()
        if own:
            held = yield CompareSet(decision, "", own)
            return held
        return None

    def _own_decision(self) -> StoreRoutine[str]:
        """The decision that this rank would write now; "" if none."""
        slot = self._slot
        if refused := self._refusal():
            return refused
        if slot.horizon is None:
            slot.horizon = yield from self._promise()
        if self._boundary.called_off or self._boundary.promised is None:  # the wait timed out
            return ABORT
        if not slot.acknowledged:
            yield from self._acknowledge(slot.horizon)
        return f"{COMMIT}{(yield Get(slot.key('horizon')))}" if slot.complete else ""

    def _refusal(self) -> str:
        """Why this rank cannot use the proposed configuration; "" if it can."""
        slot = self._slot
        if slot.config is None:
            assert slot.proposal is not None
            try:
                slot.config = (self._course.prepared(slot.proposal),)
            except Exception as error:
                return f"{REFUSE}rank {self._start.rank}: {error}"[:MOST_CHARACTERS]
        return ""

    def _promise(self) -> StoreRoutine[int]:
        """Promise a step that training will not begin undecided, and return it. Training may step meanwhile."""
        while True:
            promised = self._boundary.ahead()
            yield None
            self._boundary.promise(promised)
            yield None
            if self._boundary.kept(promised):
                return promised

    def _acknowledge(self, promised: int) -> StoreRoutine[None]:
        slot = self._slot
        key, mine = slot.key("horizon"), str(promised)
        held: str = yield CompareSet(key, "", mine)
        while int(held) < promised:
            held = yield CompareSet(key, held, mine)
        # Set before the addition: if its answer is lost, it may have taken effect, and must not be repeated.
        slot.acknowledged = True
        slot.complete = (yield Add(slot.key("acknowledged"), 1)) == self._world

    def _obey(self, decision: str) -> None:
        slot = self._slot
        proposal = slot.proposal
        assert proposal is not None
        if decision.startswith(COMMIT):
            self._commit(int(decision.removeprefix(COMMIT)), proposal)
        else:
            self._boundary.decide()
            if self._queue.rejected(proposal, for_good=decision != ABORT):
                self._listener.rejected(proposal, decision.removeprefix(REFUSE))
        self._listener.settled()

    def _commit(self, from_step: int, proposal: Proposal) -> None:
        assert self._slot.config is not None, "no rank commits before all have acknowledged, this one among them"
        (config,) = self._slot.config
        self._boundary.decide(self._course.after(self._slot.number, from_step, proposal, config))
        self._queue.accepted(proposal)


class _Slot:
    """This rank's state of one slot.

    Attributes:
        config: The resulting configuration, in a one-tuple; None before it was prepared.
        horizon: The step that this rank has promised.
        acknowledged: Whether this rank has, or may have, added itself to the acknowledgements.
        complete: Whether this rank's acknowledgement was the last.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.proposal: Proposal | None = None
        self.config: tuple[Any] | None = None
        self.horizon: int | None = None
        self.acknowledged = False
        self.complete = False

    def key(self, name: str) -> str:
        return f"{self.number}/{name}"


# --- The participant runs the protocol: in a daemon thread (several ranks) or inline (single process).


@dataclass(frozen=True, slots=True)
class JobConnection(StoreConnection):
    """How a rank reaches the others, and how often it asks.

    Attributes:
        intervals: For tests. None: they follow from the number of ranks.
    """

    intervals: PollingIntervals | None = None

    @property
    def pace(self) -> PollingIntervals:
        """``intervals``, or those that suit the number of ranks."""
        if self.intervals is not None:
            return self.intervals
        return PollingIntervals.alone() if self.store is None else PollingIntervals.of(self.world, self.asked_per_second)


class Participant(Protocol):
    """Runs one rank's part of the consensus protocol."""

    def start(self, timeout_s: float) -> bool:
        """Begin. Returns whether the ranks agreed within ``timeout_s`` on what training begins with."""

    def wake(self) -> None:
        """There is a pending proposal. Never waits for a store that other ranks use."""

    def stop(self) -> None:
        """End within about a second; a store call that hangs is abandoned."""

    def retire(self) -> None:
        """End after the next turn. Takes no lock."""


class SingleProcess:
    """A process without other ranks: a proposal is agreed on at once, on the thread that proposes."""

    def __init__(self, agreement: ConsensusProtocol[Any]) -> None:
        self._agreement = agreement
        self._store = LocalStore()
        self._lock = Lock()

    def start(self, timeout_s: float) -> bool:  # noqa: ARG002
        self.wake()
        return True

    def wake(self) -> None:
        with self._lock:
            run_routine(self._agreement.poll(), self._store, "")

    def stop(self) -> None: ...

    def retire(self) -> None: ...


class StoreParticipant(StoreThread):
    """Polls the protocol through the job's store."""

    def __init__(
        self,
        agreement: ConsensusProtocol[Any],
        boundary: StepBoundary[Any],
        job: JobConnection,
        failures: Failures,
    ) -> None:
        super().__init__("monitor-agreement", job.store, job.alive, failures)
        self._agreement, self._boundary, self._pace, self._prefix = agreement, boundary, job.pace, job.prefix
        self._held_up_since: float | None = None
        self._joined = Event()

    def start(self, timeout_s: float) -> bool:
        """See ``Participant``."""
        self.begin()
        return self._joined.wait(timeout_s)

    def turn(self, store: SharedStore) -> None:
        """See ``StoreThread``."""
        self._boundary.lookahead.saw(time.monotonic(), self._boundary.step)
        run_routine(self._agreement.poll(), store, self._prefix)
        self._joined.set()
        self._warn_of_missing_ranks()

    def pause(self) -> float:
        """See ``StoreThread``."""
        if self._boundary.waiting:
            return self._pace.waiting
        return self._pace.open if self._agreement.open else self._pace.idle

    @property
    def shortest_retry(self) -> float:
        """See ``StoreThread``."""
        return self._pace.idle

    @property
    def is_urgent(self) -> bool:
        """See ``StoreThread``."""
        return self._agreement.open

    def leave(self, store: SharedStore) -> None:
        """See ``StoreThread``."""
        run_routine(self._agreement.leave(), store, self._prefix)

    def unreachable(self, error: Exception) -> None:
        """See ``StoreThread``."""
        advice = "This rank keeps its configuration until it can reach the store again."
        self._failures.report("asking the job's store", error, advice)

    def ended_early(self, error: Exception) -> None:
        """See ``StoreThread``."""
        self._failures.report("agreeing with the other ranks", error, "This rank keeps its configuration.")

    def _warn_of_missing_ranks(self) -> None:
        now = time.monotonic()
        if self._agreement.missing <= 0:
            self._held_up_since = None
        elif self._held_up_since is None:
            self._held_up_since = now
        elif now - self._held_up_since >= SAY_AFTER_S:
            have = counted(self._agreement.missing, "rank has", "ranks have")
            said = f"A change of the configuration waits: {have} not called set_monitor yet."
            self._failures.warn("ranks missing", said)
