"""Records communication for a ``TrainerMon``: listens to every call, and writes rows for its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mindspore import Tensor
from mindspore.communication import get_group_size, get_process_group_ranks, get_rank

from monitor.config.model import CcDistribution
from monitor.failures import EarlierFailure, Failures
from monitor.mindspore.collective_operators import INTERCEPTION, Handle, MindSporeCollectiveListener, MindSporeOperator
from monitor.mindspore.process_group import initialized, is_settled
from monitor.mindspore.recorder import HOST, Recorder
from monitor.mindspore.tensors import computing, dtype_name
from monitor.recording import collectives as capture
from monitor.recording.collectives import CallRows, CollectiveCall, Labels, NamedGroup
from monitor.recording.recorder import Device, LateRows
from monitor.stats.mindspore.tensors import has_data, on_host

# --- Start listening.


def communication(wanted: CcDistribution, failures: Failures) -> Communication | None:
    """Listen from now on if configured. If that fails, one warning says so."""
    if not wanted.enable:
        return None
    return failures.guarded("installing the interception of communication", _listening)(wanted, failures)


def _listening(wanted: CcDistribution, failures: Failures) -> Communication:
    # Imported here: if a MindSpore version keeps its operators elsewhere, only their rows are missing.

    return Communication(wanted, failures)


# --- Rows of operator calls.


class MindSporeOperatorCalls(CallRows, LateRows):
    """Reads the tensors of communication calls."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        recorder.late = self

    @classmethod
    def of(cls, recorder: Recorder) -> MindSporeOperatorCalls:
        """The reader of ``recorder``, created once: later attachments continue its rows."""
        return recorder.late if isinstance(recorder.late, cls) else cls(recorder)

    def read(self, call: CollectiveCall, tensors: Sequence[Any]) -> bool:
        """Reduce the tensors of a call, one row each.

        Raises:
            EarlierFailure: An earlier operation of training has failed.
        """
        if not self._recorder.active or not all(map(has_data, tensors)):
            return False
        with computing():
            if self._recorder.device == HOST:
                for x in tensors:
                    on_host(x)  # waits for the tensor, which must happen without the lock
            return super().read(call, tensors)

    def _device_of(self, x: Any) -> Device | None:
        device: Device = self._recorder.device
        return device if has_data(x) else None


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


class Communication(capture.Communication, MindSporeCollectiveListener):
    """Listens from its creation until ``close``.

    Reading a tensor may raise an error of training. MindSpore raises such an error once, at the first wait. So it is passed on
    to the caller of the operator, or of ``wait``.
    """

    def __init__(self, wanted: CcDistribution, failures: Failures) -> None:
        super().__init__(wanted, failures, MindSporeGroups(), dtype_name)
        INTERCEPTION.add(self)

    def _begin(self, recorder: Recorder) -> MindSporeOperatorCalls:
        return MindSporeOperatorCalls.of(recorder)

    def _stop(self) -> None:
        INTERCEPTION.remove(self)

    def _among_ranks(self) -> bool:
        return initialized() or not is_settled()

    def _real(self, tensors: Sequence[Tensor]) -> bool:
        return not any(getattr(one, "is_meta", False) for one in tensors)

    def call_begins(self, operator: MindSporeOperator, args: Sequence[Any]) -> bool:
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

    def call_issued(self, operator: MindSporeOperator, args: Sequence[Any], result: Any, handle: Handle | None) -> None:
        try:
            expected = self._expected(operator, args, result)
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
            if self._rows is not None and self._rows.read(call, outputs):
                self.unread -= 1
        except EarlierFailure as failure:
            raise failure.error from None
        except Exception as error:
            self._failures.report("reading the outputs of a communication operator", error)


def _read_outputs(listener: weakref.ref[Communication], call: CollectiveCall, outputs: Sequence[Tensor]) -> None:
    communication = listener()
    if communication is not None:
        communication.outputs_there(call, outputs)
