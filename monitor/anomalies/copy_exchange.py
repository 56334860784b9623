"""The thread that compares copies of tensors with other ranks, through the job's store.

Keys of the store, each of which is overwritten:

- ``rank/{r}``: what rank r publishes (``Published``).
- ``board``: the open question of the job, and the latest verdicts (``Board``).
- ``answer/{r}``: the answer of rank r to a question (``Answer``).

The lowest rank of each group reads what the group's ranks publish. If it finds a difference, it puts a question on the board,
unless there is one of another group.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final, TypeVar

from monitor.anomalies.copies import MOST_VERDICTS, Answer, Board, CopyHistory, CopyVerdict, Message, Published, Question
from monitor.anomalies.corruption import CorruptionAlerts
from monitor.anomalies.odd_copies import MOST_RANKS, CopyDifference, GroupComparison, differing_places, split, suspect, who
from monitor.coordinator.job_store import SharedStore, StoreConnection, StoreThread
from monitor.coordinator.manifest_format import WrongBits
from monitor.failures import Failures
from monitor.series import Ranks
from monitor.stats.partials import Words

SHORTEST_PAUSE_S: Final = 1.0
SPARE: Final = 1.25
"""Requests to the store are planned with so much room: answers and late ranks need some, too."""

LOOKS_KEPT: Final = 16
"""For so many turns steps are kept: until they are published, read, asked for and answered."""

MOST_WAITING: Final = 6
"""Turns that a leader waits for answers, or for another leader's question to be taken down."""

MOST_ALERTS: Final = 10
NAMED: Final = 5
"""Tensors that an alert names."""

READ_AT_ONCE: Final = 100
ALL_TENSORS: Final = 2**31
LONG_APART: Final = 30
"""Turns after which a rank whose training went back another number of times is said not to be compared."""

MERGE_COMPARES: Final = "Copies are compared by trainermon merge afterwards."

M = TypeVar("M", bound=Message)


@dataclass
class _Inquiry:
    """A difference of a group that a leader looks into.

    Attributes:
        generation: See ``Published``.
        ranks: Those whose copies are looked at.
        begin, end: The range of tensors in which it is.
        asked: The question; None while it could not be asked.
        turns: How long it has waited.
        first: How many parts differ, and of how many, over all tensors.
    """

    group: str
    generation: int
    found: CopyDifference
    ranks: Ranks
    begin: int
    end: int
    asked: Question | None = None
    turns: int = 0
    first: tuple[int, int] | None = None


class CopyExchange(StoreThread):
    """One rank's part. ``pause`` is such that all ranks together ask the store no more than ``job.asked_per_second`` times.

    Args:
        history: What this rank holds.
        pause_s: For tests. None: it follows from the number of ranks.
    """

    def __init__(
        self,
        job: StoreConnection,
        history: CopyHistory,
        alerts: CorruptionAlerts,
        failures: Failures,
        pause_s: float | None = None,
    ) -> None:
        super().__init__("monitor-copies", job.store, job.alive, failures)
        self.verdicts: deque[CopyVerdict] = deque(maxlen=MOST_VERDICTS)
        """About this rank, for the writer thread to make events of."""
        self._job, self._history, self._alerts, self._pause_s = job, history, alerts, pause_s
        self._published = self._answered = self._judged = 0
        self._turns, self._begun = 0, 0.0
        self._comparisons: dict[str, GroupComparison] = {}
        self._inquiry: _Inquiry | None = None
        self._to_post: deque[CopyVerdict] = deque()
        self._there: set[str] = set()
        self._hosts: dict[int, str] = {}
        self._alerts_left = MOST_ALERTS
        self._generation = 0
        self._apart: Counter[int] = Counter()
        self._verdicts_of_all: list[CopyVerdict] = []
        self._board, self._board_text, self._board_turns = Board(), "", 0

    # --- ``StoreThread``

    @property
    def shortest_retry(self) -> float:
        """See ``StoreThread``."""
        return self.turn_s

    @property
    def turn_s(self) -> float:
        """Seconds between two turns, such that all ranks together stay within what they may ask."""
        if self._pause_s is not None:
            return self._pause_s
        requests = 2 + len(self._history.groups)  # publish, read the board, and be read by the lowest rank of each group
        return max(SHORTEST_PAUSE_S, SPARE * requests * self._job.world / self._job.asked_per_second)

    def pause(self) -> float:
        """See ``StoreThread``. Turns begin ``turn_s`` after each other; the first ones of the ranks are spread over as long."""
        self._history.look_s = LOOKS_KEPT * self.turn_s
        if self._turns == 1:
            return self.turn_s * self._job.rank / self._job.world
        return max(0.0, self._begun + self.turn_s - monotonic())

    def turn(self, store: SharedStore) -> None:
        """See ``StoreThread``."""
        self._turns += 1
        self._begun = monotonic()
        if self._turns == 1:
            return
        if self._published != (version := self._history.version):
            store.set(self._key(f"rank/{self._job.rank}"), self._history.published().model_dump_json())
            self._published = version
        self._read_board(store)
        self._answer(store)
        self._take_verdicts()
        self._lead(store)

    def leave(self, store: SharedStore) -> None:
        """See ``StoreThread``."""
        self.turn(store)

    def unreachable(self, error: Exception) -> None:
        """See ``StoreThread``."""
        self._failures.report("comparing copies through the job's store", error, MERGE_COMPARES)

    def ended_early(self, error: Exception) -> None:
        """See ``StoreThread``."""
        self._failures.report("comparing copies with other ranks", error, MERGE_COMPARES)

    # --- Every rank.

    def _key(self, name: str) -> str:
        return f"{self._job.prefix}/{name}"

    def _read(self, store: SharedStore, name: str, kind: type[M]) -> M | None:
        """A message; None if there is none yet, or it cannot be read. One request."""
        key = self._key(name)
        if key not in self._there:
            if store.check([key]):
                self._there.add(key)
            return None
        try:
            return kind.parse(store.get(key))
        except ValueError as error:
            self._failures.report(f"reading {kind.__name__} of another rank", error, MERGE_COMPARES)
            return None

    def _read_board(self, store: SharedStore) -> None:
        key = self._key("board")
        if key not in self._there:
            if store.check([key]):
                self._there.add(key)
            return
        try:
            text = store.get(key).decode()
        except UnicodeDecodeError as error:  # no text is like it, so it could not be compared and set
            self._failures.report("reading the board of copies", error, MERGE_COMPARES)
            text = Board(number=self._board.number + 1).model_dump_json()
            store.set(key, text)
        self._board_turns = self._board_turns + 1 if text == self._board_text else 0
        self._board_text = text
        try:
            self._board = Board.parse(text.encode())
        except ValueError as error:
            self._failures.report("reading the board of copies", error, MERGE_COMPARES)
            self._board = Board(number=self._board.number)

    def _answer(self, store: SharedStore) -> None:
        asked = self._board.question
        if asked is not None and self._job.rank in asked.ranks and asked.number != self._answered:
            store.set(self._key(f"answer/{self._job.rank}"), self._history.answer(asked).model_dump_json())
            self._answered = asked.number

    def _take_verdicts(self) -> None:
        fresh = [one for one in self._board.verdicts if one.number > self._judged]
        self._judged = max((one.number for one in fresh), default=self._judged)
        self._verdicts_of_all = [*self._verdicts_of_all, *fresh][-MOST_ALERTS * MOST_VERDICTS :]
        self.verdicts.extend(one for one in fresh if self._job.rank in one.ranks)

    # --- The lowest rank of a group.

    def _lead(self, store: SharedStore) -> None:
        if self._inquiry is not None and self._inquiry.asked is not None:
            self._follow_up(store, self._inquiry, self._inquiry.asked)
        led = [(group, ranks) for group, ranks in self._history.groups.items() if ranks[0] == self._job.rank]
        for place in range(len(led)):
            if self._inquiry is None and self._alerts_left and not self._stopped.is_set():
                group, ranks = led[(self._turns + place) % len(led)]  # so that none waits for ever
                self._compare(store, group, ranks, sum(len(ranks) for _, ranks in led))
        asked = self._board.question
        is_own = asked is not None and asked.leader == self._job.rank
        if self._inquiry is not None and self._inquiry.asked is None:
            if asked is None or is_own or self._board_turns > MOST_WAITING:
                self._ask(store, self._inquiry)
        elif self._to_post or (is_own and self._inquiry is None):
            self._post(store, None if is_own else asked)

    def _compare(self, store: SharedStore, group: str, ranks: Ranks, led: int) -> None:
        """Read what the ranks of a group publish, over the whole turn if they are many, and find a difference.

        Args:
            led: How many ranks this one reads in a turn, of all groups.
        """
        comparison = self._comparisons.setdefault(group, GroupComparison(ranks))
        generation = self._history.generation
        if self._generation != generation:  # training has gone back
            self._generation = generation
            self._comparisons = {group: (comparison := GroupComparison(ranks))}
        published: dict[int, Mapping[int, Mapping[str, int]]] = {}
        for count, rank in enumerate(ranks, start=1):
            message = self._history.published() if rank == self._job.rank else self._read(store, f"rank/{rank}", Published)
            if message is not None and message.generation == generation:
                self._hosts[rank] = message.host
                published[rank] = message.digests(group)
                self._apart[rank] = 0
            elif message is not None:
                self._say_apart(rank)
            if count % READ_AT_ONCE == 0:
                self.busy_since = None  # the store answers
                if self._stopped.wait(READ_AT_ONCE * self.turn_s / led):
                    return
                self.busy_since = monotonic()
        if (found := comparison.next(published)) is not None:
            self._inquiry = _Inquiry(group, generation, found, self._participants(found), 0, ALL_TENSORS)

    def _say_apart(self, rank: int) -> None:
        """Note that a rank has long been in another pass: it lost the steps that show that training has gone back."""
        self._apart[rank] += 1
        if self._apart[rank] == LONG_APART:
            said = f"Copies of rank {rank} are not compared: ranks disagree how often training went back to an earlier step."
            self._alerts.note(f"copies of rank {rank}", said)

    def _participants(self, found: CopyDifference) -> Ranks:
        """The odd ranks, and one of those that agree."""
        agreeing = (self._job.rank,) if self._job.rank in found.agreeing else found.agreeing[:1]
        return (*found.odd[:MOST_RANKS], *agreeing)

    def _ask(self, store: SharedStore, inquiry: _Inquiry) -> None:
        question = Question(
            number=self._board.number + 1,
            leader=self._job.rank,
            generation=inquiry.generation,
            ranks=inquiry.ranks,
            group=inquiry.group,
            step=inquiry.found.step,
            kind=inquiry.found.kind,
            begin=inquiry.begin,
            end=inquiry.end,
        )
        if self._post(store, question):
            inquiry.asked = question
            self._answer(store)

    def _post(self, store: SharedStore, question: Question | None) -> bool:
        """Change the board, unless another rank was faster."""
        number = self._board.number + 1
        fresh = [one.model_copy(update={"number": number}) for one in self._to_post]
        board = Board(number=number, question=question, verdicts=(*self._board.verdicts, *fresh)[-MOST_VERDICTS:])
        text, key = board.model_dump_json(), self._key("board")
        if store.compare_set(key, self._board_text, text).decode(errors="replace") != text:
            return False
        self._board, self._board_text, self._board_turns = board, text, 0
        self._to_post.clear()
        self._take_verdicts()
        return True

    def _follow_up(self, store: SharedStore, inquiry: _Inquiry, asked: Question) -> None:
        """Read the answers, and weigh them once all are there or enough time has passed."""
        inquiry.turns += 1
        answers: dict[int, Answer] = {}
        for rank in inquiry.ranks:
            own = rank == self._job.rank
            answer = self._history.answer(asked) if own else self._read(store, f"answer/{rank}", Answer)
            if answer is not None and answer.number == asked.number:
                answers[rank] = answer
        if len(answers) == len(inquiry.ranks) or inquiry.turns > MOST_WAITING:
            self._inquiry = None
            self._weigh(inquiry, {rank: one for rank, one in answers.items() if one.total})

    def _weigh(self, inquiry: _Inquiry, found_by: Mapping[int, Answer]) -> None:
        found, comparison = inquiry.found, self._comparisons.get(inquiry.group)
        if comparison is None or inquiry.generation != self._generation:
            return  # of steps that training has gone back over
        answers = list(found_by.values())
        alike = len({(one.total, one.order, one.chunk, len(one.numbers)) for one in answers}) == 1
        if len(answers) < 2 or (len(answers) < len(inquiry.ranks) and inquiry.ranks[-1] not in found_by):
            comparison.miss(found)
            return
        places = differing_places([one.numbers for one in answers]) if alike else []
        if not places:
            if comparison.find_unlike(found):
                self._note(found, "are not compared any more: ranks do not measure the same tensors")
            return
        first, chunk = inquiry.first or (len(places), len(answers[0].numbers)), answers[0].chunk
        is_all = len(places) <= NAMED and (inquiry.first is None or first[0] == 1)
        if chunk > 1:
            begin = inquiry.begin + places[0] * chunk
            self._inquiry = replace(inquiry, begin=begin, end=begin + chunk, asked=None, turns=0, first=first)
        elif comparison.is_by_design(found, *first):
            comparison.take_for_design(found)
            self._note(found, "differ in most tensors at once, so by design. A merge compares them by value")
        else:
            found = _by_tensors(found, {rank: one.numbers for rank, one in found_by.items()}, places)
            every = self._history.names(inquiry.group, found.kind, answers[0].order)
            names = [every[inquiry.begin + place] for place in places[:NAMED]] if every else []
            comparison.accuse(found)
            self._accuse(inquiry, comparison, found, tuple(names), is_all=is_all)
            if comparison.is_over:
                among = ", ".join(map(str, comparison.ranks[:MOST_RANKS]))
                self._note(found, f"and what follows from them are not compared any more between ranks {among}")

    def _accuse(
        self, inquiry: _Inquiry, comparison: GroupComparison, found: CopyDifference, names: tuple[str, ...], *, is_all: bool
    ) -> None:
        self._alerts_left -= 1
        odd = found.odd[:MOST_RANKS]
        of = {"copies": len(found.odd) + len(found.agreeing), "agreeing": len(found.agreeing)}
        first = {"odd_ranks": odd, "hosts": [self._hosts.get(rank, "") for rank in odd], **of}
        others = [one for one in self._verdicts_of_all if one.generation == inquiry.generation]
        until = _earliest([comparison.agreed_until, *(one.agreed_until for one in others)])
        good = _earliest([comparison.good, *(one.good for one in others)])
        about = {"first": [first], "agreed_until": until, "checkpoint": good, "so_far": True}
        shown = tuple(name.removeprefix("0:") for name in names)
        tensors = ", ".join(shown) + ("" if is_all else " and others") if names else "tensors that are not known"
        said = f"Copies of {found.kind} differ in step {found.step}: {tensors}: {who(first)}; {suspect(about)}."
        self._alerts.say(WrongBits(check="copies", step=found.step, kind=found.kind, names=shown, ranks=odd, said=said))
        if not self._alerts_left:
            self._note(found, f"were the last of {MOST_ALERTS} alerts: this rank compares no more")
        verdict = CopyVerdict(
            number=0,
            group=inquiry.group,
            step=found.step,
            kind=found.kind,
            ranks=odd,
            most_agree=bool(found.agreeing),
            names=names,
            generation=inquiry.generation,
            agreed_until=until,
            good=good,
        )
        self._to_post.append(verdict)

    def _note(self, found: CopyDifference, what: str) -> None:
        self._alerts.note(f"copies of {found.kind}", f"Copies of {found.kind} {what}.")


def _by_tensors(found: CopyDifference, numbers: Mapping[int, Words], places: Sequence[int]) -> CopyDifference:
    """Accuse only ranks that have answered, and whose tensors differ. ``places`` are those where some differ."""
    if not found.agreeing:
        odd, agreeing = split({rank: int(own[places[0]]) for rank, own in numbers.items()})
        return replace(found, odd=odd, agreeing=agreeing)
    usual = next(numbers[rank] for rank in found.agreeing if rank in numbers)
    odd = tuple(rank for rank, own in numbers.items() if rank in found.odd and any(own[at] != usual[at] for at in places))
    return replace(found, odd=odd)


def _earliest(steps: Iterable[int | None]) -> int | None:
    """The earliest of steps in which all was well; None if one is not known."""
    known = list(steps)
    return None if None in known else min(step for step in known if step is not None)
