"""When the outputs of a call are there: read then, and never by waiting for them.

Python that issues a call waits for its ``Work``, or asks it for a future and waits for that: then the outputs are read in that
moment, on the thread and stream that wait. Code below Python (the reducer of DistributedDataParallel) waits where nobody can
be told. There the backend's future tells, on a thread of the backend. Who waits may be faster than that thread, so outputs that
are there are read when backward ends and when the step does, too; their versions tell whether they were changed by then.
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
"""What a listener knows a call by."""

Read = Callable[[Call, Sequence[Tensor], Sequence[int | None]], bool]
"""Told of a call, of its outputs that are there, and of their versions where another thread may change them meanwhile. Says
whether it could read them. Does not raise."""

WAIT: Final = TorchCallPatch(dist.Work, "wait")
GET_FUTURE: Final = TorchCallPatch(dist.Work, "get_future")
WAIT_FOR_FUTURE: Final = TorchCallPatch(torch._C.Future, "wait")
BEGIN_GROUP: Final = TorchCallPatch(dist.ProcessGroup, "_start_coalescing")
END_GROUP: Final = TorchCallPatch(dist.ProcessGroup, "_end_coalescing")
PATCHES: Final = (WAIT, GET_FUTURE, WAIT_FOR_FUTURE, BEGIN_GROUP, END_GROUP)
"""Of this process: callers look these up in the class, so the objects stay what they are."""

_NO_BACKWARD: Final = -1


class _OfThread(threading.local):
    """What a thread has issued.

    Attributes:
        latest: The ``Work`` that it waits for before it does anything else, the call, and its outputs.
        together: Calls of each process group that are to be one.
    """

    latest: tuple[Any, Call, Sequence[Tensor]] | None = None

    def __init__(self) -> None:
        self.together: dict[Any, list[tuple[Call, Sequence[Tensor]]]] = {}


class _Outputs:
    """What a call is to fill; read once, by whoever is told first that it has been."""

    def __init__(self, call: Call, tensors: Sequence[Tensor], read: Read) -> None:
        self._call = call
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
            if self._tensors is not None and self._read(self._call, self._tensors, versions):
                self._tensors = None


class Completion(CallListener):
    """The calls whose outputs are not there yet, each told to ``read`` when they are."""

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
        """A method of ``group`` has returned ``work``, which is to fill ``outputs``.

        Args:
            work: None where the stream comes after the call, or where it will be part of another.
            waited_for: Whether this thread waits for it before it does anything else.
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
        """Whether calls of a group are being gathered on this thread, to be one."""
        return group in self._of_thread.together

    def _expect(self, work: Any, call: Call, outputs: Sequence[Tensor]) -> None:
        """Whoever has ``work`` may wait for it."""
        self._pending.setdefault(work, []).append(_Outputs(call, outputs, self._read))

    def issued_below(self, work: Any, call: Call, outputs: Sequence[Tensor]) -> None:
        """``work`` is to fill ``outputs``, and nobody is told of who waits for it."""
        self._tell_when_done(work, _Outputs(call, outputs, self._read))
        if (backward := torch._C._current_graph_task_id()) not in (_NO_BACKWARD, self._backward):
            self._backward = backward
            when_backward_ends(self._read_what_is_done)

    def read_what_is_done(self) -> None:
        """Read outputs that are there, and whose backend's thread has not come round to saying so."""
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
        self._told_by_future.pop(id(outputs), None)  # after that, so that the end of a step finds what is not read yet

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
