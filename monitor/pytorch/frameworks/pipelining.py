"""Stages of ``torch.distributed.pipelining``: what their schedules do with gradients, and no public hook shows.

A schedule runs all forwards of DistributedDataParallel under ``no_sync``. Before the last backward of a stage it prepares the
wrapper's reducer itself, which then reduces. Schedules that split backward in two (zero bubble) add the gradients of weights to
``.grad`` without a hook.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Protocol

from torch import Tensor, nn

from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework
from monitor.pytorch.hooks import GradientVersion, TorchCallPatch
from monitor.recording.attached_model import NamedParameter
from monitor.recording.patches import CallListener, CallPatch

BACKWARD: Final = "backward_maybe_with_nosync"
WEIGHTS: Final = "backward_weight_one_chunk"
"""The second half of a split backward. It calls ``BACKWARD``."""
ARGUMENTS: Final = {
    BACKWARD: ("self", "backward_type", "bwd_kwargs", "last_backward"),
    WEIGHTS: ("self", "bwd_chunk_id", "last_backward"),
}


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
        self._micro_step = 0  # of the weights whose gradients are computed now
        self._begins = failures.guarded("following the backward of a stage", self._backward_begins)
        self._ended = failures.guarded("reading the gradients of a stage", self._weights_ended)
        self._patches = _patches_of_stages()
        for patch in self._patches:
            patch.add(self)

    def remove(self) -> None:
        for patch in self._patches:
            patch.remove(self)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._gradients.wanted:
            self._begins({**dict(zip(ARGUMENTS[patch.name], args, strict=False)), **kwargs})

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
        if "bwd_chunk_id" in given:
            self._micro_step = given["bwd_chunk_id"]
        elif given["backward_type"] == "weight":
            own = {id(p) for p in module.parameters()}
            found = ((one, self._gradient(one)) for one in self._gradients.hooked if id(one.tensor) in own)
            self._before = [(one, None if gradient is None else GradientVersion(gradient)) for one, gradient in found]
        elif given["backward_type"] == "full" and given.get("last_backward"):
            self._framework.wrapper_prepared(module)

    def _weights_ended(self) -> None:
        before, self._before = self._before, []
        for parameter, version in before:
            gradient = self._gradient(parameter)
            if gradient is not None and (version is None or not version.is_intact(gradient)):
                self._gradients.assigned(parameter, gradient, self._micro_step)

    def _gradient(self, parameter: NamedParameter) -> Tensor | None:
        return self._framework.local_gradient(parameter.tensor)


def _patches_of_stages() -> Sequence[CallPatch]:
    """The patches, if the program has imported stages that they fit."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return () if stage is None else _patches_of(stage)


@cache
def _patches_of(stage: Any) -> Sequence[CallPatch]:
    patches = [TorchCallPatch(stage, name, arguments) for name, arguments in ARGUMENTS.items()]
    return patches if all(patch.fits for patch in patches) else ()
