"""When the outputs of a call are there: read then, and never by waiting for them.

Python that issues a call waits for its ``Work``, or asks it for a future and waits for that: then the outputs are read in that
moment, on the thread and stream that wait. Code below Python (the reducer of DistributedDataParallel) waits where nobody can
be told. There the future tells, on a thread of the backend. Who waits may be faster than that thread, so outputs that are there
are read when backward ends and when the step does, too; their versions tell whether somebody has changed them by then.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from monitor.failures import Failures
from monitor.pytorch.backward_end import when_backward_ends
from monitor.pytorch.patches import CallListener, CallPatch

Read = Callable[[Sequence[Tensor], Sequence[int | None]], bool | None]
"""Told of outputs that are there, and of their versions where another thread may change them meanwhile. Says whether it could
read them."""

WAIT: Final = CallPatch(dist.Work, "wait")
GET_FUTURE: Final = CallPatch(dist.Work, "get_future")
WAIT_FOR_FUTURE: Final = CallPatch(torch._C.Future, "wait")
PATCHES: Final = (WAIT, GET_FUTURE, WAIT_FOR_FUTURE)
"""Of this process: callers look these up in the class, so the objects stay what they are."""


_NO_BACKWARD: Final = -1


class _Latest(threading.local):
    """Keeps the ``Work`` of a thread's last call until its caller has it."""

    work: Any = None


class _Outputs:
    """What a call is to fill; read once, by whoever is told first that it has been."""

    def __init__(self, tensors: Sequence[Tensor], read: Read) -> None:
        self._tensors: Sequence[Tensor] | None = tensors
        self._versions = [None if one.is_inference() else one._version for one in tensors]
        self._read = read
        self._lock = threading.Lock()

    def waited_for(self) -> None:
        """On the thread that waited, which has not changed them yet."""
        self._once(())

    def done(self, future: Any) -> None:
        """On a thread of the backend."""
        if not _failed(future):
            self._once(self._versions)

    def _once(self, versions: Sequence[int | None]) -> None:
        with self._lock:
            # A backend that fills outputs by copying changes their versions itself: then the thread that waits is to read.
            if self._tensors is not None and self._read(self._tensors, versions):
                self._tensors = None


class Completion(CallListener):
    """The calls whose outputs are not there yet, each told to its ``Read`` when they are."""

    def __init__(self, failures: Failures) -> None:
        self._read_what_is_done = failures.guarded("reading the outputs of communication operators", self.read_what_is_done)
        self._pending: weakref.WeakKeyDictionary[Any, _Outputs] = weakref.WeakKeyDictionary()
        self._told_by_future: dict[int, tuple[_Outputs, Any]] = {}
        self._backward = _NO_BACKWARD
        self._latest = _Latest()

    def listen(self) -> None:
        for patch in PATCHES:
            patch.add(self)

    def remove(self) -> None:
        """Any number of times."""
        for patch in PATCHES:
            patch.remove(self)
        self._pending.clear()
        self._told_by_future.clear()
        self._latest.work = None

    def expect(self, work: Any, tensors: Sequence[Tensor], read: Read) -> None:
        """``work`` was returned by an operator that is to fill ``tensors``."""
        outputs = _Outputs(tensors, read)
        if _python_waits(sys._getframe(1)) or not self._tell_when_done(work, outputs):
            self._latest.work = work
            self._pending[work] = outputs
        elif (backward := torch._C._current_graph_task_id()) not in (_NO_BACKWARD, self._backward):
            self._backward = backward
            when_backward_ends(self._read_what_is_done)

    def read_what_is_done(self) -> None:
        """Read outputs that are there, and whose backend's thread has not come round to saying so."""
        for outputs, future in list(self._told_by_future.values()):
            if future.done():
                outputs.done(future)

    def _tell_when_done(self, work: Any, outputs: _Outputs) -> bool:
        """False where the backend has no futures for this operator."""
        try:
            future = work.get_future()
        except RuntimeError:
            return False
        self._told_by_future[id(outputs)] = outputs, future
        future.add_done_callback(partial(self._done, outputs))
        return True

    def _done(self, outputs: _Outputs, future: Any) -> None:
        outputs.done(future)
        self._told_by_future.pop(id(outputs), None)  # after that, so that the end of a step finds what is not read yet

    def call_ended(self, patch: CallPatch, args: Sequence[Any], _kwargs: Mapping[str, Any], result: Any) -> None:
        outputs = self._pending.get(args[0]) if args and self._pending else None
        if outputs is None:
            return
        if patch is GET_FUTURE:
            result.add_done_callback(outputs.done)  # before the caller can add one of its own, so it runs before those
            self._pending[result] = outputs
        else:
            self._pending.pop(args[0], None)
            outputs.waited_for()


def _python_waits(frame: FrameType | None) -> bool:
    """Whether a function of ``torch.distributed`` issued the call: it waits itself, or its caller gets the ``Work``."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("monitor."):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == distributed_c10d.__file__


def _failed(future: Any) -> bool:
    try:
        future.value()
    except Exception:
        return True
    return False
