"""Operators that replace the monitor's hooks in compiled code.

A compiler runs a hook once, while it traces. The hook leaves one operator in the graph for each event: a call begins or ends, a
tensor or its gradient is available. To the compiler the operators are black boxes with side effects, whose order it keeps. They
call the same Python code as eager hooks.

An operator identifies its hook by the address of a tensor, the handle, which is an input of the compiled code like a weight. A
number would be a constant, so layers could not share compiled code. Another tensor, the tag, identifies the call. It is made
when the call begins and kept for its backward, since forwards and backwards of several micro-batches interleave.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from monitor.failures import Failures
from monitor.pytorch.compiled.tracing import Named, TracedCall, TracedCalls, follow
from monitor.recording.backend import Removable
from monitor.stats.torch.tensors import beneath

# --- Which tensors of compiled code hold the same numbers. Running compiled code writes to one tensor over and over, so neither
# the object nor its version identifies its numbers. Tracing numbers the values instead: there each change makes a new version.

NO_VALUE: Final = -1
"""The value number of a tensor that is not traced."""

_NUMBERS: Final = itertools.count()


class _ValueNumbers:
    """Value numbers by tensor of a trace. They are freed with the trace."""

    def __init__(self) -> None:
        self._numbers = WeakIdKeyDictionary()

    def number(self, x: Tensor) -> int:
        versions: dict[int, int] = self._numbers.setdefault(x, {})
        if x._version not in versions:
            versions[x._version] = next(_NUMBERS)
        return versions[x._version]


_VALUES: Final = _ValueNumbers()


def value_of(x: Tensor) -> int:
    """The value number: equal for tensors of a trace that hold the same numbers, and only for these. ``NO_VALUE`` outside a
    trace.
    """
    return NO_VALUE if get_proxy_mode() is None else _VALUES.number(x)


TRACEABLE: Final = hasattr(torch.library, "_register_effectful_op")
"""Whether this version of torch keeps operators with side effects in order. Otherwise compiled code is not observed."""

FAILURES: Final = Failures()
"""Failures while tracing. One for the process: code is traced once for all monitors."""

ADVICE: Final = "Some tensors of this code have no rows."

HIDDEN: Final = (
    "A module in compiled code returns tensors in an object that is no tuple, list, dict or dataclass: the gradients of its "
    "inputs are not recorded."
)

SEE: Final = 1
FOLLOW: Final = 2


class Observer(Protocol):
    """Receives the events of a hook when compiled code runs. Must not raise."""

    def begins(self, tag: Tensor) -> object | None:
        """A call begins. Returns an object that identifies the call in the methods below; None if it is not recorded.

        Args:
            tag: A scalar tensor, kept for the call's backward. Must be filled while code is captured.
        """

    def ends(self, tag: Tensor) -> object | None:
        """The latest open call ends. Returns an object that identifies the call, likewise."""

    def sees(self, x: Tensor, call: Any, tag: Tensor, slot: str, found: int, value: int) -> None:
        """An input or output tensor.

        Args:
            slot: ``input`` or ``output``, with the suffix of a leaf.
            found: How many tensors that side has.
            value: See ``value_of``.
        """

    def sees_gradient(self, gradient: Tensor, call: Any, tag: Tensor, slot: str, value: int) -> None:
        """The gradient of such a tensor."""

    def keep(self, handles: Sequence[Removable]) -> None:
        """Keep handles of hooks, until the step ends."""


class ObservedHook:
    """A hook in compiled code.

    Attributes:
        handle: The tensor whose address identifies the hook. Never read.
        calls: The calls by the addresses of their tags; empty in eager code.
        earlier: Those of the step before.
    """

    def __init__(self, observer: Observer, device: torch.device) -> None:
        with beneath():
            self.handle = torch.empty(1, dtype=torch.int64, device=device)
        self.observer = observer
        self.calls: dict[int, object] = {}
        self.earlier: dict[int, object] = {}
        _OBSERVED[self.handle.data_ptr()] = self

    def note(self, tag: Tensor, call: object | None) -> None:
        """``tag`` identifies ``call`` from now on. An earlier tensor at its address was freed."""
        address = tag.data_ptr()
        self.earlier.pop(address, None)
        if call is None:
            self.calls.pop(address, None)
        else:
            self.calls[address] = call

    def call(self, tag: Tensor) -> object | None:
        address = tag.data_ptr()
        return self.calls[address] if address in self.calls else self.earlier.get(address)

    def forget_step(self) -> None:
        """Drop the calls of the step before the one that has ended, whose own backward may still come."""
        self.earlier, self.calls = self.calls, {}


_OPEN: Final = TracedCalls()
_TORCH: Final = os.path.dirname(torch.__file__)
_HIGHER_ORDER: Final = os.path.join(_TORCH, "_higher_order_ops", "")
_CHECKPOINT: Final = _HIGHER_ORDER + "wrap.py"
_DDP_OPTIMIZER: Final = os.path.join(_TORCH, "_dynamo", "backends", "distributed.py")

_OBSERVED: Final[weakref.WeakValueDictionary[int, ObservedHook]] = weakref.WeakValueDictionary()
"""Hooks by the addresses of their handles."""


def _begins(handle: Tensor, ends: bool, recording: bool) -> Tensor:
    with beneath():
        tag = torch.empty((), dtype=torch.int64, device=handle.device)
    observed = _OBSERVED.get(handle.data_ptr())
    if observed is not None:
        with torch.set_grad_enabled(recording):  # compiled code has recorded its graph beforehand
            observed.note(tag, observed.observer.ends(tag) if ends else observed.observer.begins(tag))
    return tag


def _sees(x: Tensor, handle: Tensor, tag: Tensor, slot: str, found: int, value: int) -> None:
    observed = _OBSERVED.get(handle.data_ptr())
    if observed is not None and (call := observed.call(tag)) is not None:
        observed.observer.sees(x, call, tag, slot, found, value)


def _sees_gradient(gradient: Tensor, handle: Tensor, tag: Tensor, slot: str, value: int) -> None:
    observed = _OBSERVED.get(handle.data_ptr())
    if observed is not None and (call := observed.call(tag)) is not None:
        observed.observer.sees_gradient(gradient, call, tag, slot, value)


# A compiler traces these two; they emit the operators above.


def _begin(inputs: Sequence[Tensor], handle: Tensor, slots: Sequence[str], wanted: Sequence[int], found: int) -> None:
    if _is_within(handle):
        return
    call = None
    try:
        tag = _traced(handle, False, inputs, slots, wanted, found)
        call = TracedCall.of(tag, [(x, slot, bool(each & FOLLOW)) for x, slot, each in zip(inputs, slots, wanted, strict=True)])
    except Exception as error:  # a failure here must not reach the compiler
        FAILURES.report("observing compiled code", error, ADVICE)
    _OPEN.push(handle, call)


def _end(
    outputs: Sequence[Tensor], handle: Tensor, slots: Sequence[str], wanted: Sequence[int], found: int, whole: bool = True
) -> None:
    if _is_within(handle):
        return
    try:
        tag = _traced(handle, True, outputs, slots, wanted, found)
        followed = _named(outputs, slots, wanted, FOLLOW)
        call = _OPEN.pop(handle)
        if call is not None and call.targets and not whole:
            FAILURES.warn("hidden results", HIDDEN)
            call = replace(call, targets={})
        handles = follow(call, tag, outputs, followed, partial(_reader, handle))
        observed = _OBSERVED.get(handle.data_ptr()) if type(handle) is Tensor else None
        if observed is not None:  # this was no trace: the hooks are on training's own tensors
            observed.observer.keep(handles)
    except Exception as error:
        FAILURES.report("observing compiled code", error, ADVICE)


def _traced(
    handle: Tensor, ends: bool, tensors: Sequence[Tensor], slots: Sequence[str], wanted: Sequence[int], found: int
) -> Tensor:
    with _saved():
        tag: Tensor = torch.ops.monitor.begins.default(handle, ends, torch.is_grad_enabled())
        for x, slot in _named(tensors, slots, wanted, SEE):
            here = _local(x)
            if here is not None:
                torch.ops.monitor.sees.default(here, handle, tag, slot, found, value_of(x))
    return tag


def _named(tensors: Sequence[Tensor], slots: Sequence[str], wanted: Sequence[int], what: int) -> list[Named]:
    return [(x, slot) for x, slot, each in zip(tensors, slots, wanted, strict=True) if each & what]


def _reader(handle: Tensor, tag: Tensor, slot: str) -> Callable[[Tensor], None]:
    def read(gradient: Tensor) -> None:
        here = _local(gradient)
        if here is not None:
            torch.ops.monitor.sees_gradient.default(here, handle, tag, slot, value_of(gradient))

    return read


def _is_within(handle: Tensor) -> bool:
    """Whether the code must not be observed and has no rows. This holds for shape inference, under a transform of
    ``torch.func``, and in a branch of ``cond``, a body of ``while_loop`` and the like, where side effects are forbidden. It
    also holds for pieces cut by DDP's optimizer unless the backend is inductor: the next piece would receive the tokens that
    order side effects.
    """
    if isinstance(handle, FakeTensor) or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_HIGHER_ORDER) and path != _CHECKPOINT:
            return True
        if path == _DDP_OPTIMIZER and not torch._functorch.config.unlift_effect_tokens:
            return True
        frame = frame.f_back
    return False


def _local(x: Tensor) -> Tensor | None:
    """The readable part of a traced tensor: the local shard of a DTensor; None for other wrappers."""
    if not is_traceable_wrapper_subclass(x):
        return x
    local = getattr(x, "_local_tensor", None)
    return local if isinstance(local, Tensor) else None


@contextmanager
def _saved() -> Iterator[None]:
    """Operators traced inside are excluded from checkpoints, so backward does not repeat them."""
    mode = get_proxy_mode()
    if mode is None:
        yield
        return
    nodes = mode.tracer.graph.nodes
    before = len(nodes)
    yield
    for node in itertools.islice(reversed(nodes), len(nodes) - before):
        node.meta.pop("recompute", None)
        node.meta.pop("ac_graph_id", None)


def _nothing(*_: Any) -> None:
    """An operator on tensors without data."""


def _define() -> torch.library.Library:
    library = torch.library.Library("monitor", "FRAGMENT")
    library.define("begins(Tensor handle, bool ends, bool recording) -> Tensor")
    library.define("sees(Tensor x, Tensor handle, Tensor call, str slot, int found, int value) -> ()")
    library.define("sees_gradient(Tensor gradient, Tensor handle, Tensor call, str slot, int value) -> ()")
    library.define("begin(Tensor[] inputs, Tensor handle, str[] slots, int[] wanted, int found) -> ()")
    library.define("end(Tensor[] outputs, Tensor handle, str[] slots, int[] wanted, int found, bool whole=True) -> ()")
    for name, call in (("begins", _begins), ("sees", _sees), ("sees_gradient", _sees_gradient)):
        library.impl(name, call, "CompositeExplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        if TRACEABLE:
            from torch._library.effects import EffectType

            torch.library._register_effectful_op(f"monitor::{name}", EffectType.ORDERED, lib=library)
    library.impl("begins", lambda handle, *_: torch.empty((), dtype=torch.int64, device=handle.device), "Meta")
    library.impl("sees", _nothing, "Meta")
    library.impl("sees_gradient", _nothing, "Meta")
    for name, traced in (("begin", _begin), ("end", _end)):
        library.impl(name, traced, "CompositeImplicitAutograd")
        library.impl(name, traced, "FuncTorchBatched")  # torch.vmap does not decompose operators it does not know
        torch.fx.node.has_side_effect(getattr(torch.ops.monitor, name).default)
    return library


LIBRARY: Final = _define()
"""Keeps the operators registered."""

begin: Final = torch.ops.monitor.begin.default
"""``begin(inputs, handle, slots, wanted, found)``: a call begins with these inputs. ``wanted``: ``SEE``, ``FOLLOW``, both or 0
for each.
"""

end: Final = torch.ops.monitor.end.default
"""``end(outputs, handle, slots, wanted, found, whole)``: the latest open call ends with these outputs. If ``whole``, they are
all tensors that it returns.
"""
