"""The data of one training step: what the loop reports, what was read from its tensors, and how both are joined."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# --- Numbers that a step reports. A device may still have to compute them.

Number = float | Callable[[], float]
"""A number, or a function that waits for it: called once, by the writer's thread, never by the training thread."""


def read(number: Number) -> float:
    """The number; waits for it if a device still computes it."""
    return number if isinstance(number, int | float) else number()


ATTRIBUTES: Final = ("loss", "grad_norm", "loss_scale", "learning_rate", "batch_size")
"""The attributes that a loop may set."""


class Step:
    """One step, as a training loop reports it. Its tensors have one element and may be on a device; nothing here waits for
    them.

    Its values are dropped when the step has ended, so that no tensor stays alive.

    Attributes:
        loss: As training reports it.
        grad_norm: The result of ``clip_grad_norm_``, or the norm of the whole gradient from elsewhere.
        loss_scale: The factor that the loss was multiplied by.
        learning_rate: Defaults to the learning rate of the optimizer's first group when the step began.
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
        """Attributes that were set on the step and that a step does not have."""
        return sorted(vars(self).keys() - {*ATTRIBUTES, "local_losses", "_kept"})

    def local_loss(self, loss: Any) -> None:
        """Add the loss of one micro-batch of this rank, from which its backward starts. Without any, ``loss`` is used."""
        self.local_losses.append(loss if self._kept is None else self._kept(loss))

    def forget(self) -> None:
        """The step has ended: drop the tensors, so that their graph is freed."""
        self.loss = self.grad_norm = self.loss_scale = self.learning_rate = None
        self.local_losses = []


# --- The facts of a step: what the training loop reports, and what was read from the recording.

Tokens = Callable[[], Sequence[int]]
"""The number of tokens that went to each expert; the call waits for the device."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts that the training thread reports when a step ends.

    Attributes:
        step: The number of steps that have ended, this one included.
        samples: Of all ranks together, in all steps so far; None if a batch size is unknown.
        batch_size: Of all ranks together, in this step.
        ended: In seconds of a monotonic clock.
        loss: As training reports it for the step.
        grad_norm: Norm of the whole gradient over all ranks, before clipping, if the loop has set it.
        local_losses: The losses of this rank, one a micro-step.
        measured: The recorded step that belongs to it; None if no step was recorded.
        flops: Floating point operations of this rank's model in the step.
        tokens: By router: the tokens of this rank that went to each expert.
        began: When the first step began, in the seconds of ``ended``.
        local_gradients_note: Why the recorded local gradients do not cover all micro-batches of the step; None if they do.
        gradient_scale: The factor on the gradients that the optimizer was given, if the optimizer divides by it.
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
    """Norms that were read from the recording of a step. A norm that could not be read correctly is absent.

    Attributes:
        step: The number of the recorded step, counted from 0.
        local: Norm of each parameter's gradient on this rank, before ranks aggregate them.
        device_local: Norm of all of these gradients as one vector.
        first_moments: Norm of each parameter's first moment, after the previous step.
        second_moments: The same for the second.
        weight: Norm of all weights as one vector, after this step.
        gradient: Norm of all gradients as one vector, over all ranks, as the optimizer was given them.
        gradient_is_here: Whether this rank is known to have the whole gradient.
        loss_scale: The factor that the loss was multiplied by, if any.
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


# --- Join the two halves of a step, which come from two threads: the loop's facts and the recording's norms.

MOST_WAITING: Final = 64
"""Steps that may wait for their norms. If more are waiting, the recording's writer has dropped some."""

Whole = Callable[[StepFacts, StepNorms | None], None]


class StepJoiner:
    """Passes on the facts of each step in order, together with its norms as soon as these are there.

    Norms arrive in the order of their steps. So norms of a later step show that those of an earlier step are lost.

    Args:
        whole: Called with the facts of a step, and its norms if it has any.
    """

    def __init__(self, whole: Whole) -> None:
        self._whole = whole
        self._waiting: deque[StepFacts] = deque()
        self._norms: dict[int, StepNorms | None] = {}
        self._newest = -1

    def facts(self, facts: StepFacts) -> None:
        """Add the facts of a step."""
        self._waiting.append(facts)
        self._settle()

    def norms(self, step: int, norms: StepNorms | None) -> None:
        """Add the norms of a recorded step; None if the step is lost."""
        self._norms[step] = norms
        self._newest = max(self._newest, step)
        while len(self._norms) > MOST_WAITING:  # the loop reports no facts
            del self._norms[next(iter(self._norms))]
        self._settle()

    def pass_on_all(self) -> None:
        """Pass on all waiting steps: no more norms will come."""
        while self._waiting:
            self._pass_on(self._waiting.popleft())

    def _settle(self) -> None:
        while self._waiting and (len(self._waiting) > MOST_WAITING or self._is_whole(self._waiting[0])):
            self._pass_on(self._waiting.popleft())

    def _is_whole(self, facts: StepFacts) -> bool:
        return facts.measured is None or facts.measured in self._norms or facts.measured < self._newest

    def _pass_on(self, facts: StepFacts) -> None:
        norms = None if facts.measured is None else self._norms.get(facts.measured)
        if facts.measured is not None:
            self._norms = {step: one for step, one in self._norms.items() if step > facts.measured}
        self._whole(facts, norms)
