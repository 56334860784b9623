"""What a ``TrainerMon`` records of communication: listens to every call, and gives its tensors rows."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from monitor.config.model import CcDistribution
from monitor.failures import Failures
from monitor.pytorch.collectives.completion import Completion
from monitor.pytorch.collectives.groups import Groups
from monitor.pytorch.collectives.interception import INTERCEPTION, CollectiveListener
from monitor.pytorch.collectives.operators import Method, Operator
from monitor.pytorch.operator_calls import OperatorCalls
from monitor.pytorch.place import initialized, is_settled
from monitor.pytorch.recorder import Recorder
from monitor.recording import collectives as capture
from monitor.recording.collectives import Call
from monitor.stats.torch.tensors import KEYS_ABOVE_US, end_of, function_modes, local_shard, unseen

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], Any]
"""Where in its storage a tensor lies: its type, size, stride and offset."""

MAX_WAITED_FOR: Final = 4096
"""Results of functional collectives remembered until they are waited for. The oldest are forgotten, and have no row."""


@dataclass(frozen=True, slots=True)
class _Awaited:
    """The result of a functional collective: another one may come to stand at its address."""

    call: Call
    storage: weakref.ref[torch.UntypedStorage]
    layout: Layout


class Communication(capture.Communication, CollectiveListener):
    """Listens from its making until ``close``."""

    _calls: OperatorCalls | None

    def __init__(self, wanted: CcDistribution, failures: Failures) -> None:
        super().__init__(wanted, failures, Groups())
        self._calls = None
        self._functional: OrderedDict[int, _Awaited] = OrderedDict()
        self._step_ended = failures.guarded("ending a step of communication", self._end_step)
        self._completion = Completion(self._outputs_there, failures)
        INTERCEPTION.add(self)
        self._completion.listen()

    def _begin(self, recorder: Recorder) -> OperatorCalls:
        calls = self._calls = OperatorCalls.of(recorder)
        calls.ending = self._step_ended
        INTERCEPTION.training_begins(self)
        return calls

    def _stop(self) -> None:
        INTERCEPTION.remove(self)
        self._completion.remove()
        self._functional.clear()
        if self._calls is not None:
            self._calls.let_go()
        self._calls = None

    def _among_ranks(self) -> bool:
        return initialized() or not is_settled()

    def _real(self, tensors: Sequence[Tensor]) -> bool:
        for one in tensors:
            local = one if type(one) is Tensor else local_shard(one)
            if local is None or local.is_meta:
                return False
        return True

    def call_begins(self, operator: Operator, args: Sequence[Any]) -> bool:
        recording = self._recording
        if self._log is None and not (recording and self._looks_first):
            return recording
        try:
            with unseen():
                return self._look(operator, args, recording)
        except Exception as error:
            self._failures.report("looking at a communication operator", error)
            return False

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any) -> None:
        try:
            if function_modes():
                with unseen():
                    self._follow(operator, args, result)
            else:  # nearly always, and a thousand times a step
                self._follow(operator, args, result)
        except Exception as error:
            self._failures.report("following a communication operator", error)

    def tensor_waited_for(self, tensor: Tensor) -> None:
        if self._functional:
            try:
                with unseen():
                    self._tensor_waited_for(tensor)
            except Exception as error:
                self._failures.report("reading the outputs of a communication operator", error)

    def _follow(self, operator: Operator, args: Sequence[Any], result: Any) -> None:
        expected = self._expected(operator, args, result)
        if expected is None:
            return
        call, outputs = expected
        if type(operator) is Method:
            # What has options says in them whether the function that called it waits for it.
            waited_for = not getattr(args[-1], "asyncOp", True)
            self._completion.issued(args[0], result, call, outputs, waited_for=waited_for)
        elif operator.functional:
            self._await_functional(call, outputs)
        else:
            boxed = result[-1] if isinstance(result, (tuple, list)) else result
            self._completion.issued_below(dist.Work.unbox(boxed), call, outputs)

    def _await_functional(self, call: Call, outputs: Sequence[Tensor]) -> None:
        for output in outputs:
            # By its memory, as torch itself finds the work to wait for: the tensor that comes back may be another object.
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
            self.unread -= 1

    def _outputs_there(self, call: Call, outputs: Sequence[Tensor], versions: Sequence[int | None]) -> bool:
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
            self.unread -= 1
        return read

    def _end_step(self) -> None:
        self._completion.read_what_is_done()
        INTERCEPTION.step_ends(self)


def _whole(part: Tensor, layout: Layout) -> Tensor | None:
    """The output of which somebody has waited for ``part``, with which all of it is there; None if its memory was shrunk since:
    torch would make it larger, and move it.
    """
    dtype, size, stride, offset = layout
    if part.dtype == dtype and part.size() == size and part.stride() == stride and part.storage_offset() == offset:
        return part
    if size.numel() and part.untyped_storage().nbytes() < end_of(size, stride, offset) * dtype.itemsize:
        return None
    with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
        return part.new_empty(0, dtype=dtype).set_(part.untyped_storage(), offset, size, stride)
