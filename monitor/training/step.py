"""What a training loop tells of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from monitor.training.numbers import Number

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
