"""Ranks of a job whose every step is taken by hand: the protocol as it stands in ``monitor.dynamic``, over a store in memory,
with nothing happening but what is chosen.

A rank is two threads: the one that talks to the store takes an operation at a time, the training thread writes which step it is
about to begin and then, as another step, looks at the gate. What must never happen is asserted in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from monitor.coordinator.store_memory import LocalStore
from monitor.dynamic.consensus import COMMIT, CompareSet, ConsensusProtocol, _done
from monitor.dynamic.proposals import FROM_ALERT, FROM_FILE, FROM_START, ConfigTimeline, Proposal, ProposalQueue
from monitor.dynamic.step_boundary import PollingIntervals, StepBoundary, StepLookahead

PACE = PollingIntervals(1.0, 1.0, 1.0, 1.0, 1.0)


class UnreachableError(Exception):
    """The store did not answer."""


class Ahead(StepLookahead):
    """Promises a fixed number of steps ahead."""

    def __init__(self, steps: int) -> None:
        super().__init__(PACE)
        self._steps = steps

    def steps(self) -> int:
        return self._steps


class ModelRank:
    """One rank.

    Attributes:
        ran: The configuration that each step was begun with.
        gave_up: Whether it has begun a step undecided, and so is promised nothing.
        missed: Steps that it knows, or may suspect, to have begun with another configuration than the others.
    """

    def __init__(self, world: World, rank: int, ahead: int, last_step: int, refuses: str, retry_s: float) -> None:
        self._world, self.rank, self._last_step, self._refuses = world, rank, last_step, refuses
        self.boundary: StepBoundary[str] = StepBoundary(0, PACE, lambda: None)
        self.boundary.lookahead = Ahead(ahead)
        self.queue = ProposalQueue(retry_s, now=lambda: 0.0)
        self.agreement = ConsensusProtocol(
            world.size,
            Proposal(FROM_START, rank, {"name": "start"}),
            ConfigTimeline({"name": "start"}, self._prepare),
            self.boundary,
            self.queue,
            self,
        )
        self._conversation: Any = None
        self._operation: Any = None
        self.config = "start"
        self.ran: dict[int, str] = {}
        self.about_to_begin: int | None = None
        self.gave_up = False
        self.missed: set[int] = set()
        self.crashed = False

    def _prepare(self, fields: Mapping[str, Any]) -> str:
        name = "+".join(str(value) for value in fields.values())
        if self._refuses and self._refuses in name:
            raise ValueError("cannot be used here")
        return name

    def started_differently(self) -> None: ...

    def settled(self) -> None: ...

    def rejected(self, proposal: Proposal, reason: str) -> None:
        self._world.denied.append((self.rank, proposal.fields, reason))

    @property
    def begun(self) -> int:
        return max(self.ran, default=-1)

    def actions(self) -> list[str]:
        if self.crashed:
            return []
        return ["talk", *self.training_actions()]

    def training_actions(self) -> list[str]:
        if self.about_to_begin is None:
            return ["announce"] if self.begun < self._last_step else []
        if not self.boundary.undecided(self.about_to_begin):
            return ["begin"]
        return ["give_up"] if self.boundary.called_off else ["call_off"]

    def announce(self) -> None:
        self.about_to_begin = self.boundary.step = self.begun + 1

    def begin(self) -> None:
        step = self.about_to_begin
        assert step is not None
        if step >= self.boundary.gate:
            if self.boundary.undecided(step):  # the promise was made between two looks
                return
            for switch in self.boundary.due(step):
                self.missed |= set(range(switch.from_step, step))
                assert self.gave_up or switch.from_step == step, f"rank {self.rank} learned of {switch} at step {step}"
                self.config = switch.config
        self.ran[step] = self.config
        self.about_to_begin = None
        if not self.gave_up:
            self._world.ran(step, self.config, self.rank)

    def call_off(self) -> None:
        assert self.about_to_begin is not None
        self.boundary.call_off(self.about_to_begin)

    def give_up(self) -> None:
        assert self.about_to_begin is not None
        self.boundary.give_up(self.about_to_begin)
        self.gave_up |= self.boundary.undecided_since is not None

    def crash(self) -> None:
        self.crashed = True

    def talk(self) -> None:
        """The next operation, its answer included."""
        if self._conversation is None:
            self._begin_conversation()
        if self._conversation is not None:
            self._answer(self._world.done(self._operation))

    def lose_answer(self) -> None:
        """The next operation is done, and its answer does not arrive."""
        if self._conversation is not None:
            self._world.done(self._operation)
            self._break_off()

    def lose_question(self) -> None:
        """The next operation does not arrive."""
        if self._conversation is not None:
            self._break_off()

    def state(self) -> tuple[Any, ...]:
        """All that what happens next depends on."""
        boundary, slot = self.boundary, self.agreement._slot
        return (
            *(self.about_to_begin, self.begun, self.config, self.gave_up, self.crashed),
            *(() if self._conversation is None else (self._operation, *self._position())),
            *(boundary.step, boundary.gate, boundary.promised, boundary.called_off, tuple(boundary._to_come)),
            *(slot.number, slot.horizon, slot.acknowledged, slot.complete, slot.proposal is None, self.agreement.joined),
            tuple((one.proposal.serialized(), one.attempts) for one in self.queue._pending.values()),
        )

    def _position(self) -> Iterator[int]:
        """The lines at which the conversation stands, and what it has not put into an operation or an attribute yet."""
        frame = self._conversation
        while frame is not None:
            yield frame.gi_frame.f_lineno
            yield frame.gi_frame.f_locals.get("promised", -1)
            frame = frame.gi_yieldfrom

    def _begin_conversation(self) -> None:
        self._conversation = self.agreement.poll()
        self._operation = next(self._conversation)

    def _answer(self, answer: Any) -> None:
        try:
            self._operation = self._conversation.send(answer)
        except StopIteration:
            self._conversation = None

    def _break_off(self) -> None:
        try:
            self._conversation.throw(UnreachableError())
        except UnreachableError:
            self._conversation = None
        else:
            raise AssertionError("a conversation continues without its store")


class World:
    """The ranks of a job and their store.

    Attributes:
        commits: The step of each agreement that was reached, by number.
        configs: What steps were begun with by ranks that could reach the store.
    """

    def __init__(self, size: int, ahead: int = 1, last_step: int = 3, refuses: str = "", retry_s: float = math.inf) -> None:
        self.size = size
        self.store = LocalStore()
        self.commits: dict[int, int] = {}
        self.denied: list[tuple[int, Mapping[str, Any], str]] = []
        self.configs: dict[int, str] = {}
        self.ranks = [
            ModelRank(self, rank, ahead, last_step, refuses if rank == size - 1 else "", retry_s) for rank in range(size)
        ]

    def wish(self, rank: int, name: str, steps: int | None = None) -> None:
        origin, field = (FROM_FILE, "name") if steps is None else (FROM_ALERT, "detail")
        self.ranks[rank].queue.ask(Proposal(origin, rank, {field: name}, steps))

    def done(self, operation: Any) -> Any:
        before = dict(self.store._held)
        answer = _done(operation, self.store, "")
        if isinstance(operation, CompareSet) and operation.key not in before and operation.key.endswith("decision"):
            self._decided(int(operation.key.split("/")[0]), str(answer))
        return answer

    def ran(self, step: int, config: str, rank: int) -> None:
        """Ranks that could reach the store begin a step alike."""
        assert self.configs.setdefault(step, config) == config, f"rank {rank} began step {step} with {config}"

    def _decided(self, number: int, decision: str) -> None:
        if not decision.startswith(COMMIT):
            return
        step = int(decision.removeprefix(COMMIT))
        assert all(step >= earlier for earlier in self.commits.values())
        self.commits[number] = step
        for rank in self.ranks:
            assert rank.gave_up or rank.begun < step, f"rank {rank.rank} had begun step {step} when it was agreed on"

    def state(self) -> tuple[Any, ...]:
        return (tuple(sorted(self.store._held.items())), *(rank.state() for rank in self.ranks))

    def talk_all(self, rounds: int = 60) -> None:
        """All that are not gone talk until nothing is left to be said."""
        for _ in range(rounds):
            for rank in self.ranks:
                if not rank.crashed:
                    rank.talk()
