"""Records communication for a ``TrainerMon``: listens to every call, and writes rows for its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from mindspore import Tensor
from mindspore.communication import get_group_size, get_process_group_ranks, get_rank

from monitor.config.model import CcDistribution
from monitor.failures import EarlierFailure, Failures
from monitor.mindspore.collective_operators import INTERCEPTION, Handle, MindSporeCollectiveListener
from monitor.mindspore.process_group import initialized, is_settled
from monitor.mindspore.tensor_reader import HOST, MindSporeTensorReader
from monitor.mindspore.tensors import computing, dtype_name
from monitor.recording.collectives import LOCK_SECONDS, CallRows, CollectiveCall, Communication, Labels, NamedGroup, Operator
from monitor.recording.recorder import NoLateRows, Recorder
from monitor.stats.mindspore.tensors import has_data, on_host
from monitor.stats.table import RowSlot

# --- Start listening.


def communication(wanted: CcDistribution, failures: Failures) -> Communication | None:
    """Listen from now on if configured. If that fails, one warning says so."""
    if not wanted.enable:
        return None
    listen = failures.guarded("installing the interception of communication", Communication)
    return listen(wanted, failures, MindSporeCollectives(failures))


# --- Rows of operator calls.


class MindSporeOperatorCalls(NoLateRows):
    """Reads the tensors of communication calls.

    Attributes:
        rows: The rows of calls.
    """

    def __init__(self, recorder: Recorder) -> None:
        assert isinstance(recorder.reader, MindSporeTensorReader)
        self.rows = CallRows(recorder.reader)
        self._recorder, self._device = recorder, recorder.reader.device
        recorder.late = self

    @classmethod
    def of(cls, recorder: Recorder) -> MindSporeOperatorCalls:
        """The reader of ``recorder``, created once: later attachments continue its rows."""
        return recorder.late if isinstance(recorder.late, cls) else cls(recorder)

    def read(self, call: CollectiveCall, tensors: Sequence[Any]) -> bool:
        """Reduce the tensors of a call, one row each.

        Returns:
            Whether all tensors were read. Otherwise none has a row.

        Raises:
            EarlierFailure: An earlier operation of training has failed.
        """
        if not self._recorder.active or not all(map(has_data, tensors)):
            return False
        with computing():
            if self._device == HOST:
                for x in tensors:
                    on_host(x)  # waits for the tensor, which must happen without the lock
            lock = self._recorder.lock
            if not lock.acquire(timeout=LOCK_SECONDS):
                return False
            try:
                return self._recorder.active and self._read(call, tensors)
            finally:
                lock.release()

    def _read(self, call: CollectiveCall, tensors: Sequence[Any]) -> bool:
        call.begin(self._recorder.steps)
        written: list[RowSlot] = []
        complete = False
        try:
            complete = all(self.rows.read(call, x, self._device, written) for x in tensors)
        finally:
            if not complete:
                self.rows.forget(written)
        return complete


# --- The ranks of groups, and their labels.


class MindSporeGroups:
    """The named groups of MindSpore. The ranks of a name may change, so MindSpore is asked for them each time."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._known: dict[tuple[str, tuple[int, ...]], NamedGroup] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Set labels for groups of ranks. If several roles have the same ranks, the first wins."""
        self._labels.learn(roles)
        self._known.clear()

    def of(self, given: Any) -> NamedGroup | None:
        """The group of a name; None if MindSpore does not know it.

        Args:
            given: Its name.
        """
        try:
            key = given, tuple(get_process_group_ranks(given))
            return self._known.get(key) or self._described(*key)
        except (RuntimeError, TypeError, ValueError):
            return None

    def _described(self, name: str, ranks: tuple[int, ...]) -> NamedGroup:
        label = self._labels.of(ranks, get_group_size())
        group = self._known[name, ranks] = NamedGroup(label, get_rank(name))
        return group


class MindSporeCollectives(MindSporeCollectiveListener):
    """Intercepts the operators of MindSpore, and reads their outputs when they are complete.

    Reading a tensor may raise an error of training. MindSpore raises such an error once, at the first wait. So it is passed on
    to the caller of the operator, or of ``wait``.
    """

    _communication: Communication
    computing = staticmethod(nullcontext)
    dtype_name = staticmethod(dtype_name)

    def __init__(self, failures: Failures) -> None:
        self.groups = MindSporeGroups()
        self._failures = failures
        self._calls: MindSporeOperatorCalls | None = None

    def listen(self, communication: Communication) -> None:
        self._communication = communication
        INTERCEPTION.add(self)

    def begin(self, recorder: Recorder) -> MindSporeOperatorCalls:
        self._calls = MindSporeOperatorCalls.of(recorder)
        return self._calls

    def stop(self) -> None:
        INTERCEPTION.remove(self)
        self._calls = None

    def among_ranks(self) -> bool:
        return initialized() or not is_settled()

    def are_real(self, tensors: Sequence[Tensor]) -> bool:
        return not any(getattr(one, "is_meta", False) for one in tensors)

    def call_begins(self, operator: Operator, args: Sequence[Any]) -> bool:
        return self._communication.call_begins(operator, args)

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any, handle: Handle | None) -> None:
        try:
            expected = self._communication.expected(operator, args, result)
        except Exception as error:
            self._failures.report("following a communication operator", error)
            return
        if expected is None:
            return
        if handle is None:
            self.outputs_there(*expected)
        else:  # the handle may outlive the listener
            handle.on_wait(partial(_read_outputs, weakref.ref(self), *expected))

    def outputs_there(self, call: CollectiveCall, outputs: Sequence[Tensor]) -> None:
        """Read the outputs before they can be changed."""
        try:
            if self._calls is not None and self._calls.read(call, outputs):
                self._communication.unread -= 1
        except EarlierFailure as failure:
            raise failure.error from None
        except Exception as error:
            self._failures.report("reading the outputs of a communication operator", error)


def _read_outputs(listener: weakref.ref[MindSporeCollectives], call: CollectiveCall, outputs: Sequence[Tensor]) -> None:
    collectives = listener()
    if collectives is not None:
        collectives.outputs_there(call, outputs)
