"""When an engine of DeepSpeed steps: once where it ends an accumulation, however often the torch optimizer inside is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from monitor.failures import Failures
from monitor.pytorch.frameworks.deepspeed.loss_scale import grad_scaler_of, loss_scale_of
from monitor.pytorch.frameworks.deepspeed.patches import STEP_PATCH
from monitor.recording.backend import StepListener
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.protocols import HookSet


class EngineSteps(CallListener):
    """Tells a listener of the steps of one engine.

    Attributes:
        optimizers: The torch optimizer inside.
    """

    evaluating = False

    def __init__(self, engine: Any, optimizer: Optimizer, listener: StepListener, failures: Failures) -> None:
        self.optimizers = (optimizer,)
        self._stepped = optimizer
        self._engine = engine
        self._listener = listener
        self._guarded = failures.guarded
        self._hooks = HookSet()
        self._called = False
        self._hooks.add(optimizer.register_step_post_hook(failures.guarded("counting steps", self._is_called)))
        STEP_PATCH.add(self)

    def remove(self) -> None:
        STEP_PATCH.remove(self)
        self._hooks.remove()

    def call_begins(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del kwargs
        if args[0] is self._engine:
            self._called = False
            self._guarded("reading the loss scale", self._tell_scale)()
            self._guarded("reading before the step", self._listener.before_step)(self._stepped)
            self._guarded("reading gradients", self._listener.gradients_ready)(self._stepped)

    def call_ended(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del kwargs, result
        if args[0] is self._engine:
            self._guarded("ending the step", self._ended)()

    def _ended(self) -> None:
        if self._engine.was_step_applied() and (self._called or grad_scaler_of(self._engine) is None):
            self._listener.after_step(self._stepped)
        else:
            self._listener.step_skipped(self._stepped)

    def _is_called(self, *_: Any) -> None:
        self._called = True

    def _tell_scale(self) -> None:
        scale = loss_scale_of(self._engine)
        if scale is not None:
            self._listener.loss_scale(self._stepped, scale)
