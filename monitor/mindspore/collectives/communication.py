"""What a ``TrainerMon`` records of communication: listens to every call, and gives its tensors rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from mindspore import Tensor

from monitor.config.model import CcDistribution
from monitor.failures import EarlierFailure, Failures
from monitor.mindspore.collectives.completion import Handle
from monitor.mindspore.collectives.groups import Groups
from monitor.mindspore.collectives.interception import INTERCEPTION, CollectiveListener
from monitor.mindspore.collectives.operators import Operator
from monitor.mindspore.operator_calls import OperatorCalls
from monitor.mindspore.place import initialized, is_settled
from monitor.mindspore.recorder import Recorder
from monitor.mindspore.tensors import dtype_name
from monitor.recording import collectives as capture
from monitor.recording.collectives import Call


class Communication(capture.Communication, CollectiveListener):
    """Listens from its making until ``close``.

    To read a tensor may meet an error of training's, which MindSpore tells once, to whoever waits first: it is raised to the
    caller of the operator, or of ``wait``.
    """

    def __init__(self, wanted: CcDistribution, failures: Failures) -> None:
        super().__init__(wanted, failures, Groups(), dtype_name)
        INTERCEPTION.add(self)

    def _begin(self, recorder: Recorder) -> OperatorCalls:
        return OperatorCalls.of(recorder)

    def _stop(self) -> None:
        INTERCEPTION.remove(self)

    def _among_ranks(self) -> bool:
        return initialized() or not is_settled()

    def _real(self, tensors: Sequence[Tensor]) -> bool:
        return not any(getattr(one, "is_meta", False) for one in tensors)

    def call_begins(self, operator: Operator, args: Sequence[Any]) -> bool:
        recording = self._recording
        if self._log is None and not (recording and self._looks_first):
            return recording
        try:
            return self._look(operator, args, recording)
        except EarlierFailure as failure:
            raise failure.error from None
        except Exception as error:
            self._failures.report("looking at a communication operator", error)
            return False

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any, handle: Handle | None) -> None:
        try:
            expected = self._expected(operator, args, result)
        except Exception as error:
            self._failures.report("following a communication operator", error)
            return
        if expected is None:
            return
        if handle is None:
            self.outputs_there(*expected)
        else:  # which may be kept for longer than anybody listens
            handle.tell(partial(_tell, weakref.ref(self), *expected))

    def outputs_there(self, call: Call, outputs: Sequence[Tensor]) -> None:
        """Read them before anybody can change them."""
        try:
            if self._rows is not None and self._rows.read(call, outputs):
                self.unread -= 1
        except EarlierFailure as failure:
            raise failure.error from None
        except Exception as error:
            self._failures.report("reading the outputs of a communication operator", error)


def _tell(listener: weakref.ref[Communication], call: Call, outputs: Sequence[Tensor]) -> None:
    communication = listener()
    if communication is not None:
        communication.outputs_there(call, outputs)
