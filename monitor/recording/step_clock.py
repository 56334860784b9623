"""The position of training (step, and micro-step of each chunk's forward and backward), the schedule of collected steps, and
how many micro-batches a step has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from monitor.config import MonitorConfig


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


@dataclass(slots=True)
class Clock:
    """The position of a training loop.

    Attributes:
        step: Number of the step in progress; it ends with the optimizer's step.
        micro_steps: Number of micro-batches a step.
        forward: Micro-step of the latest root forward of each chunk, -1 before the first.
        ended_with: Number of root forwards of the step that ended last.
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
        found = f"Step {step - 1} had {counted}, so a step has {self.adopted}."
        begins = f" Rows and alerts begin with step {step}; with micro_batches={self.adopted} they begin with the first one."
        return found + begins if late else found
