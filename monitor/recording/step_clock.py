"""The position of training (step, and micro-step of each chunk's forward and backward), the schedule of collected steps, how
many micro-batches a step has, and the forwards that are under way.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from threading import get_ident
from typing import Final, NamedTuple, final

from monitor.config import MonitorConfig
from monitor.failures import Failures


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps to collect."""

    start_step: int
    step_interval: int
    collect_times: int

    @classmethod
    def of(cls, config: MonitorConfig) -> Schedule:
        return cls(config.start_step, config.step_interval, config.collect_times)

    @classmethod
    def counted_from(cls, step: int, config: MonitorConfig) -> Schedule:
        """The schedule of a configuration that applies from ``step`` on; its ``start_step`` is ignored."""
        return cls(step, config.step_interval, config.collect_times)

    def collects(self, step: int, collected: int) -> bool:
        """Whether ``step`` is collected, if ``collected`` steps were collected before."""
        since = step - self.start_step
        return collected < self.collect_times and since >= 0 and since % self.step_interval == 0

    def collected_before(self, step: int) -> int:
        """Number of steps to collect before ``step``, if every step from ``start_step`` on took place."""
        return min(len(range(self.start_step, step, self.step_interval)), self.collect_times)


MORE_FORWARDS: Final = (
    "grad_acc_steps is {count}, but step {step} has more training forwards of the model. They get the next micro-step numbers."
)
UNLIKE_BEFORE: Final = (
    " The step before had exactly grad_acc_steps. If a batch failed, or the loop skipped optimizer.step() after it, its rows "
    "are among those of this step, and numbers that the loop logs are means over both batches. Call batch_ended() after every "
    "batch: then such a batch is a step of its own, marked as skipped."
)


@dataclass(slots=True)
class Clock:
    """The position of a training loop.

    Attributes:
        step: Number of the step in progress; it ends with the optimizer's step.
        micro_steps: Number of micro-batches a step.
        forward: Micro-step of the latest root forward of each chunk, -1 before the first.
        ended_with: Number of root forwards of the step that ended last.
        unlike: See ``unlike_before``.
        known: Whether every step has ``micro_steps`` forwards. With several optimizers it may have any number.
        learning: Whether ``micro_steps`` is a guess, which the end of the step in progress shows to be right or wrong.
        backward: Micro-step of each chunk's backward in progress; -1 before the first, and after a forward has begun.
            Schedules such as 1F1B interleave forwards and backwards.
        reached: The last micro-step of each chunk that the backward in progress contains, or -1 like ``backward``. The backward
            of a sum of losses contains several micro-steps.
    """

    step: int
    micro_steps: int
    chunks: int
    known: bool = True
    learning: bool = False
    forward: list[int] = field(init=False)
    backward: list[int] = field(init=False)
    reached: list[int] = field(init=False)
    ended_with: int = 0
    unlike: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a new step, without micro-steps."""
        self.forward = [-1] * self.chunks
        self.backward = [-1] * self.chunks
        self.reached = [-1] * self.chunks

    def next_step(self) -> None:
        self.step += 1
        self.ended_with = max(self.forward) + 1
        self.learning = False
        self.restart()

    @property
    def misguessed(self) -> bool:
        """Whether the step in progress has had more forwards than were guessed. Fewer do not mix up its rows."""
        return self.learning and max(self.forward) >= self.micro_steps

    @property
    def more_forwards(self) -> str:
        """What is said if the step in progress has more forwards than ``micro_steps``; empty if it has not."""
        if not self.known or self.learning or max(self.forward) < self.micro_steps:
            return ""
        said = MORE_FORWARDS.format(count=self.micro_steps, step=self.step)
        return said + UNLIKE_BEFORE if self.ended_with == self.micro_steps else said

    def unlike_before(self) -> str:
        """``more_forwards`` of the first step that had them after a step that had not; empty before it has come."""
        if not self.unlike and self.ended_with == self.micro_steps:
            self.unlike = self.more_forwards
        return self.unlike

    def forward_begins(self, chunk: int) -> None:
        """Begin another micro-step of a chunk. Gradients that a backward adds before it reaches a result of the chunk belong to
        this micro-step: a parameter that is used directly in the loss gets its gradient first.
        """
        self.forward[chunk] += 1
        self.backward[chunk] = self.reached[chunk] = -1

    def micro_step(self, chunk: int) -> int:
        """The micro-step of the forward in progress; 0 if modules are called without the root."""
        return max(0, self.forward[chunk])

    def backward_micro_step(self, chunk: int) -> int:
        """The micro-step of the backward in progress, the last one if there are several; the forward's, if no output of the
        root showed it.
        """
        reached = self.reached[chunk]
        return reached if reached >= 0 else self.micro_step(chunk)


class MicroBatchCount:
    """Learns the number from the training forwards of each step.

    The first step decides. If two later steps in a row agree on another number, they correct it, once: the first step may have
    had a forward more, for example to find the largest batch.

    Args:
        guess: The number if the first step shows none.

    Attributes:
        adopted: The number in use; 0 before the first step has ended.
    """

    def __init__(self, guess: int = 1) -> None:
        self.adopted = 0
        self._guess = guess
        self._before = 0
        self._corrected = False

    def step_ended(self, forwards: int) -> bool:
        """Whether ``adopted`` has changed. A first step whose forwards were not seen has as many as were guessed."""
        first, again = not self.adopted, forwards == self._before
        if not first and not forwards:  # a step that is not collected shows none
            return False
        self._before = forwards
        if not first and (self._corrected or not again or forwards == self.adopted):
            return False
        self._corrected = not first
        self.adopted = forwards or self._guess
        return True

    def said(self, step: int, forwards: int, *, late: bool) -> str:
        """A sentence on the step before ``step``, which had so many.

        Args:
            late: Whether recording begins after it.
        """
        one = forwards == 1
        counted = f"{forwards} micro-batch{'' if one else 'es'} (training forward{'' if one else 's'} of the model)"
        found = f"Step {step - 1} had {counted}, so the monitor expects {self.adopted} in each step."
        begins = f" Rows and alerts begin with step {step}; with micro_batches={self.adopted} they begin with the first one."
        return found + begins if late else found


# --- The forwards of the model that are under way, by thread: to which of them the calls of modules belong.

AMONG_THREADS: Final = (
    "A thread has called modules without the model, while other threads ran the model, in training and otherwise. It is not "
    "known to which of the two the calls belong, and they are not recorded."
)
BEYOND_STEP: Final = (
    "A thread was in a forward of the model when another thread ended the step. What it calls after that is not recorded."
)


class OpenRoot(NamedTuple):
    """A root forward that has begun.

    Attributes:
        tracked: Whether it is part of training.
        handled: The exception being handled when it began: a loop may retry in its ``except`` clause.
        step, micro_step: The position of training after it had begun.
    """

    tracked: bool
    handled: BaseException | None
    step: int
    micro_step: int


@final
class RootForwards:
    """The forwards of the root of one chunk that have begun and not ended.

    Args:
        by_thread: Whether each ends on the thread on which it began. Otherwise all threads count as one.
    """

    def __init__(self, clock: Clock, chunk: int, failures: Failures, *, by_thread: bool) -> None:
        self._clock, self._chunk, self._failures = clock, chunk, failures
        self._thread = get_ident if by_thread else _any_thread
        self._open: dict[int, list[OpenRoot]] = {}

    @property
    def mine(self) -> list[OpenRoot]:
        """The open forwards of this thread, one within another."""
        found = self._open.get(self._thread())
        return self._open.setdefault(self._thread(), []) if found is None else found

    @property
    def any_is_open(self) -> bool:
        """Whether a thread is in a forward of the root."""
        return any(list(self._open.values()))

    @property
    def train(self) -> bool:
        """Whether a call of a module by this thread belongs to training. Evaluations and the rehearsal of a pipeline stage do
        not. A thread without a forward of its own may work for those of other threads.
        """
        if mine := self._open.get(self._thread()):  # not by `mine`: each call of a module comes here
            root = mine[-1]
            return root.tracked and (root.step == self._clock.step or self.is_current(root))
        others = [self.is_current(calls[-1]) for calls in list(self._open.values()) if calls]
        if any(others) and not all(others):
            self._failures.warn("calls among threads", AMONG_THREADS)
        return all(others)

    @property
    def micro_step(self) -> int:
        """The micro-step of a call of a module by this thread that begins now."""
        mine = self._open.get(self._thread())
        return mine[-1].micro_step if mine and mine[-1].tracked else self._clock.micro_step(self._chunk)

    def begin(self, *, tracked: bool) -> None:
        """A forward begins on this thread. If it is part of training, its micro-step has begun."""
        self.mine.append(OpenRoot(tracked, sys.exc_info()[1], self._clock.step, self._clock.micro_step(self._chunk)))

    def is_current(self, root: OpenRoot) -> bool:
        """Whether a forward is part of the training of the step in progress."""
        if root.tracked and root.step != self._clock.step:
            self._failures.warn("forwards beyond their step", BEYOND_STEP)
            return False
        return root.tracked

    def end_step(self) -> None:
        """Forget the forwards of this thread, and of threads that have ended. Other threads may be in one now."""
        self._open.pop(self._thread(), None)
        if others := list(self._open):  # before the next line, which then has the threads that begin meanwhile
            living = sys._current_frames()
            for thread in others:
                if thread not in living:
                    self._open.pop(thread, None)


def _any_thread() -> int:
    return 0
