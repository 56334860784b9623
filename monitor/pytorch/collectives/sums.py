"""Which memory ranks have summed up: seen at the collectives that Python issues, and at the functional ones.

What C++ issues is not listened to: a framework that reduces from there is known by its name.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor

from monitor.failures import Failures
from monitor.pytorch.collectives.completion import Completion
from monitor.pytorch.collectives.interception import INTERCEPTION, CollectiveListener
from monitor.pytorch.collectives.operators import Method, Operator
from monitor.pytorch.reduced_memory import Groups, Over, ReducedMemory, storage_of
from monitor.stats.torch.tensors import beneath

SUMS: Final = frozenset(
    {"all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"}
)
COLLECTS: Final = frozenset(
    {"all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_into_tensor_coalesced"}
)
"""Give every rank what each of them holds: a sum, if each holds a part of one."""

MOST_AWAITED: Final = 4096
"""Results of functional collectives remembered until they are waited for."""

_NO_BACKWARD: Final = -1


class SeenSums(CollectiveListener):
    """Tells ``memory`` of each sum over ranks, once its outputs are there.

    Attributes:
        wanted: Whether any is looked at now.
        wanted_in_backward: Whether those that a thread makes while it runs a backward are looked at.
        issued: Called on the thread of each call that is looked at, with its groups and its outputs.
    """

    hears_below: ClassVar[bool] = False

    def __init__(self, memory: ReducedMemory, issued: Callable[[Groups, Sequence[Tensor]], object], failures: Failures) -> None:
        self.wanted = False
        self.wanted_in_backward = False
        self._memory = memory
        self._issued = issued
        self._failures = failures
        self._groups: weakref.WeakKeyDictionary[Any, Over] = weakref.WeakKeyDictionary()
        self._there: deque[tuple[Groups, Sequence[Tensor]]] = deque()
        self._functional: OrderedDict[int, tuple[weakref.ref[torch.UntypedStorage], Tensor, Groups]] = OrderedDict()
        self._completion = Completion(self._outputs_there, failures)

    def listen(self) -> None:
        INTERCEPTION.add(self)
        self._completion.listen()

    def remove(self) -> None:
        """Any number of times."""
        INTERCEPTION.remove(self)
        self._completion.remove()
        self.clear()

    def clear(self) -> None:
        self._there.clear()
        self._functional.clear()

    def take_in(self) -> None:
        """Enter in the memory what is there by now. On the training thread: others may have been told of it."""
        while self._there:
            groups, outputs = self._there.popleft()
            for output in outputs:
                self._memory.add(output, groups)

    def call_begins(self, operator: Operator, args: Sequence[Any]) -> bool:
        del args
        return (operator.name in SUMS or operator.name in COLLECTS) and (
            self.wanted or (self.wanted_in_backward and runs_backward())
        )

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any) -> None:
        try:
            with beneath():
                self._follow(operator, args, result)
        except Exception as error:
            self._failures.report("following the reduction of gradients", error)

    def tensor_waited_for(self, tensor: Tensor) -> None:
        if not self._functional:
            return
        try:
            with beneath():
                storage = tensor.untyped_storage()
                found = self._functional.pop(storage._cdata, None)
                if found is not None and found[0]() is storage:
                    self._outputs_there(found[2], [found[1]], ())
        except Exception as error:
            self._failures.report("following the reduction of gradients", error)

    def _follow(self, operator: Operator, args: Sequence[Any], result: Any) -> None:
        if not (type(operator) is Method or operator.functional):
            return
        groups = self._summed_over(operator, args)
        outputs = operator.given(args, result)
        if not groups or not outputs:
            return
        if type(operator) is Method:
            # What has options says in them whether the function that called it waits for it, whatever comes of that.
            if getattr(args[-1], "asyncOp", True) or self._completion.gathers(args[0]):
                self._completion.issued(args[0], result, groups, outputs, waited_for=False)
            else:
                self._outputs_there(groups, outputs, ())
        else:
            self._await_functional(outputs, groups)
        self._issued(groups, outputs)

    def _summed_over(self, operator: Operator, args: Sequence[Any]) -> Groups:
        """What the outputs will have been summed over; empty where they are no sum."""
        if operator.name in SUMS:
            return (self._over(operator.group_of(args)),) if _adds(args) else ()
        self.take_in()
        return self._memory.common(operator.taken(args)) or ()

    def _over(self, given: Any) -> Over:
        group = given if isinstance(given, dist.ProcessGroup) else _resolved(given)
        over = self._groups.get(group)
        if over is None:
            over = self._groups[group] = Over(tuple(sorted(dist.get_process_group_ranks(group))))
        return over

    def _await_functional(self, outputs: Sequence[Tensor], groups: Groups) -> None:
        for output in outputs:
            if (storage := storage_of(output)) is not None:
                self._functional[storage._cdata] = weakref.ref(storage), output, groups
        while len(self._functional) > MOST_AWAITED:
            self._functional.popitem(last=False)

    def _outputs_there(self, groups: Groups, outputs: Sequence[Tensor], _versions: Sequence[int | None]) -> bool:
        """On any thread."""
        self._there.append((groups, outputs))
        if runs_backward():
            # A gradient that somebody else holds is copied when it is accumulated, where it else would be taken as it is.
            self.take_in()
        return True


def runs_backward() -> bool:
    """Whether this thread is in the midst of a backward."""
    return bool(torch._C._current_graph_task_id() != _NO_BACKWARD)


def _adds(args: Sequence[Any]) -> bool:
    """Whether a reduction adds up, as the options, the operation or its name among the arguments say."""
    for one in args[1:]:
        operation = getattr(one, "reduceOp", one)
        if isinstance(operation, str):
            return operation.lower() in ("sum", "avg")
        if isinstance(operation, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return any(operation == known for known in _ADDING)
    return True  # as the methods of a process group do where nothing is said


_ADDING: Final = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)


_resolve: Final[Any] = torch._C._distributed_c10d._resolve_process_group


def _resolved(given: Any) -> dist.ProcessGroup:
    """From its name, or from what the dispatcher makes of it."""
    if isinstance(given, str):
        found: dist.ProcessGroup = _resolve(given)
        return found
    return dist.ProcessGroup.unbox(given)
