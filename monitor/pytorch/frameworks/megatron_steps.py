"""When an optimizer of Megatron steps, and when it has skipped one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from monitor.failures import Failures
from monitor.pytorch.frameworks.megatron_optimizers import MasterWeights, members
from monitor.pytorch.frameworks.megatron_patches import STEPS
from monitor.recording.backend import StepListener
from monitor.recording.patches import CallListener, CallPatch


class MegatronSteps(CallListener):
    """Tells a listener of the steps of Megatron's optimizer: of a chained one, of its members' together.

    Gradients are ready when ``prepare_grads`` has returned: reduced, divided by the loss scale, and not yet clipped.

    Attributes:
        optimizers: The first torch optimizer inside it, which has the turn of all; None on a rank where nothing is stepped.
    """

    evaluating = False

    def __init__(self, weights: MasterWeights, listener: StepListener, failures: Failures) -> None:
        self.optimizers: tuple[Optimizer | None] = (weights.optimizer,)
        self._weights = weights
        self._listener = listener
        self._guarded = failures.guarded
        self._stepping: Any = None
        for patch in STEPS:
            patch.add(self)

    def remove(self) -> None:
        for patch in STEPS:
            patch.remove(self)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if patch.name == "step" and self._stepping is None:
            self._guarded("reading before the step", self._begin)(args[0])

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del kwargs
        if args[0] is not self._stepping:
            return
        if patch.name == "prepare_grads":
            self._guarded("reading gradients", self._listener.gradients_ready)(*self.optimizers)
        else:
            self._guarded("ending the step", self._end)(result)

    def call_raised(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if patch.name == "step" and args[0] is self._stepping:
            self._stepping = None

    def _begin(self, optimizer: Any) -> None:
        if not self._weights.belong_to(optimizer):
            return
        self._stepping = optimizer
        if any(getattr(member, "grad_scaler", None) is not None for member in members(optimizer)):
            self._listener.loss_scale(*self.optimizers, optimizer.get_loss_scale())
        if self.optimizers != (None,):
            self._listener.before_step(*self.optimizers)

    def _end(self, result: Any) -> None:
        """Take the result of ``step``, whose first element is whether it was done."""
        self._stepping = None
        if result[0]:
            self._listener.after_step(*self.optimizers)
        else:
            self._listener.step_skipped(*self.optimizers)
