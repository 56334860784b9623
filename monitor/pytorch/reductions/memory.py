"""Tracks which memory holds sums over ranks: byte ranges of storages, each with its groups."""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from monitor.failures import Failures
from monitor.pytorch.collectives.interception import INTERCEPTION, Completion, TorchCollectiveListener
from monitor.pytorch.collectives.operators import Method, TorchOperator
from monitor.pytorch.hooks import runs_backward
from monitor.series import Ranks
from monitor.stats.torch.tensors import beneath, end_of, is_unbroken, local_shard, unseen


@dataclass(frozen=True, eq=False)
class ReductionGroup:
    """The ranks of a sum. One object for each process group, compared by identity."""

    ranks: Ranks


Groups = tuple[ReductionGroup, ...]
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


class SumListener(TorchCollectiveListener):
    """Enters each sum over ranks in ``memory``, once its outputs are complete.

    Attributes:
        wanted: Whether calls are observed now.
        wanted_in_backward: Whether calls of a thread that runs a backward are observed.
        issued: Called on the thread of each observed call, with its groups and its outputs.
    """

    wants_cpp_calls: ClassVar[bool] = False

    def __init__(self, memory: ReducedMemory, issued: Callable[[Groups, Sequence[Tensor]], object], failures: Failures) -> None:
        self.wanted = False
        self.wanted_in_backward = False
        self._memory = memory
        self._issued = issued
        self._failures = failures
        self._groups: weakref.WeakKeyDictionary[Any, ReductionGroup] = weakref.WeakKeyDictionary()
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

    def enter_sums(self) -> None:
        """Enter completed sums in the memory. Called on the training thread; other threads may have completed them."""
        while self._there:
            groups, outputs = self._there.popleft()
            for output in outputs:
                self._memory.add(output, groups)

    def call_begins(self, operator: TorchOperator, args: Sequence[Any]) -> bool:
        del args
        return (operator.name in SUMS or operator.name in COLLECTS) and (
            self.wanted or (self.wanted_in_backward and runs_backward())
        )

    def call_issued(self, operator: TorchOperator, args: Sequence[Any], result: Any) -> None:
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

    def _follow(self, operator: TorchOperator, args: Sequence[Any], result: Any) -> None:
        if not (type(operator) is Method or operator.functional):
            return
        groups = self._summed_over(operator, args)
        outputs = operator.given(args, result)
        if not groups or not outputs:
            return
        if type(operator) is Method:
            # The options, if there are any, say whether the calling function waits for the call, even if the wait fails.
            if getattr(args[-1], "asyncOp", True) or self._completion.is_coalescing(args[0]):
                self._completion.issued(args[0], result, groups, outputs, waited_for=False)
            else:
                self._outputs_there(groups, outputs, ())
        else:
            self._await_functional(outputs, groups)
        self._issued(groups, outputs)

    def _summed_over(self, operator: TorchOperator, args: Sequence[Any]) -> Groups:
        """The groups of the outputs' sum; empty if they are no sum."""
        if operator.name in SUMS:
            return (self._group_of(operator.group_of(args)),) if _adds(args) else ()
        self.enter_sums()
        return self._memory.common(operator.taken(args)) or ()

    def _group_of(self, given: Any) -> ReductionGroup:
        group = given if isinstance(given, dist.ProcessGroup) else _resolved(given)
        over = self._groups.get(group)
        if over is None:
            over = self._groups[group] = ReductionGroup(tuple(sorted(dist.get_process_group_ranks(group))))
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
            self.enter_sums()
        return True


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


# --- Follows copies from reduced buffers to gradients, until the optimizer steps.
#
# Loops that reduce gradients in flat buffers write them back with a few torch functions. A function mode sees calls
# from Python. Writes by compiled code or C++ extensions are not seen: such gradients are not known to be reduced.

KEEPS: Final = frozenset(
    {
        "bfloat16", "cat", "clone", "concat", "concatenate", "contiguous", "detach", "div", "divide", "double", "flatten",
        "float", "half", "mul", "multiply", "reshape", "to", "true_divide", "type", "type_as", "__mul__", "__rmul__",
        "__truediv__", "_foreach_div", "_foreach_mul",
    }
)  # fmt: skip
"""Functions whose result equals their input up to a factor and a dtype."""

OVERWRITES: Final = frozenset({"fill_", "normal_", "uniform_", "zero_", "_foreach_zero_"})
"""Functions that overwrite all of a tensor."""


OnCall = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]


class _Mode(TorchFunctionMode):
    """Forwards every call of one thread unchanged and reports it to ``on_call``. Inactive while ``on_call`` is None.

    torch pops a mode while it handles a call, and pushes it again. A mode that is missing on the stack may therefore come back.
    So it is pushed once, and only pushed again after it was found on the stack and removed.
    """

    def __init__(self) -> None:
        self.on_call: OnCall | None = None
        self.pushed = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # In code that is being compiled this is traced, and must have no effect.
        if not torch.compiler.is_compiling() and (on_call := self.on_call) is not None:
            with unseen():
                on_call(func, args, kwargs or {}, result)
        return result

    def put(self) -> bool:
        """Push it below all modes of the user, so that each of theirs is on top when its ``with`` ends. Only a default device
        stays below, as torch requires. Returns whether it is pushed: not while torch has popped the default device.
        """
        default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        if self.pushed or (default is not None and not _on_stack(default)):
            return self.pushed
        above = _pop_all()
        bottom = [above.pop()] if default is not None and above[-1] is default else []
        for mode in (*bottom, self, *reversed(above)):
            _push_mode(mode)
        self.pushed = True
        return True

    def remove(self) -> None:
        """Remove it, on the thread that pushed it. While torch has popped it to handle a call it stays, until the next
        ``remove``.
        """
        if self.pushed and _on_stack(self):
            self.pushed = False
            for mode in reversed(_pop_all()):
                if mode is not self:
                    _push_mode(mode)


class _ThreadMode(threading.local):
    """The mode of each thread: modes of another thread cannot be removed."""

    def __init__(self) -> None:
        self.mode = _Mode()


class BufferWrites:
    """Follows copies from reduced memory.

    Args:
        enter_sums: Enters every completed sum in ``memory``.
        failed: Called with an error of the monitor.
    """

    def __init__(self, memory: ReducedMemory, enter_sums: Callable[[], object], failed: Callable[[Exception], object]) -> None:
        self._memory = memory
        self._enter_sums = enter_sums
        self._failed = failed
        self._modes = _ThreadMode()
        self._entered: _Mode | None = None

    def __del__(self) -> None:
        if (mode := self._entered) is not None:
            mode.on_call = None
        if not _changes_modes(sys._getframe().f_back):
            self._modes.mode.remove()

    @property
    def entered(self) -> bool:
        return self._entered is not None

    def enter(self) -> None:
        """Observe calls of this thread from now on, until ``leave``, if a mode can be pushed."""
        self.leave()
        mode = self._modes.mode
        if mode.put():
            mode.on_call = _weakly(self)
            self._entered = mode

    def leave(self) -> None:
        """Stop observing. A mode of another thread becomes inactive, and is removed when that thread leaves."""
        if self._entered is not None:
            self._entered.on_call = None
            self._entered = None
        self._modes.mode.remove()

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """``func`` has been called, and has returned ``result``."""
        try:
            self._enter_sums()
            self._look(getattr(func, "__name__", ""), args, kwargs, result)
        except Exception as error:
            self._failed(error)

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        memory = self._memory
        if name == "copy_":
            memory.copied(args[0], args[1] if len(args) > 1 else next(iter(kwargs.values()), None))
        elif name == "_foreach_copy_":
            for to, source in zip(args[0], args[1] if len(args) > 1 else kwargs["src"], strict=True):
                memory.copied(to, source)
        elif name == "__setitem__":
            self._set_item(*args)
        elif name in OVERWRITES:
            for x in _tensors(args[:1]):
                memory.forget(x)
        elif isinstance(out := kwargs.get("out"), Tensor):
            memory.forget(out)
        elif name in KEEPS:
            self._keep(args, kwargs, result)

    def _set_item(self, x: Tensor, index: Any, source: Any) -> None:
        if _is_one_view(index):
            self._memory.copied(x[index], source)
        else:
            self._memory.forget(x)

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Mark results of a function in ``KEEPS``. Tensors of one element among its arguments are factors."""
        given = list(_tensors((*args, *kwargs.values())))
        groups = self._memory.common([x for x in given if x.numel() > 1] or given)
        for x in _tensors((result,)) if groups else ():
            if self._memory.groups_of(x) is None:
                self._memory.add(x, groups or ())


def _weakly(writes: BufferWrites) -> OnCall:
    """A callback with a weak reference: a mode on a stack must not keep a monitor alive."""
    held = weakref.ref(writes)

    def on_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = held()
        if found is not None:
            found.follow(func, args, kwargs, result)

    return on_call


def _on_stack(mode: Any) -> bool:
    return any(one is mode for one in _get_current_function_mode_stack())


def _pop_all() -> list[Any]:
    """Pop all modes of this thread, from the top."""
    return [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]


def _changes_modes(frame: FrameType | None) -> bool:
    """Whether garbage collection interrupts code that has counted the modes and is about to pop that many."""
    return frame is not None and frame.f_globals.get("__name__") in ("torch.overrides", "torch.utils._device", __name__)


def _is_one_view(index: Any) -> bool:
    """Whether indexing with ``index`` gives a view of the tensor."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)
