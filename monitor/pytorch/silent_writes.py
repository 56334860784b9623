"""Writes that leave the version of a tensor as it is: those of collectives, of kernels written in Triton, and of
``torch.utils.swap_tensors``. Others of this kind (``x.data.mul_()``, ``x.numpy()``, kernels in C) cannot be seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.utils

from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording.patches import CallListener, CallPatch

WAIT: Final = TorchCallPatch(dist.Work, "wait")
"""One patch for this process, since callers look the method up in the class."""
WAIT_FOR_FUTURE: Final = TorchCallPatch(torch._C.Future, "wait")
NOT_WAITED_FOR: Final = (
    TorchCallPatch(dist.Work, "is_completed"),
    TorchCallPatch(dist.Work, "synchronize"),
    TorchCallPatch(torch._C.Future, "done"),
)
"""Methods that end a call for the program without a wait, unless they return False."""

_SWAP: Final = TorchCallPatch(torch.utils, "swap_tensors", ("t1", "t2"))
"""It refuses tensors that have weak references."""

_WRITING: Final = ("allreduce", "alltoall_base", "broadcast", "recv", "recv_anysource", "reduce", "scatter")
"""Methods of process groups that write to their arguments and raise no version. Others raise it, or do not write."""

_OF_GROUPS: Final = [TorchCallPatch(dist.ProcessGroup, name) for name in _WRITING]


class SilentWrites(CallListener):
    """Calls ``written`` after each call that may have written to a tensor without raising its version, until it is removed.

    Before tensors are swapped it is called, too.
    """

    def __init__(self, written: Callable[[], None]) -> None:
        self._written = written
        self._patches: list[CallPatch] = []
        for patch in (WAIT, WAIT_FOR_FUTURE, *NOT_WAITED_FOR, *_OF_GROUPS, _SWAP):
            self._follow(patch)
        self._has_triton = False
        self.look_again()

    def look_again(self) -> None:
        """Follow kernels of Triton, too, once it is there: most programs import it late."""
        if not self._has_triton and "triton.runtime.jit" in sys.modules:
            self._has_triton = True
            self._follow(_launches())

    def _follow(self, patch: CallPatch) -> None:
        if patch.fits:
            patch.add(self)
            self._patches.append(patch)

    def remove(self) -> None:
        for patch in self._patches:
            patch.remove(self)

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        if patch is _SWAP:
            self._written()  # which drops the weak references

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any = None) -> None:
        del patch, args, kwargs, result
        self._written()

    call_raised = call_ended


@cache
def _launches() -> CallPatch:
    """The patch of the method that launches kernels written in Triton, except those that torch compiles."""
    return TorchCallPatch(sys.modules["triton.runtime.jit"].JITFunction, "run")
