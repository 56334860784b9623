"""What a ``TrainerMon`` records of communication: listens to every call, and gives its tensors rows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mindspore import Tensor
from mindspore.communication import get_group_size, get_process_group_ranks, get_rank

from monitor.config.model import CcDistribution
from monitor.failures import EarlierFailure, Failures
from monitor.mindspore.collective_operators import INTERCEPTION, CollectiveListener, Handle, Operator
from monitor.mindspore.process_group import initialized, is_settled
from monitor.mindspore.recorder import HOST, Recorder
from monitor.mindspore.tensors import computing, dtype_name
from monitor.recording import collectives as capture
from monitor.recording.collectives import CallRows, CollectiveCall, Labels, NamedGroup
from monitor.recording.recorder import Device, LateRows
from monitor.stats.mindspore.tensors import has_data, on_host

# --- Whether communication can be listened to at all.


def communication(wanted: CcDistribution, failures: Failures) -> Communication | None:
    """Listen from now on, if that is wanted and possible; a sentence says where it is not."""
    if not wanted.enable:
        return None
    return failures.guarded("installing the interception of communication", _listening)(wanted, failures)


def _listening(wanted: CcDistribution, failures: Failures) -> Communication:
    # Here, so that a MindSpore that keeps its operators elsewhere loses no more than their rows.

    return Communication(wanted, failures)


# --- Rows of calls of operators, of tensors of MindSpore.


class OperatorCalls(CallRows, LateRows):
    """Reads what calls have moved."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        recorder.late = self

    @classmethod
    def of(cls, recorder: Recorder) -> OperatorCalls:
        """Those of ``recorder``: whoever comes after others goes on with their rows."""
        return recorder.late if isinstance(recorder.late, cls) else cls(recorder)

    def read(self, call: CollectiveCall, tensors: Sequence[Any]) -> bool:
        """Reduce what a call has moved, a row a tensor.

        Raises:
            EarlierFailure: Something that was called before has failed.
        """
        if not self._recorder.active or not all(map(has_data, tensors)):
            return False
        with computing():
            if self._recorder.device == HOST:
                for x in tensors:
                    on_host(x)  # waits for it, and is not to do so with the lock
            return super().read(call, tensors)

    def _device_of(self, x: Any) -> Device | None:
        device: Device = self._recorder.device
        return device if has_data(x) else None


# --- Which ranks an operator runs on, and what they are called.


class Groups:
    """Groups of MindSpore, which have names. A name may come to stand for other ranks: it is asked for each time."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._known: dict[tuple[str, tuple[int, ...]], NamedGroup] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Say what groups of ranks are called. The first of several roles of the same ranks stands."""
        self._labels.learn(roles)
        self._known.clear()

    def of(self, given: Any) -> NamedGroup | None:
        """What is known of a group; None where MindSpore knows none.

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

    def outputs_there(self, call: CollectiveCall, outputs: Sequence[Tensor]) -> None:
        """Read them before anybody can change them."""
        try:
            if self._rows is not None and self._rows.read(call, outputs):
                self.unread -= 1
        except EarlierFailure as failure:
            raise failure.error from None
        except Exception as error:
            self._failures.report("reading the outputs of a communication operator", error)


def _tell(listener: weakref.ref[Communication], call: CollectiveCall, outputs: Sequence[Tensor]) -> None:
    communication = listener()
    if communication is not None:
        communication.outputs_there(call, outputs)
