"""Stages of ``torch.distributed.pipelining``: what their schedules do with gradients, and no public hook shows.

A schedule runs all forwards of DistributedDataParallel under ``no_sync``. Before the last backward of a stage it prepares the
wrapper's reducer itself, which then reduces. Schedules that split backward in two (zero bubble) add the gradients of weights to
``.grad`` without a hook.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any, Final, Protocol

from torch import Tensor, nn

from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.hooks import GradientVersion, TorchCallPatch
from monitor.recording.attached_model import NamedParameter
from monitor.recording.patches import CallListener, CallPatch

ARGUMENTS: Final = ("self", "backward_type", "bwd_kwargs", "last_backward")


class AssignedGradients(Protocol):
    """Takes gradients that a schedule adds outside of a backward.

    Attributes:
        hooked: The parameters whose gradients are read when a backward reaches them.
    """

    hooked: Sequence[NamedParameter]

    @property
    def wanted(self) -> bool:
        """Whether gradients are read now."""

    def assigned(self, parameter: NamedParameter, gradient: Tensor, micro_step: int) -> None:
        """Read the sum so far, to which the gradient of a micro-batch was added."""


class StageBackwards(CallListener):
    """Follows the backwards of stages. Without stages it does nothing."""

    def __init__(self, gradients: AssignedGradients, framework: Framework, failures: Failures) -> None:
        self._gradients, self._framework = gradients, framework
        self._before: list[tuple[NamedParameter, GradientVersion | None]] = []
        self._begins = failures.guarded("following the backward of a stage", self._backward_begins)
        self._ended = failures.guarded("reading the gradients of a stage", self._weights_ended)
        self._patch = _backward_of_stages()
        if self._patch is not None:
            self._patch.add(self)

    def remove(self) -> None:
        if self._patch is not None:
            self._patch.remove(self)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del patch
        if self._gradients.wanted:
            self._begins({**dict(zip(ARGUMENTS, args, strict=False)), **kwargs})

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del patch, args, kwargs, result
        if self._before:
            self._ended()

    def call_raised(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del patch, args, kwargs
        self._before = []

    def _backward_begins(self, given: Mapping[str, Any]) -> None:
        """If it is split in two, it calls no hooks, and the reducer waits in vain."""
        module: nn.Module = given["self"].submod
        if given["backward_type"] == "weight":
            own = {id(p) for p in module.parameters()}
            found = ((one, self._gradient(one)) for one in self._gradients.hooked if id(one.tensor) in own)
            self._before = [(one, None if gradient is None else GradientVersion(gradient)) for one, gradient in found]
        elif given["backward_type"] == "full" and given.get("last_backward"):
            self._framework.wrapper_prepared(module)

    def _weights_ended(self) -> None:
        before, self._before = self._before, []
        micro_step = _micro_step_on_stack()
        for parameter, version in before:
            gradient = self._gradient(parameter)
            if gradient is not None and micro_step is not None and (version is None or not version.is_intact(gradient)):
                self._gradients.assigned(parameter, gradient, micro_step)

    def _gradient(self, parameter: NamedParameter) -> Tensor | None:
        return self._framework.local_gradient(parameter.tensor)


def _micro_step_on_stack() -> int | None:
    """The micro-batch of whose weights a stage computes the gradients."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "backward_weight_one_chunk":
        frame = frame.f_back
    number = None if frame is None else frame.f_locals.get("bwd_chunk_id")
    return number if isinstance(number, int) else None


def _backward_of_stages() -> CallPatch | None:
    """The patch, if the program has imported stages that it fits."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return None if stage is None else _patch_of(stage)


@cache
def _patch_of(stage: Any) -> CallPatch | None:
    patch = TorchCallPatch(stage, "backward_maybe_with_nosync", ARGUMENTS)
    return patch if patch.fits else None
