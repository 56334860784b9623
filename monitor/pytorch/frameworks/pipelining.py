"""Stages of ``torch.distributed.pipelining`` in DistributedDataParallel.

A schedule runs all forwards of the wrapper under ``no_sync``. Before the last backward of a stage it prepares the wrapper's
reducer itself, which then reduces. No public hook shows that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from torch import nn

from monitor.failures import Failures
from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording.patches import CallListener, CallPatch

ARGUMENTS: Final = ("self", "backward_type", "bwd_kwargs", "last_backward")


class StageBackwards(CallListener):
    """Reports the backwards before which a schedule prepares a reducer. Without stages it does nothing.

    Args:
        prepared: Called with the module of the stage before such a backward, whether it is a wrapper or not.
    """

    def __init__(self, prepared: Callable[[nn.Module], None], failures: Failures) -> None:
        self._prepared = failures.guarded("following the last backward of a stage", prepared)
        self._patch = _backward_of_stages()
        if self._patch is not None:
            self._patch.add(self)

    def remove(self) -> None:
        if self._patch is not None:
            self._patch.remove(self)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A stage begins a backward. If it is split in two (zero bubble), it calls no hooks, and the reducer waits in vain."""
        del patch
        given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        if given.get("backward_type") == "full" and given.get("last_backward"):
            self._prepared(given["self"].submod)


def _backward_of_stages() -> CallPatch | None:
    """The patch, if the program has imported stages that it fits."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    return None if stage is None else _patch_of(stage)


@cache
def _patch_of(stage: Any) -> CallPatch | None:
    patch = TorchCallPatch(stage, "backward_maybe_with_nosync", ARGUMENTS)
    return patch if patch.fits else None
