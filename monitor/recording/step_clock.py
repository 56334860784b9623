"""Where training is: the step, and for each model chunk the micro-step of its forward and of its backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from monitor.config import MonitorConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps are collected."""

    start_step: int
    step_interval: int
    collect_times: int

    @classmethod
    def of(cls, config: MonitorConfig) -> Schedule:
        return cls(config.start_step, config.step_interval, config.collect_times)

    @classmethod
    def counted_from(cls, step: int, config: MonitorConfig) -> Schedule:
        """Of a configuration that holds from ``step`` on, whatever its ``start_step``."""
        return cls(step, config.step_interval, config.collect_times)

    def collects(self, step: int, collected: int) -> bool:
        """Whether ``step`` is collected after ``collected`` others were."""
        since = step - self.start_step
        return collected < self.collect_times and since >= 0 and since % self.step_interval == 0

    def collected_before(self, step: int) -> int:
        """How many steps were to be collected where each from ``start_step`` on came to pass."""
        return min(len(range(self.start_step, step, self.step_interval)), self.collect_times)


@dataclass(slots=True)
class Clock:
    """The position of a training loop.

    Attributes:
        step: Number of the step in progress; it ends with the optimizer's step.
        forward: Micro-step of the latest root forward of each chunk, -1 before the first.
        known: Whether a step has ``micro_steps`` forwards: of several optimizers' loops it may have any number.
        backward: Micro-step whose backward each chunk is in, -1 before the first and while a forward is the latest. Schedules
            such as 1F1B interleave the two.
    """

    step: int
    micro_steps: int
    chunks: int
    known: bool = True
    forward: list[int] = field(init=False)
    backward: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new step: no micro-step has begun."""
        self.forward = [-1] * self.chunks
        self.backward = [-1] * self.chunks

    def next_step(self) -> None:
        self.step += 1
        self.restart()

    def forward_begins(self, chunk: int) -> None:
        """Another micro-step of a chunk. What a backward adds before it comes to a result of the chunk belongs to it: to a
        parameter that the loss is made from directly it comes first.
        """
        self.forward[chunk] += 1
        self.backward[chunk] = -1

    def micro_step(self, chunk: int) -> int:
        """The micro-step of the forward in progress. A model whose parts are called without its root is in its first."""
        return max(0, self.forward[chunk])

    def backward_micro_step(self, chunk: int) -> int:
        """The micro-step of the backward in progress; the forward's where no root output could tell."""
        backward = self.backward[chunk]
        return backward if backward >= 0 else self.micro_step(chunk)
