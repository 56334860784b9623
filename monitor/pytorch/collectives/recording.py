"""Records communication for ``TrainerMon``: listens to every call and reduces its tensors to rows."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from monitor.config.model import CcDistribution
from monitor.failures import LOGGER, Failures
from monitor.pytorch.collectives.interception import INTERCEPTION, Completion, TorchCollectiveListener
from monitor.pytorch.collectives.operators import Method, TorchOperator, TorchProcessGroups
from monitor.pytorch.process_group import initialized, is_settled
from monitor.pytorch.tensor_reader import HOST, TorchTensorReader, has_data
from monitor.recording.collectives import LOCK_SECONDS, CallRows, CollectiveCall, Communication
from monitor.recording.recorder import Recorder
from monitor.stats.table import HostPage, RowSlot
from monitor.stats.torch.host_kernel import Staging
from monitor.stats.torch.tensors import BYPASSED_KEYS, end_of, function_modes, local_shard, unseen

# --- Entry point.


def communication(wanted: CcDistribution, failures: Failures) -> Communication | None:
    """Listen from now on, if configured and possible. Logs why it is impossible."""
    if not wanted.enable:
        return None
    if not dist.is_available():
        LOGGER.warning("cc_distribution: this build of torch has no torch.distributed, so no communication is recorded.")
        return None
    listen = failures.guarded("installing the interception of communication", Communication)
    return listen(wanted, failures, TorchCollectives(failures))


# --- Rows of operator calls: one for each tensor of each call of a step, combined when the step is written. Training calls
# small collectives by the thousand. So the call only copies a small tensor; all copies are reduced and given their rows
# together.

_Staged = tuple[CollectiveCall, int, int, torch.Size]
"""A copied tensor: its call, its number in the call, its order among all writes of the step, its shape."""


class TorchOperatorCalls:
    """Reads the tensors of calls, on any thread.

    Attributes:
        rows: The rows of calls.
        ending: Called when the step ends, to read outputs in it. Must not raise.
    """

    def __init__(self, recorder: Recorder) -> None:
        assert isinstance(recorder.reader, TorchTensorReader)
        self.rows = CallRows(recorder.reader)
        self._recorder, self._reader = recorder, recorder.reader
        self.ending: Callable[[], object] = _read_nothing
        self._staging = Staging()
        self._staged: list[_Staged] = []
        recorder.late = self

    def read(self, call: CollectiveCall, tensors: Sequence[Tensor], versions: Sequence[int | None] = ()) -> bool:
        """Reduce the tensors of a call, one row each.

        Args:
            versions: Versions of the tensors, if another thread may already change them. No row is kept if a version has
                changed by the end, or if the step of the call is over.

        Returns:
            Whether all tensors were read. Otherwise none has a row.
        """
        lock = self._recorder.lock
        if not lock.take(LOCK_SECONDS):
            return False
        try:
            if len(tensors) == 1 and not versions and self._recorder.active and self._staging.add(tensors[0]):
                call.begin(self._recorder.steps)  # the fast path of most calls
                self._note(call, tensors[0])
                return True
            return self._read(call, tensors, versions)
        finally:
            lock.release()

    def step_ends(self) -> None:
        self.ending()

    @classmethod
    def of(cls, recorder: Recorder) -> TorchOperatorCalls:
        """The rows of ``recorder``. A later attachment continues with the rows of an earlier one."""
        return recorder.late if isinstance(recorder.late, cls) else cls(recorder)

    def stop_reading(self) -> None:
        """Stop reading. Rows already measured stay."""
        self.ending = _read_nothing

    def enter(self) -> None:
        if not self._staged:
            return
        table = self._recorder.table
        rows = np.array([self._row_of(call, part) for call, part, _, _ in self._staged])
        orders = np.array([order for _, _, order, _ in self._staged])
        table.note_rows(rows, orders, np.array([table.layout_of(shape, torch.float32) for *_, shape in self._staged]))
        numbers = self._reader.host.staged_rows(self._staging)
        self._staged.clear()
        for page in table.pages:
            here = np.flatnonzero((rows >= page.first_row) & (rows < page.first_row + page.rows))
            if isinstance(page.memory, HostPage):
                page.memory.numbers[rows[here] - page.first_row] = numbers[here]

    def discard(self) -> None:
        self._staging.cut(0)
        self._staged.clear()

    def _note(self, call: CollectiveCall, x: Tensor) -> None:
        """Register the tensor just copied as the next one of ``call``."""
        table = self._recorder.table
        self._staged.append((call, call.read, table.next_order(), x.shape))
        call.read += 1

    def _read(self, call: CollectiveCall, tensors: Sequence[Tensor], versions: Sequence[int | None] = ()) -> bool:
        recorder = self._recorder
        if not recorder.active:
            return False
        if versions and (call.issued != recorder.steps or not _are_unchanged(tensors, versions)):
            return False
        if self._staging.is_half_full:
            self.enter()
        call.begin(recorder.steps)
        staged, written, complete = len(self._staged), [], False  # type: int, list[RowSlot], bool
        try:
            complete = all(self._read_one(call, x, written) for x in tensors) and _are_unchanged(tensors, versions)
        finally:
            if not complete:
                self._forget_all(staged, written)
        return complete

    def _read_one(self, call: CollectiveCall, x: Tensor, written: list[RowSlot]) -> bool:
        if self._staging.add(x):
            self._note(call, x)
            return True
        return has_data(x) and self.rows.read(call, x, x.device, written)

    def _forget_all(self, staged: int, written: Sequence[RowSlot]) -> None:
        self._staging.cut(staged)
        del self._staged[staged:]
        self.rows.forget(written)

    def _row_of(self, call: CollectiveCall, part: int) -> int:
        if part:
            return self.rows.slot(call.series, HOST, call.number, part).row
        rows = call.series.staged_rows
        while len(rows) <= call.number:
            rows.append(self.rows.slot(call.series, HOST, len(rows), 0).row)
        return rows[call.number]


def _are_unchanged(tensors: Sequence[Tensor], versions: Sequence[int | None]) -> bool:
    """Whether all tensors still have these versions."""
    return not versions or all(x._version == was for x, was in zip(tensors, versions, strict=True) if was is not None)


def _read_nothing() -> None:
    """No outputs to read."""


Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], Any]
"""A tensor's dtype, size, stride and offset in its storage."""

MAX_WAITED_FOR: Final = 4096
"""Results of functional collectives remembered until they are waited for. The oldest are forgotten, and have no row."""


@dataclass(frozen=True, slots=True)
class _Awaited:
    """The result of a functional collective. Another result may later have the same address."""

    call: CollectiveCall
    storage: weakref.ref[torch.UntypedStorage]
    layout: Layout


class TorchCollectives(TorchCollectiveListener):
    """Intercepts the operators of torch, and reads their outputs when they are complete."""

    _communication: Communication
    computing = staticmethod(unseen)
    dtype_name = staticmethod(str)

    def __init__(self, failures: Failures) -> None:
        self.groups = TorchProcessGroups()
        self._failures = failures
        self._calls: TorchOperatorCalls | None = None
        self._functional: OrderedDict[int, _Awaited] = OrderedDict()
        self._reading = threading.RLock()  # threads that wait for the same result may change it once one of them has read it
        self._step_ended = failures.guarded("ending a step of communication", self._end_step)
        self._completion = Completion(self._outputs_there, failures)

    def listen(self, communication: Communication) -> None:
        self._communication = communication
        INTERCEPTION.add(self)
        self._completion.listen()

    def begin(self, recorder: Recorder) -> TorchOperatorCalls:
        calls = self._calls = TorchOperatorCalls.of(recorder)
        calls.ending = self._step_ended
        INTERCEPTION.training_begins(self)
        return calls

    def stop(self) -> None:
        INTERCEPTION.remove(self)
        self._completion.remove()
        self._functional.clear()
        if self._calls is not None:
            self._calls.stop_reading()
        self._calls = None

    def among_ranks(self) -> bool:
        return initialized() or not is_settled()

    def are_real(self, tensors: Sequence[Tensor]) -> bool:
        for one in tensors:
            local = one if type(one) is Tensor else local_shard(one)
            if local is None or local.is_meta:
                return False
        return True

    def call_begins(self, operator: TorchOperator, args: Sequence[Any]) -> bool:
        return self._communication.call_begins(operator, args)

    def call_issued(self, operator: TorchOperator, args: Sequence[Any], result: Any) -> None:
        try:
            if function_modes():
                with unseen():
                    self._follow(operator, args, result)
            else:  # the usual case, a thousand times a step
                self._follow(operator, args, result)
        except Exception as error:
            self._failures.report("following a communication operator", error)

    def tensor_waited_for(self, tensor: Tensor) -> None:
        if self._functional:
            try:
                with unseen(), self._reading:
                    self._tensor_waited_for(tensor)
            except Exception as error:
                self._failures.report("reading the outputs of a communication operator", error)

    def _follow(self, operator: TorchOperator, args: Sequence[Any], result: Any) -> None:
        expected = self._communication.expected(operator, args, result)
        if expected is None:
            return
        call, outputs = expected
        if type(operator) is Method:
            # The options, if there are any, say whether the calling function waits for the call.
            waited_for = not getattr(args[-1], "asyncOp", True)
            self._completion.issued(args[0], result, call, outputs, waited_for=waited_for)
        elif operator.functional:
            self._await_functional(call, outputs)
        else:
            boxed = result[-1] if isinstance(result, (tuple, list)) else result
            self._completion.issued_from_cpp(dist.Work.unbox(boxed), call, outputs)

    def _await_functional(self, call: CollectiveCall, outputs: Sequence[Tensor]) -> None:
        for output in outputs:
            # Keyed by memory, as torch itself finds the work to wait for: the tensor passed to wait may be another object.
            storage = output.untyped_storage()
            self._functional.pop(storage._cdata, None)
            layout = output.dtype, output.size(), output.stride(), output.storage_offset()
            self._functional[storage._cdata] = _Awaited(call, weakref.ref(storage), layout)
        while len(self._functional) > MAX_WAITED_FOR:
            self._functional.popitem(last=False)

    def _tensor_waited_for(self, tensor: Tensor) -> None:
        local = local_shard(tensor)
        if local is None or local.is_meta:
            return
        storage = local.untyped_storage()
        found = self._functional.pop(storage._cdata, None)
        if found is None or found.storage() is not storage:
            return
        output, first = _whole(local, found.layout), found.call.step < 0
        if output is not None and self._calls is not None and self._calls.read(found.call, [output]) and first:
            self._communication.unread -= 1

    def _outputs_there(self, call: CollectiveCall, outputs: Sequence[Tensor], versions: Sequence[int | None]) -> bool:
        try:
            if function_modes():
                with unseen():
                    read = self._calls is not None and self._calls.read(call, outputs, versions)
            else:
                read = self._calls is not None and self._calls.read(call, outputs, versions)
        except Exception as error:
            self._failures.report("reading the outputs of a communication operator", error)
            return False
        if read:
            self._communication.unread -= 1
        return read

    def _end_step(self) -> None:
        self._completion.read_completed()
        INTERCEPTION.step_ends(self)


def _whole(part: Tensor, layout: Layout) -> Tensor | None:
    """The whole output, complete since a wait for ``part`` has returned. None if its memory was shrunk since: torch would
    resize and move it.
    """
    dtype, size, stride, offset = layout
    if part.dtype == dtype and part.size() == size and part.stride() == stride and part.storage_offset() == offset:
        return part
    if size.numel() and part.untyped_storage().nbytes() < end_of(size, stride, offset) * dtype.itemsize:
        return None
    with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS):
        return part.new_empty(0, dtype=dtype).set_(part.untyped_storage(), offset, size, stride)
