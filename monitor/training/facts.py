"""What is known of a step: what the training loop tells, and what was read of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from monitor.training.numbers import Number

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
