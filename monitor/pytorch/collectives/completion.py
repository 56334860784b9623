"""Reads the outputs of a communication call when they are complete, without waiting for them.

Python code waits for the call's ``Work`` or for a future of it. The outputs are read at that moment, on the thread and stream
that wait. Code below Python (the reducer of DistributedDataParallel) waits without passing a patch. Then the future's callback
reads, on a thread of the backend. The waiting code may be faster than that thread, so complete outputs are also read when
backward and the step end. Their versions show whether they were changed by then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from monitor.failures import Failures
from monitor.pytorch.hooks import TorchCallPatch, when_backward_ends
from monitor.recording import patches
from monitor.recording.patches import CallListener

Call = Any
"""A listener's key for a call."""

Read = Callable[[Call, Sequence[Tensor], Sequence[int | None]], bool]
"""Called with a call, its complete outputs, and their versions if another thread may change them meanwhile. Returns whether it
read them. Does not raise.
"""

WAIT: Final = TorchCallPatch(dist.Work, "wait")
GET_FUTURE: Final = TorchCallPatch(dist.Work, "get_future")
WAIT_FOR_FUTURE: Final = TorchCallPatch(torch._C.Future, "wait")
BEGIN_GROUP: Final = TorchCallPatch(dist.ProcessGroup, "_start_coalescing")
END_GROUP: Final = TorchCallPatch(dist.ProcessGroup, "_end_coalescing")
PATCHES: Final = (WAIT, GET_FUTURE, WAIT_FOR_FUTURE, BEGIN_GROUP, END_GROUP)
"""One set for this process, since callers look the methods up in the class."""

_NO_BACKWARD: Final = -1


class _OfThread(threading.local):
    """Calls that this thread has issued.

    Attributes:
        latest: The ``Work`` that the thread waits for before anything else, the call, and its outputs.
        together: Calls of each process group that are being coalesced.
    """

    latest: tuple[Any, Call, Sequence[Tensor]] | None = None

    def __init__(self) -> None:
        self.together: dict[Any, list[tuple[Call, Sequence[Tensor]]]] = {}


class _Outputs:
    """The outputs of a pending call. The first thread that learns of their completion reads them, once."""

    def __init__(self, call: Call, tensors: Sequence[Tensor], read: Read) -> None:
        self._call = call
        self._tensors: Sequence[Tensor] | None = tensors
        self._versions = [None if one.is_inference() else one._version for one in tensors]
        self._read = read
        self._lock = threading.Lock()

    def waited_for(self) -> None:
        """Called on the thread that waited, which has not changed them yet."""
        self._once(())

    def done(self, future: Any) -> None:
        """Called on a thread of the backend."""
        if not _failed(future):
            self._once(self._versions)

    def _once(self, versions: Sequence[int | None]) -> None:
        with self._lock:
            # A backend that fills outputs by copying changes their versions itself. Then the waiting thread reads.
            if self._tensors is not None and self._read(self._call, self._tensors, versions):
                self._tensors = None


class Completion(CallListener):
    """Calls ``read`` for each pending call when its outputs are complete."""

    def __init__(self, read: Read, failures: Failures) -> None:
        self._read = read
        self._read_what_is_done = failures.guarded("reading the outputs of communication operators", self.read_what_is_done)
        self._pending: weakref.WeakKeyDictionary[Any, list[_Outputs]] = weakref.WeakKeyDictionary()
        self._told_by_future: dict[int, tuple[_Outputs, Any]] = {}
        self._backward = _NO_BACKWARD
        self._of_thread = _OfThread()
        self._told = failures.guarded("following a communication operator", self._tell)

    def listen(self) -> None:
        for patch in PATCHES:
            patch.add(self)

    def remove(self) -> None:
        """Any number of times."""
        for patch in PATCHES:
            patch.remove(self)
        self._pending.clear()
        self._told_by_future.clear()
        self._of_thread = _OfThread()

    def issued(self, group: Any, work: Any, call: Call, outputs: Sequence[Tensor], *, waited_for: bool) -> None:
        """A method of ``group`` has returned ``work``, which will fill ``outputs``.

        Args:
            work: None if the stream is ordered after the call, or if the call will be coalesced.
            waited_for: Whether this thread waits for ``work`` before it does anything else.
        """
        mine = self._of_thread
        if mine.together and group in mine.together:
            mine.together[group].append((call, outputs))
        elif work is None:
            self._read(call, outputs, ())
        elif waited_for:
            mine.latest = work, call, outputs
        else:
            self._expect(work, call, outputs)

    def gathers(self, group: Any) -> bool:
        """Whether this thread is coalescing calls of a group."""
        return group in self._of_thread.together

    def _expect(self, work: Any, call: Call, outputs: Sequence[Tensor]) -> None:
        """Read the outputs when a thread waits for ``work``."""
        self._pending.setdefault(work, []).append(_Outputs(call, outputs, self._read))

    def issued_below(self, work: Any, call: Call, outputs: Sequence[Tensor]) -> None:
        """``work`` will fill ``outputs``, and C++ waits for it unseen."""
        self._tell_when_done(work, _Outputs(call, outputs, self._read))
        if (backward := torch._C._current_graph_task_id()) not in (_NO_BACKWARD, self._backward):
            self._backward = backward
            when_backward_ends(self._read_what_is_done)

    def read_what_is_done(self) -> None:
        """Read complete outputs whose callback has not run yet."""
        for outputs, future in list(self._told_by_future.values()):
            if future.done():
                outputs.done(future)

    def _tell_when_done(self, work: Any, outputs: _Outputs) -> None:
        try:
            future = work.get_future()
        except RuntimeError:
            return  # the backend has no futures for this operator
        self._told_by_future[id(outputs)] = outputs, future
        future.add_done_callback(partial(self._done, outputs))

    def _done(self, outputs: _Outputs, future: Any) -> None:
        outputs.done(future)
        self._told_by_future.pop(id(outputs), None)  # after reading, so that the end of a step finds unread outputs

    def call_ended(self, patch: patches.CallPatch, args: Sequence[Any], _kwargs: Mapping[str, Any], result: Any) -> None:
        mine = self._of_thread
        latest = mine.latest
        if latest is not None and patch is WAIT and latest[0] is args[0]:
            mine.latest = None
            self._read(latest[1], latest[2], ())
        elif args and (self._pending or mine.together or patch is BEGIN_GROUP):
            self._told(patch, args[0], result)

    def call_raised(self, patch: patches.CallPatch, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
        if patch is WAIT:
            self._of_thread.latest = None
        elif patch is END_GROUP and args:
            self._of_thread.together.pop(args[0], None)

    def _tell(self, patch: patches.CallPatch, of: Any, result: Any) -> None:
        if patch is BEGIN_GROUP:
            self._of_thread.together[of] = []
        elif patch is END_GROUP:
            for call, outputs in self._of_thread.together.pop(of, ()):
                self.issued(of, result, call, outputs, waited_for=False)
        elif (pending := self._pending.get(of)) is None:
            return
        elif patch is GET_FUTURE:
            for one in pending:
                result.add_done_callback(one.done)  # before the caller can add one of its own, so it runs before those
            self._pending[result] = pending
        else:
            self._pending.pop(of, None)
            for one in pending:
                one.waited_for()


def _failed(future: Any) -> bool:
    try:
        future.value()
    except Exception:
        return True
    return False
