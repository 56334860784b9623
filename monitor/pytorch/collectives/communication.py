"""What a ``TrainerMon`` records of communication: listens to every call, and gives its tensors rows."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from monitor.capture.call_sites import CallSites
from monitor.capture.communication_log import CommunicationLog
from monitor.config.model import CcDistribution
from monitor.failures import LOGGER, Failures
from monitor.pytorch.collectives.completion import Completion
from monitor.pytorch.collectives.groups import Group, Groups
from monitor.pytorch.collectives.interception import INTERCEPTION, CollectiveListener
from monitor.pytorch.collectives.operators import Method, Operator
from monitor.pytorch.operator_calls import Call, CallSeries, OperatorCalls
from monitor.pytorch.place import initialized
from monitor.pytorch.recorder import Recorder
from monitor.series import Series
from monitor.stats.torch_modes import KEYS_ABOVE_US, function_modes, unseen
from monitor.stats.torch_tensors import local_shard

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], Any]
"""Where in its storage a tensor lies: its type, size, stride and offset."""

MAX_WAITED_FOR: Final = 4096
"""Results of functional collectives remembered until they are waited for. The oldest are forgotten, and have no row."""

UNREAD: Final = (
    "the outputs of {} calls have no rows: nobody waited for them, they were not there in time, or they were changed before "
    "they could be read"
)


class Communication(CollectiveListener):
    """Listens from its making until ``close``.

    Attributes:
        wanted: What it was made for.
        unread: Calls whose outputs have not been read: still under way, never waited for, or changed before they could be.
    """

    def __init__(self, wanted: CcDistribution, failures: Failures) -> None:
        self.unread = 0
        self.wanted = wanted
        self._failures = failures
        self._recorder: Recorder | None = None
        self._note: Callable[[str, str], None] | None = None
        self._sites = CallSites(wanted.cc_codeline)
        self._groups = Groups()
        self._log: CommunicationLog | None = CommunicationLog()
        self._series: dict[tuple[str, str, str], CallSeries] = {}
        self._functional: OrderedDict[int, tuple[Call, Layout]] = OrderedDict()
        self._calls: OperatorCalls | None = None
        # Nothing of a call is looked at before it is issued.
        self._looks_first = bool(wanted.cc_codeline or wanted.cc_pre_hook)
        self._measures = not wanted.cc_log_only
        self._step_ended = failures.guarded("ending a step of communication", self._end_step)
        self._completion = Completion(self._outputs_there, failures)
        INTERCEPTION.add(self)
        self._completion.listen()

    @property
    def log_only(self) -> bool:
        """Whether nothing is measured, and the run ends when the log is written."""
        return self.wanted.cc_log_only

    def record_into(self, recorder: Recorder, roles: Mapping[str, Sequence[int]], note: Callable[[str, str], None]) -> None:
        """Give what is communicated from now on rows in ``recorder``, unless it has them in another already.

        Args:
            roles: What groups of ranks are called.
            note: Told what the rows do not say, with a key, at the end.
        """
        if self._recorder is None:
            self._recorder, self._note = recorder, note
            self._calls = OperatorCalls.of(recorder)
            self._calls.ending = self._step_ended
            INTERCEPTION.training_begins(self)
        self._groups.learn(roles)
        if not initialized():
            LOGGER.warning(
                "[rank %d] cc_distribution: there is no process group, so there is no communication to record. "
                "Everything else is recorded.",
                self._failures.rank,
            )

    def end_log(self, directory: Path) -> Path | None:
        """Write the log; None if that was done before. No stacks are taken for it from now on."""
        log, self._log = self._log, None
        if log is None:
            return None
        path = log.write(directory)
        calls, sites = log.counts.total(), len(log.counts)
        LOGGER.info("[rank %d] communication: %d calls from %d sites, listed in %s", self._failures.rank, calls, sites, path)
        return path

    def close(self) -> None:
        """Listen no longer. Any number of times."""
        INTERCEPTION.remove(self)
        self._completion.remove()
        self._functional.clear()
        if self._calls is not None:
            self._calls.let_go()
        if self.unread and self._note is not None:
            self._note("communication", UNREAD.format(self.unread))
        self._recorder = self._log = self._note = self._calls = None

    def call_begins(self, operator: Operator, args: Sequence[Any]) -> bool:
        recorder = self._recorder
        recording = recorder is not None and recorder.active and self._measures
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

    def _look(self, operator: Operator, args: Sequence[Any], recording: bool) -> bool:
        """Enter the call in the log, and measure what goes in.

        Returns:
            Whether its outputs are to be measured.
        """
        inputs = operator.taken(args)
        if not _real(inputs):
            return False
        group = self._groups.of(args[operator.group])
        if group is None:
            return False
        wanted = self._site_wanted(operator, args, inputs, group)
        if not recording or not wanted:
            return False
        if self.wanted.cc_pre_hook and inputs and not (operator.rooted == "inputs" and operator.root(args) != group.rank):
            assert self._calls is not None  # since there is a recorder
            self._calls.read(self._new_call(operator, group, "pre_0"), inputs)
        return True

    def _site_wanted(self, operator: Operator, args: Sequence[Any], inputs: Sequence[Tensor], group: Group) -> bool:
        """Whether the call comes from where calls are recorded; while there is a log, it is entered there."""
        if self._log is None and not self._sites.choosy:
            return True
        site = self._sites.at(sys._getframe(1))
        if self._log is not None:
            tensors = inputs or ([] if operator.functional else operator.given(args, None))
            self._log.add(operator.name, group.label, tensors, site)
        return site.wanted

    def _follow(self, operator: Operator, args: Sequence[Any], result: Any) -> None:
        outputs = operator.given(args, result)
        if not outputs or not _real(outputs):
            return
        group = self._groups.of(args[operator.group])
        if group is None or (operator.rooted == "outputs" and operator.root(args) != group.rank):
            return
        self.unread += 1
        call = self._new_call(operator, group, "post_0")
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
            key = output.untyped_storage()._cdata
            self._functional.pop(key, None)
            self._functional[key] = call, (output.dtype, output.size(), output.stride(), output.storage_offset())
        while len(self._functional) > MAX_WAITED_FOR:
            self._functional.popitem(last=False)

    def _tensor_waited_for(self, tensor: Tensor) -> None:
        local = local_shard(tensor)
        found = None if local is None or local.is_meta else self._functional.pop(local.untyped_storage()._cdata, None)
        if found is not None and local is not None:
            call, layout = found
            first = call.step < 0
            if self._calls is not None and self._calls.read(call, [_whole(local, layout)]) and first:
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

    def _new_call(self, operator: Operator, group: Group, what: str) -> Call:
        assert self._calls is not None  # since something is recorded
        assert self._recorder is not None
        key = (operator.name, group.label, what)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._calls.series(Series("other", 0, f"{operator.name}{group.suffix}.{what}"))
        return Call(series, self._recorder.steps)

    def _end_step(self) -> None:
        self._completion.read_what_is_done()
        INTERCEPTION.step_ends(self)


def _whole(part: Tensor, layout: Layout) -> Tensor:
    """The output of which somebody has waited for ``part``, with which all of it is there."""
    dtype, size, stride, offset = layout
    if part.dtype == dtype and part.size() == size and part.stride() == stride and part.storage_offset() == offset:
        return part
    with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
        return part.new_empty(0, dtype=dtype).set_(part.untyped_storage(), offset, size, stride)


def _real(tensors: Sequence[Tensor]) -> bool:
    """False where a compiler or another tracer is at work, and nothing is communicated."""
    for one in tensors:
        local = one if type(one) is Tensor else local_shard(one)
        if local is None or local.is_meta:
            return False
    return True
