"""What a training loop tells of one step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# --- Numbers that a step reports, some of which a device has yet to compute.

Number = float | Callable[[], float]
"""A number, or what waits for it: called once, by the writer's thread, never by training's."""


def read(number: Number) -> float:
    """The number, waited for."""
    return number if isinstance(number, int | float) else number()


ATTRIBUTES: Final = ("loss", "grad_norm", "loss_scale", "learning_rate", "batch_size")
"""What a loop may set."""


class Step:
    """One step, as a training loop tells of it. Tensors have one element and may be on a device: nobody waits for them here.

    It forgets what it was told when it has ended, and keeps no tensor.

    Attributes:
        loss: As training reports it.
        grad_norm: What ``clip_grad_norm_`` has returned, or who else knows the norm of the whole gradient.
        loss_scale: What the loss was multiplied by.
        learning_rate: That of the optimizer's first group when the step began, unless it is set.
        batch_size: Samples of all ranks together.
    """

    def __init__(self, batch_size: int | None = None, kept: Callable[[Any], Number | None] | None = None) -> None:
        self._kept = kept
        self.loss: Any = None
        self.grad_norm: Any = None
        self.loss_scale: Any = None
        self.learning_rate: Any = None
        self.batch_size = batch_size
        self.local_losses: list[Any] = []

    @property
    def unknown(self) -> list[str]:
        """What was set that a step does not have."""
        return sorted(vars(self).keys() - {*ATTRIBUTES, "local_losses", "_kept"})

    def local_loss(self, loss: Any) -> None:
        """Add the loss of one micro-batch of this rank, as its backward begins from it. Without any, ``loss`` is taken."""
        self.local_losses.append(loss if self._kept is None else self._kept(loss))

    def forget(self) -> None:
        """It has ended: what its tensors were computed from is not to live on."""
        self.loss = self.grad_norm = self.loss_scale = self.learning_rate = None
        self.local_losses = []


# --- What is known of a step: what the training loop tells, and what was read of its tensors.

Tokens = Callable[[], Sequence[int]]
"""How many tokens went to each expert; waits for the device when it is called."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the training thread says of a step when it ends.

    Attributes:
        step: How many steps have ended, this one included.
        samples: Of all ranks together, in all steps so far; None where nobody said how many there are.
        batch_size: Of all ranks together, in this step.
        ended: Seconds of a clock that only goes forward.
        loss: As training reports it for the step.
        grad_norm: Of all gradients over all ranks, before they were clipped, where somebody computed it.
        local_losses: Of this rank, one a micro-step.
        measured: The step of the recording that belongs to it; None where none was recorded.
        flops: Floating point operations of this rank's model in the step.
        tokens: Of each router, by name, what of this rank went to each expert.
        began: When the first step began, in the seconds of ``ended``.
        local_gradients_note: Why local gradients of the recording are not those of all micro-batches of a step, if so.
        gradient_scale: What the gradients that the optimizer was given are multiplied by, where it divides by it itself.
    """

    step: int
    ended: float
    samples: int | None = None
    batch_size: int | None = None
    loss: Number | None = None
    grad_norm: Number | None = None
    loss_scale: Number | None = None
    learning_rate: Number | None = None
    local_losses: tuple[Number, ...] = ()
    measured: int | None = None
    flops: float | None = None
    tokens: Mapping[str, Tokens] = field(default_factory=dict)
    began: float | None = None
    gradient_scale: Number | None = None
    local_gradients_note: str | None = None


@dataclass(frozen=True, slots=True)
class StepNorms:
    """What a recording has of a step. What could not be read right is absent.

    Attributes:
        step: Of the recording, counted from 0.
        local: Norm of each parameter's gradient on this rank, before ranks aggregate them.
        device_local: Of all of them as one vector.
        first_moments: Norm of each parameter's first moment, as the step before has left it.
        second_moments: The same for the second.
        weight: Of all weights as one vector, as this step has left them.
        gradient: Of all gradients as one vector, over all ranks, as the optimizer was given them.
        gradient_is_here: Whether it shows that this rank has the whole gradient.
        loss_scale: What the loss was multiplied by, if it was.
        skipped: Whether the optimizer skipped the step.
    """

    step: int
    local: Mapping[str, float] = field(default_factory=dict)
    device_local: float | None = None
    first_moments: Mapping[str, float] = field(default_factory=dict)
    second_moments: Mapping[str, float] = field(default_factory=dict)
    weight: float | None = None
    gradient: float | None = None
    gradient_is_here: bool = True
    loss_scale: float | None = None
    skipped: bool = False


# --- The two halves of a step, which come from two threads: what the loop told, and what was read of its tensors.

MOST_WAITING: Final = 64
"""Steps that wait for their norms. A writer that is so far behind has dropped some."""

Whole = Callable[[StepFacts, StepNorms | None], None]


class Joining:
    """Hands on each step's facts in their order, with the norms that belong to them as soon as those are there.

    Norms come in the order of their steps, so whoever waits for those of an earlier step waits in vain.

    Args:
        whole: Called with the facts of a step, and its norms if it has any.
    """

    def __init__(self, whole: Whole) -> None:
        self._whole = whole
        self._waiting: deque[StepFacts] = deque()
        self._norms: dict[int, StepNorms | None] = {}
        self._newest = -1

    def facts(self, facts: StepFacts) -> None:
        """The training loop has told of a step."""
        self._waiting.append(facts)
        self._settle()

    def norms(self, step: int, norms: StepNorms | None) -> None:
        """A step of the recording was read; None where it is lost."""
        self._norms[step] = norms
        self._newest = max(self._newest, step)
        while len(self._norms) > MOST_WAITING:  # of a loop that tells nothing
            del self._norms[next(iter(self._norms))]
        self._settle()

    def rest(self) -> None:
        """No more norms will come."""
        while self._waiting:
            self._hand_on(self._waiting.popleft())

    def _settle(self) -> None:
        while self._waiting and (len(self._waiting) > MOST_WAITING or self._is_whole(self._waiting[0])):
            self._hand_on(self._waiting.popleft())

    def _is_whole(self, facts: StepFacts) -> bool:
        return facts.measured is None or facts.measured in self._norms or facts.measured < self._newest

    def _hand_on(self, facts: StepFacts) -> None:
        norms = None if facts.measured is None else self._norms.get(facts.measured)
        if facts.measured is not None:
            self._norms = {step: one for step, one in self._norms.items() if step > facts.measured}
        self._whole(facts, norms)
