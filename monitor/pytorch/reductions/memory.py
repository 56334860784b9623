"""Tracks which memory holds sums over ranks: byte ranges of storages, each with its groups."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor

from monitor.failures import Failures
from monitor.pytorch.collectives.completion import Completion
from monitor.pytorch.collectives.interception import INTERCEPTION, CollectiveListener
from monitor.pytorch.collectives.operators import Method, Operator
from monitor.series import Ranks
from monitor.stats.torch.tensors import beneath, end_of, is_unbroken, local_shard


@dataclass(frozen=True, eq=False)
class Over:
    """The ranks of a sum. One object for each process group, compared by identity."""

    ranks: Ranks


Groups = tuple[Over, ...]
"""The groups of successive sums."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of a storage, from ``start`` to before ``end``."""

    start: int
    end: int
    groups: Groups


class ReducedMemory:
    """The reduced memory of a step.

    A tensor is identified by the bytes that it covers. So gradients and buckets that share a storage are distinguished, and a
    gradient that is a view of a bucket is reduced with it.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], list[_Run]]] = {}

    def __bool__(self) -> bool:
        return bool(self._storages)

    def clear(self) -> None:
        self._storages.clear()

    def groups_of(self, x: Tensor) -> Groups | None:
        """The groups that all of ``x`` was summed over; None if some element is not known to be a sum."""
        place = _place(x)
        if place is None:
            return None
        storage, start, end = place
        runs = self._runs(storage)
        at, found = bisect_right(runs, start, key=_start) - 1, None
        while start < end:
            if not 0 <= at < len(runs) or not runs[at].start <= start < runs[at].end:
                return None
            groups = runs[at].groups
            found = groups if found is None else tuple(one for one in found if one in groups)
            start, at = runs[at].end, at + 1
        return found

    def groups_within(self, x: Tensor) -> Groups:
        """The groups that any part of ``x`` was summed over."""
        place = _place(x)
        if place is None:
            return ()
        storage, start, end = place
        found = (run.groups for run in self._runs(storage) if run.start < end and start < run.end)
        return tuple(dict.fromkeys(group for groups in found for group in groups))

    def add(self, x: Tensor, groups: Groups) -> None:
        """``x`` has been summed over ``groups``, in addition to earlier groups."""
        known = self.groups_of(x) or ()
        self._put(x, tuple(dict.fromkeys((*known, *groups))))

    def copied(self, to: Tensor, source: Any) -> None:
        """``to`` now holds the numbers of ``source``."""
        whole = isinstance(source, Tensor) and source.numel() == to.numel()
        self._put(to, self.groups_of(source) if whole else None)

    def forget(self, x: Tensor) -> None:
        """Something else was written to ``x``."""
        self._put(x, None)

    def common(self, tensors: Iterable[Tensor]) -> Groups | None:
        """The groups that each of ``tensors`` was summed over; None if one was not, or there are no tensors."""
        found: Groups | None = None
        for x in tensors:
            groups = self.groups_of(x)
            if groups is None:
                return None
            found = groups if found is None else tuple(one for one in found if one in groups)
        return found

    def _runs(self, storage: torch.UntypedStorage) -> list[_Run]:
        known = self._storages.get(storage._cdata)
        return known[1] if known is not None and known[0]() is storage else []

    def _put(self, x: Tensor, groups: Groups | None) -> None:
        place = _place(x)
        if place is None:
            return
        storage, start, end = place
        runs = self._runs(storage)
        # In place, with as few runs as possible: one buffer may hold ten thousand gradients.
        first = max(0, bisect_left(runs, start, key=_start) - 1)
        after = bisect_right(runs, end, key=_start)
        kept = [part for run in runs[first:after] for part in _outside(run, start, end)]
        if groups and _is_dense(x):  # a tensor with gaps does not cover all of its byte range
            kept.append(_Run(start, end, groups))
        runs[first:after] = _joined(sorted(kept, key=_start))
        if runs:
            self._storages[storage._cdata] = weakref.ref(storage), runs
        else:
            self._storages.pop(storage._cdata, None)


def storage_of(x: Tensor) -> torch.UntypedStorage | None:
    """The storage of the local part of ``x``; None if it has none."""
    place = _place(x)
    return None if place is None else place[0]


def _place(x: Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """The storage of ``x``, its first byte and the byte after its last. None for a tensor without storage or elements."""
    local = local_shard(x)
    if local is None or local.is_meta or local.layout is not torch.strided or local.is_nested or local.numel() == 0:
        return None
    offset: Any = local.storage_offset()
    end: int = end_of(local.shape, local.stride(), offset)
    return local.untyped_storage(), offset * local.itemsize, end * local.itemsize


def _is_dense(x: Tensor) -> bool:
    local = local_shard(x)
    return local is not None and is_unbroken(local)


def _start(run: _Run) -> int:
    return run.start


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    """Join adjacent runs with the same groups."""
    joined: list[_Run] = []
    for run in runs:
        if joined and joined[-1].end == run.start and joined[-1].groups == run.groups:
            joined[-1] = _Run(joined[-1].start, run.end, run.groups)
        else:
            joined.append(run)
    return joined


def _outside(run: _Run, start: int, end: int) -> list[_Run]:
    """The parts of a run outside the bytes from ``start`` to ``end``."""
    if run.end <= start or end <= run.start:
        return [run]
    parts = _Run(run.start, start, run.groups), _Run(end, run.end, run.groups)
    return [part for part in parts if part.start < part.end]


# --- Sums over ranks, seen at collectives from Python and functional ones. Collectives from C++ are not observed: frameworks
# that reduce there are recognised by name.

SUMS: Final = frozenset(
    {"all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"}
)
COLLECTS: Final = frozenset(
    {"all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_into_tensor_coalesced"}
)
"""Gathers: the result is a sum if each rank holds a part of a sum."""

MOST_AWAITED: Final = 4096
"""Most results of functional collectives that are remembered until they are waited for."""

_NO_BACKWARD: Final = -1


class SeenSums(CollectiveListener):
    """Enters each sum over ranks in ``memory``, once its outputs are complete.

    Attributes:
        wanted: Whether calls are observed now.
        wanted_in_backward: Whether calls of a thread that runs a backward are observed.
        issued: Called on the thread of each observed call, with its groups and its outputs.
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
        """Stop listening. Idempotent."""
        INTERCEPTION.remove(self)
        self._completion.remove()
        self.clear()

    def clear(self) -> None:
        self._there.clear()
        self._functional.clear()

    def take_in(self) -> None:
        """Enter completed sums in the memory. Called on the training thread; other threads may have completed them."""
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
            # The options, if there are any, say whether the calling function waits for the call, even if the wait fails.
            if getattr(args[-1], "asyncOp", True) or self._completion.gathers(args[0]):
                self._completion.issued(args[0], result, groups, outputs, waited_for=False)
            else:
                self._outputs_there(groups, outputs, ())
        else:
            self._await_functional(outputs, groups)
        self._issued(groups, outputs)

    def _summed_over(self, operator: Operator, args: Sequence[Any]) -> Groups:
        """The groups of the outputs' sum; empty if they are no sum."""
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
        """Called on any thread."""
        self._there.append((groups, outputs))
        if runs_backward():
            # Accumulation would copy a gradient that the queue references, and otherwise takes it over without a copy.
            self.take_in()
        return True


def runs_backward() -> bool:
    """Whether this thread is running a backward."""
    return bool(torch._C._current_graph_task_id() != _NO_BACKWARD)


def _adds(args: Sequence[Any]) -> bool:
    """Whether a reduction is a sum, by the options, the operation or its name among the arguments."""
    for one in args[1:]:
        operation = getattr(one, "reduceOp", one)
        if isinstance(operation, str):
            return operation.lower() in ("sum", "avg")
        if isinstance(operation, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return any(operation == known for known in _ADDING)
    return True  # the default of a process group's methods


_ADDING: Final = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)


_resolve: Final[Any] = torch._C._distributed_c10d._resolve_process_group


def _resolved(given: Any) -> dist.ProcessGroup:
    """The process group of a name, or of the dispatcher's boxed object."""
    if isinstance(given, str):
        found: dist.ProcessGroup = _resolve(given)
        return found
    return dist.ProcessGroup.unbox(given)
