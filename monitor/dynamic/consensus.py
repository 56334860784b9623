"""The agreement between ranks, as one rank takes part in it. The proof sketch is in docs/dynamic-protocol.md.

Proposals are numbered from 1. Each number is a slot with four keys:

- ``proposal`` is written once: who comes first has proposed.
- Each rank promises not to begin some step h undecided, raises ``horizon`` to h where it is lower, then adds 1 to
  ``acknowledged``.
- Whoever brings ``acknowledged`` to the number of ranks writes ``commit:S`` into ``decision``, S being what ``horizon`` then
  holds, the largest h.
- A rank that has waited at its h for long enough writes ``abort`` into ``decision``, and one that cannot use the configuration
  ``refuse:`` with the reason.

``decision`` is written once, too, and every rank obeys what it holds. The next slot is used once this one is decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from monitor.dynamic.proposals import FROM_START, C, Course, Proposal, Switch, Wishes
from monitor.dynamic.step_boundary import Boundary, Horizon

# --- The key-value store that the ranks of a job share, and the few operations on it that are used here.
#
# None of them waits for another rank: ``wait`` blocks every other call on the same connection, and ``get`` waits where
# there is no such key. So a key is read only once it is known to exist; nothing here deletes one.

RECONNECT_TIMEOUT: Final = timedelta(seconds=10)
"""Of a connection of our own. A lost one is not missed for minutes by training, which has another."""

T = TypeVar("T")


class Store(Protocol):
    """What is used of the stores of ``torch.distributed``: ``TCPStore``, ``FileStore``, ``HashStore``, ``PrefixStore``.

    ``clone`` is used too where there is one (torch 2.8).
    """

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist. Does not wait for them."""

    def get(self, key: str, /) -> bytes:
        """What ``key`` holds. Waits until there is such a key."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return what it holds then."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set ``key`` if it holds ``expected``, or is new and ``expected`` is empty; return what it then holds.

        Of a key that does not exist, where ``expected`` is not empty, nothing is set and ``expected`` is returned.
        """


class Check(NamedTuple):
    """Whether ``key`` exists: a bool."""

    key: str


class Get(NamedTuple):
    """What ``key``, which exists, holds: a text."""

    key: str


class Add(NamedTuple):
    """Add to the counter ``key``: the integer that it then holds."""

    key: str
    amount: int


class CompareSet(NamedTuple):
    """Set ``key`` if it holds ``expected`` ("": if there is no such key): the text that it then holds."""

    key: str
    expected: str
    desired: str


Operation = Check | Get | Add | CompareSet | None
"""One indivisible step. None touches nothing: between two steps others may take theirs."""

Talk = Generator[Operation, Any, T]
"""What a rank does with the store, as a generator of operations that is sent the result of each. So whoever runs it decides
what happens between any two of them: in production nothing in particular, in the tests everything that can.
"""


def talk(conversation: Talk[T], store: Store, prefix: str) -> T:
    """Carry a conversation out, under keys that begin with ``prefix``.

    Raises:
        Exception: Whatever the store raised. The conversation ends there, and can be begun anew.
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


def _done(operation: Operation, store: Store, prefix: str) -> Any:
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


def own_connection(store: Any) -> Any:
    """The same store over a connection that nobody else uses: training may wait on its own for minutes, and a call of ours that
    hangs must not be in its way.

    A ``FileStore`` counts its users, and its file goes with the last one: let go of what this returns.
    """
    own = _cloned(store)
    if own is not store and _is_client(_base(own)):  # other stores share their timeout with their clones
        own.set_timeout(RECONNECT_TIMEOUT)
    return own


def _cloned(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, TypeError, NotImplementedError):  # before torch 2.8
        return _connected_anew(store)


def _connected_anew(store: Any) -> Any:
    """Another client of the server, without the prefix of ``store``; stores without a server can be shared by threads."""
    base = _base(store)
    return type(base)(base.host, base.port, is_master=False, timeout=RECONNECT_TIMEOUT) if _is_client(base) else store


def _base(store: Any) -> Any:
    """What the prefixes stand before."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _is_client(store: Any) -> bool:
    """Whether it is the client of a server."""
    return hasattr(store, "host") and hasattr(store, "port")


ABORT: Final = "abort"
COMMIT: Final = "commit:"
REFUSE: Final = "refuse:"
MEMBERS: Final = "members"
START: Final = "start"
MOST_CHARACTERS: Final = 1_000


class Listener(Protocol):
    """Who wants to know how it goes. Called on the thread that talks to the store; must not raise."""

    def began_otherwise(self) -> None:
        """Training begins with a configuration that another rank has read, and this one has not."""

    def settled(self) -> None:
        """What this rank did not know is known: the decision for which it did not wait longer."""

    def denied(self, proposal: Proposal, reason: str) -> None:
        """A wish of this rank ended without an agreement."""


class Agreement(Generic[C]):
    """One rank's part. ``poll`` is for one thread at a time.

    Args:
        start: The configuration that this rank would begin with, as the others may, too: the first to say so has it.
        first_step: Of training.

    Attributes:
        joined: Whether it is known what training began with, and the others know of this rank.
        missing: How many ranks had not joined when something was to be proposed last.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        first_step: int,
        start: Proposal,
        course: Course[C],
        boundary: Boundary[C],
        wishes: Wishes,
        horizon: Horizon,
        listener: Listener,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.joined = False
        self.missing = 0
        self._rank, self._world, self._first_step, self._start = rank, world, first_step, start
        self._course, self._boundary, self._wishes, self._horizon = course, boundary, wishes, horizon
        self._listener, self._now = listener, now
        self._slot = _Slot(1)

    @property
    def open(self) -> bool:
        """Whether something is being agreed on."""
        return self._slot.proposal is not None

    def poll(self) -> Talk[None]:
        """Take part in all that there is to take part in now. Never waits for another rank."""
        if not self.joined:
            yield from self._join()
        while (yield from self._find_proposal()):
            decision = yield from self._decision()
            if decision is None:
                return
            self._obey(decision)
            self._slot = _Slot(self._slot.number + 1)

    def leave(self) -> Talk[None]:
        """This rank will not answer any more: nothing is proposed from now on."""
        if self.joined:
            yield Add(MEMBERS, -1)

    def _join(self) -> Talk[None]:
        """Settle what training begins with: no rank waits for another, the first to say so has it."""
        held = yield CompareSet(START, "", self._start.spelled())
        start = Proposal.parse(held)
        if start.asks_what(self._start):
            self._boundary.decide()
        else:
            config = self._course.prepared(start)
            self._course.base = start.fields
            self._boundary.decide([Switch(self._first_step, config, 0, FROM_START)])
            self._listener.began_otherwise()
        # Counted twice, if the answer is lost, does no harm: proposals that not all can acknowledge are aborted.
        yield Add(MEMBERS, 1)
        self.joined = True
        self._listener.settled()

    def _find_proposal(self) -> Talk[bool]:
        """Whether the slot has a proposal, made now if there is a wish."""
        slot = self._slot
        if slot.proposal is None:
            if (yield Check(slot.key("proposal"))):
                slot.proposal = Proposal.parse((yield Get(slot.key("proposal"))))
            elif (wish := self._wishes.due(self._now())) is not None and (yield from self._are_all_here()):
                slot.proposal = Proposal.parse((yield CompareSet(slot.key("proposal"), "", wish.spelled())))
        return slot.proposal is not None

    def _are_all_here(self) -> Talk[bool]:
        """A rank that starts late would hold nobody up for longer than the bound, but that for nothing."""
        self.missing = self._world - int((yield Get(MEMBERS)))
        return self.missing <= 0

    def _decision(self) -> Talk[str | None]:
        """What the register holds, after this rank has done its part; None while that is nothing."""
        decision = self._slot.key("decision")
        if (yield Check(decision)):
            held: str = yield Get(decision)
            return held
        wanted = yield from self._wanted()
        if wanted:
            held = yield CompareSet(decision, "", wanted)
            return held
        return None

    def _wanted(self) -> Talk[str]:
        """What this rank would write into the register now; "" if that is nothing."""
        slot = self._slot
        if refused := self._refusal():
            return refused
        if slot.horizon is None:
            slot.horizon = yield from self._promise()
        if self._boundary.called_off or self._boundary.promised is None:  # waited long enough, or given up
            return ABORT
        if not slot.acknowledged:
            yield from self._acknowledge(slot.horizon)
        return f"{COMMIT}{(yield Get(slot.key('horizon')))}" if slot.complete else ""

    def _refusal(self) -> str:
        """Why this rank cannot use the configuration that is proposed; "" if it can."""
        slot = self._slot
        if slot.config is None:
            assert slot.proposal is not None
            try:
                slot.config = (self._course.prepared(slot.proposal),)
            except Exception as error:
                return f"{REFUSE}rank {self._rank}: {error}"[:MOST_CHARACTERS]
        return ""

    def _promise(self) -> Talk[int]:
        """The first step that training will not begin undecided. It may be stepping meanwhile."""
        while True:
            promised = self._boundary.ahead(self._horizon.steps())
            yield None
            self._boundary.promise(promised)
            yield None
            if self._boundary.kept(promised):
                return promised

    def _acknowledge(self, promised: int) -> Talk[None]:
        slot = self._slot
        key, mine = slot.key("horizon"), str(promised)
        held: str = yield CompareSet(key, "", mine)
        while int(held) < promised:
            held = yield CompareSet(key, held, mine)
        # Before, not after: an addition of which no answer came may have been counted, and must not be counted twice.
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
            if self._wishes.denied(proposal, self._now(), for_good=decision != ABORT):
                self._listener.denied(proposal, decision.removeprefix(REFUSE))
        self._listener.settled()

    def _commit(self, from_step: int, proposal: Proposal) -> None:
        assert self._slot.config is not None, "no rank commits before all have acknowledged, this one among them"
        (config,) = self._slot.config
        self._boundary.decide(self._course.after(self._slot.number, from_step, proposal, config))
        self._wishes.granted(proposal)


class _Slot:
    """What this rank knows of one number, and has done there.

    Attributes:
        config: What the proposal leads to, in a tuple of its own; None before it was prepared.
        horizon: The step that this rank has promised.
        acknowledged: Whether this rank has, or may have, added itself to the acknowledgements.
        complete: Whether it was the last to.
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
