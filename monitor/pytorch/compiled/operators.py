"""Operators that replace the monitor's hooks in compiled code.

A compiler runs a hook once, while it traces. The hook leaves one operator in the graph for each event: a call begins with
its inputs, it ends with its outputs, a gradient is available. To the compiler the operators are black boxes with side effects,
whose order it keeps. They call the same Python code as eager hooks.

An operator identifies its hook by the address of a tensor, the handle, which is an input of the compiled code like a weight. A
number would be a constant, so layers could not share compiled code. Another tensor, the tag, identifies the call. It is made
when the call begins and kept for its backward, since forwards and backwards of several micro-batches interleave.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from monitor.failures import Failures
from monitor.pytorch import autograd
from monitor.pytorch.autograd import Target, sequence_nr
from monitor.pytorch.hooks import TRACEABLE
from monitor.pytorch.tensors import TENSOR_PATHS
from monitor.recording.backend import Autograd, Removable
from monitor.recording.gradient_edges import follow_inputs, follow_result, slots_of
from monitor.recording.module_calls import ADVICE
from monitor.recording.tensor_paths import TensorPath
from monitor.selection import TensorChoice
from monitor.stats.torch.tensors import beneath, unseen

# --- Follows gradients of a module's inputs and outputs while its call is traced.
#
# AOTAutograd traces forward and backward together, over a graph of autograd. So gradients are found as in eager code:
# by hooks on results, and on the edges through which the call returns gradients of its inputs
# (``recording/gradient_edges.py``). A module's inputs are not replaced, and no sum is regrouped.

GRAPH: Final[Autograd] = autograd

MOST_OPEN: Final = 64
"""Most nested calls of one module. Further open calls must have raised."""

Named = tuple[Tensor, str]
"""A tensor and its slot."""
Reader = Callable[[Tensor, str], Callable[[Tensor], None]]
"""Makes a function that reads the gradient of a slot, given the tag of the call."""


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call that has begun.

    Attributes:
        tag: The tensor that identifies the call.
        targets: Edges that the gradients of its inputs will flow to, and the slots of the inputs.
        start: Autograd's sequence number when the call began.
    """

    tag: Tensor
    targets: dict[Target, str]
    start: int

    @classmethod
    def of(cls, tag: Tensor, inputs: Sequence[tuple[Tensor, str, bool]]) -> TracedCall:
        """From all inputs, each with its slot and whether its gradient is wanted."""
        targets = slots_of(GRAPH, inputs, "input_") if torch.is_grad_enabled() else {}
        return cls(tag, targets, sequence_nr())


class TracedCalls:
    """Open calls by handle. Each trace has its own tensors for the handles."""

    def __init__(self) -> None:
        self._open = WeakIdKeyDictionary()

    def push(self, handle: Tensor, call: TracedCall | None) -> None:
        """Push a call; None for an unknown one, since its end comes, too."""
        calls: list[TracedCall | None] = self._open.setdefault(handle, [])
        calls.append(call)
        del calls[:-MOST_OPEN]

    def pop(self, handle: Tensor) -> TracedCall | None:
        calls: list[TracedCall | None] = self._open.get(handle, [])
        return calls.pop() if calls else None


def follow(
    call: TracedCall | None, tag: Tensor, results: Sequence[Tensor], outputs: Iterable[Named], read: Reader
) -> list[Removable]:
    """Hook the gradients of a call's inputs and outputs.

    Args:
        tag: Identifies the call from its end on.
        results: All tensors that it returns.
        outputs: Tensors whose gradients are wanted.

    Returns:
        Handles of hooks on tensors that may outlive the graph.
    """
    if not torch.is_grad_enabled():
        return []
    start = 0 if call is None else call.start
    handles: list[Removable] = []
    for x, slot in outputs:
        if x.requires_grad:
            handles += follow_result(GRAPH, x, start, read(tag, slot))
    if call is not None and call.targets:
        differentiable = [x for x in results if x.requires_grad]
        handles += follow_inputs(GRAPH, call.targets, start, differentiable, partial(read, call.tag))
    return handles


# --- Observers that the operators in compiled code call.


class CallObserver:
    """An observer that only calls a function at the begin and end of a call."""

    def __init__(self, call: Callable[..., None], module: nn.Module) -> None:
        self._call = call
        self._module = module

    def begins(self, _tag: Tensor) -> None:
        self._call(self._module, (), {})

    def ends(self, _tag: Tensor) -> None:
        self._call(self._module, (), {}, None)

    def sees(self, *_: Any) -> None: ...

    def sees_gradient(self, *_: Any) -> None: ...

    def keep(self, *_: Any) -> None: ...


def device_of(*modules: nn.Module | None) -> torch.device:
    """The device of the first module that has tensors; the host if none has."""
    for module in modules:
        if module is not None:
            # Not by attribute: Megatron's wrapper has another attribute ``buffers``.
            first = next(chain(nn.Module.parameters(module), nn.Module.buffers(module)), None)
            if first is not None:
                return torch.device("cpu") if first.is_meta else first.device
    return torch.device("cpu")


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
    return NO_VALUE if proxy_tensor.get_proxy_mode() is None else _VALUES.number(x)


NOT_OBSERVED: Final = (
    f"torch {torch.__version__} does not keep operators with side effects in order: the activations of compiled modules and "
    "their gradients have no rows. Use torch 2.10 or later, or train without torch.compile."
)

FAILURES: Final = Failures()
"""Failures while tracing. One for the process: code is traced once for all monitors."""

MISSING_ROWS: Final = "Some tensors of this code have no rows."

HIDDEN: Final = (
    "A module in compiled code returns tensors in an object that is no tuple, list, dict or dataclass: the gradients of its "
    "inputs are not recorded."
)

SEE: Final = 1
FOLLOW: Final = 2


class Observer(Protocol):
    """Receives the events of a hook when compiled code runs."""

    def begins(self, tag: Tensor) -> object | None:
        """A call begins. Returns an object that identifies the call in the methods below; None if it is not recorded.

        Args:
            tag: A scalar tensor, kept for the call's backward. Must be filled while code is captured.
        """

    def ends(self, tag: Tensor) -> object | None:
        """The latest open call ends. Returns an object likewise: it is used if the beginning returned none or was not traced.
        None if the results are not recorded.
        """

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


class Passage(NamedTuple):
    """The constants of an operator for a call that begins or ends. Passed as text: torch converts each element of a list.

    Attributes:
        recording: Whether autograd recorded the call when it was traced.
        found: How many tensors this side of the call has.
        tensors: The slot and the value number of each tensor that is seen.
    """

    ends: bool
    recording: bool
    found: int
    tensors: Sequence[tuple[str, int]]


MOST_PASSAGES: Final = 1 << 16
"""Texts that need not be parsed again. Each operator in compiled code has one of its own."""


@lru_cache(MOST_PASSAGES)
def _passage_of(text: str) -> Passage:
    return Passage(*json.loads(text))


def _call(function: Callable[..., None], *args: Any) -> None:
    function(*args)


class ObservedHook:
    """A hook in compiled code.

    Args:
        failures: Receives failures of the observer, with the ``name`` of what it observes. None if the observer does not raise.

    Attributes:
        guarded: Calls a function whose failures must not reach compiled code.
        handle: The tensor whose address identifies the hook. Never read. A parameter, because torch compares other tensors with
            every input. If two inputs are one tensor, it raises an error for a module of the same class without the hooked one.
        calls: The calls by the addresses of their tags; empty in eager code.
        earlier: Those of the step before.
    """

    def __init__(self, observer: Observer, device: torch.device, failures: Failures | None = None, name: str = "") -> None:
        with beneath():
            self.handle = nn.Parameter(torch.empty(1, dtype=torch.int64, device=device), requires_grad=False)
        self.observer = observer
        self.guarded = _call if failures is None else failures.guarded("reading activations", _call, ADVICE, of=name)
        self.calls: dict[int, object] = {}
        self.earlier: dict[int, object] = {}
        OBSERVED[self.handle.data_ptr()] = self

    def passes(self, tag: Tensor, is_new: bool, seen: Sequence[Tensor], passage: Passage) -> None:
        """A call begins or ends.

        Args:
            is_new: Whether the tag was made now. Otherwise it is that of the call's beginning.
        """
        if is_new:
            self.note(tag, None)
        begun, observer, recording = self.call(tag), self.observer, torch.is_grad_enabled()
        torch._C._set_grad_enabled(passage.recording)  # compiled code has recorded its graph beforehand
        try:
            call = observer.ends(tag) if passage.ends else observer.begins(tag)
        finally:
            torch._C._set_grad_enabled(recording)
        if begun is None:
            self.note(tag, call)
        elif call is not None:
            call = begun
        if call is not None:
            for x, (slot, value) in zip(seen, passage.tensors, strict=True):
                observer.sees(x, call, tag, slot, passage.found, value)

    def sees_gradient(self, gradient: Tensor, tag: Tensor, slot: str, value: int) -> None:
        """The gradient of a tensor of a call."""
        call = self.call(tag)
        if call is not None:
            self.observer.sees_gradient(gradient, call, tag, slot, value)

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

OBSERVED: Final[weakref.WeakValueDictionary[int, ObservedHook]] = weakref.WeakValueDictionary()
"""Hooks by the addresses of their handles."""


def _passes(handle: Tensor, seen: Sequence[Tensor], passage: str) -> Tensor:
    with unseen():
        tag = torch.empty((), dtype=torch.int64, device=handle.device)
    _passes_with(handle, tag, True, seen, passage)
    return tag


def _ends(handle: Tensor, tag: Tensor, seen: Sequence[Tensor], passage: str) -> None:
    _passes_with(handle, tag, False, seen, passage)


def _passes_with(handle: Tensor, tag: Tensor, is_new: bool, seen: Sequence[Tensor], passage: str) -> None:
    observed = OBSERVED.get(handle.data_ptr())
    if observed is not None:
        observed.guarded(observed.passes, tag, is_new, seen, _passage_of(passage))


def _sees_gradient(gradient: Tensor, handle: Tensor, tag: Tensor, slot: str, value: int) -> None:
    observed = OBSERVED.get(handle.data_ptr())
    if observed is not None:
        observed.guarded(observed.sees_gradient, gradient, tag, slot, value)


# A compiler traces these two; they emit the operators above.


def _begin(inputs: Sequence[Tensor], handle: Tensor, slots: Sequence[str], wanted: Sequence[int], found: int) -> None:
    if is_within(handle):
        return
    call = None
    try:
        tag = _traced(handle, None, False, inputs, slots, wanted, found)
        call = TracedCall.of(tag, [(x, slot, bool(each & FOLLOW)) for x, slot, each in zip(inputs, slots, wanted, strict=True)])
    except Exception as error:  # a failure here must not reach the compiler
        FAILURES.report("observing compiled code", error, MISSING_ROWS)
    _OPEN.push(handle, call)


def _end(
    outputs: Sequence[Tensor], handle: Tensor, slots: Sequence[str], wanted: Sequence[int], found: int, whole: bool = True
) -> None:
    if is_within(handle):
        return
    try:
        call = _OPEN.pop(handle)
        tag = _traced(handle, None if call is None else call.tag, True, outputs, slots, wanted, found)
        followed = _named(outputs, slots, wanted, FOLLOW)
        if call is not None and call.targets and not whole:
            FAILURES.warn("hidden results", HIDDEN)
            call = replace(call, targets={})
        handles = follow(call, tag, outputs, followed, partial(_reader, handle))
        observed = OBSERVED.get(handle.data_ptr()) if type(handle) is nn.Parameter else None
        if observed is not None:  # this was no trace: the hooks are on training's own tensors
            observed.observer.keep(handles)
    except Exception as error:
        FAILURES.report("observing compiled code", error, MISSING_ROWS)


def _traced(
    handle: Tensor,
    tag: Tensor | None,
    ends: bool,
    tensors: Sequence[Tensor],
    slots: Sequence[str],
    wanted: Sequence[int],
    found: int,
) -> Tensor:
    """Leave an operator in the graph. Returns the tag of the call: ``tag``, if its beginning was traced."""
    with saved():
        named = [
            (here, (slot, value_of(x))) for x, slot in _named(tensors, slots, wanted, SEE) if (here := _local(x)) is not None
        ]
        seen = [here for here, _ in named]
        passage = json.dumps(Passage(ends, torch.is_grad_enabled(), found, [told for _, told in named]))
        if tag is None:
            return torch.ops.monitor.passes.default(handle, seen, passage)  # type: ignore[no-any-return]
        torch.ops.monitor.ends.default(handle, tag, seen, passage)
    return tag


def _named(tensors: Sequence[Tensor], slots: Sequence[str], wanted: Sequence[int], what: int) -> list[Named]:
    return [(x, slot) for x, slot, each in zip(tensors, slots, wanted, strict=True) if each & what]


def _reader(handle: Tensor, tag: Tensor, slot: str) -> Callable[[Tensor], None]:
    def read(gradient: Tensor) -> None:
        here = _local(gradient)
        if here is not None:
            torch.ops.monitor.sees_gradient.default(here, handle, tag, slot, value_of(gradient))

    return read


def is_within(handle: Tensor) -> bool:
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
def saved() -> Iterator[None]:
    """Operators traced inside are excluded from checkpoints, so backward does not repeat them."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        yield
        return
    nodes = mode.tracer.graph.nodes
    before = len(nodes)
    yield
    for node in itertools.islice(reversed(nodes), len(nodes) - before):
        node.meta.pop("recompute", None)
        node.meta.pop("ac_graph_id", None)


def nothing(*_: Any) -> None:
    """An operator on tensors without data."""


def define_effect(library: torch.library.Library, name: str, call: Callable[..., Any]) -> None:
    """Implement an operator that compiled code calls in order, because of its effects."""
    library.impl(name, call, "CompositeExplicitAutograd")
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    if TRACEABLE:
        from torch._library.effects import EffectType

        torch.library._register_effectful_op(f"monitor::{name}", EffectType.ORDERED, lib=library)


def define_traced(library: torch.library.Library, name: str, traced: Callable[..., Any]) -> None:
    """Implement an operator that a compiler traces into others."""
    library.impl(name, traced, "CompositeImplicitAutograd")
    library.impl(name, traced, "FuncTorchBatched")  # torch.vmap does not decompose operators it does not know
    torch.fx.node.has_side_effect(getattr(torch.ops.monitor, name).default)


def _define() -> torch.library.Library:
    library = torch.library.Library("monitor", "FRAGMENT")
    library.define("passes(Tensor handle, Tensor[] seen, str passage) -> Tensor")
    library.define("ends(Tensor handle, Tensor call, Tensor[] seen, str passage) -> ()")
    library.define("sees_gradient(Tensor gradient, Tensor handle, Tensor call, str slot, int value) -> ()")
    library.define("begin(Tensor[] inputs, Tensor handle, str[] slots, int[] wanted, int found) -> ()")
    library.define("end(Tensor[] outputs, Tensor handle, str[] slots, int[] wanted, int found, bool whole=True) -> ()")
    for name, call in (("passes", _passes), ("ends", _ends), ("sees_gradient", _sees_gradient)):
        define_effect(library, name, call)
    library.impl("passes", lambda handle, *_: torch.empty((), dtype=torch.int64, device=handle.device), "Meta")
    library.impl("ends", nothing, "Meta")
    library.impl("sees_gradient", nothing, "Meta")
    for name, traced in (("begin", _begin), ("end", _end)):
        define_traced(library, name, traced)
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

# --- Hooks of modules as a compiler traces them. Each holds constants only and leaves one operator in the graph.


class TracedHook:
    """A hook without tensors: it only reports the call."""

    def __init__(self, observed: ObservedHook, *, ends: bool = False) -> None:
        self._observed = observed  # kept alive: compiled code references only the handle
        self._handle = observed.handle
        self._ends = ends

    def __call__(self, _module: nn.Module, *_: Any) -> None:
        if self._ends:
            end([], self._handle, [], [], 0)
        else:
            begin([], self._handle, [], [], 0)


def unobserved(failures: Failures) -> Callable[..., None]:
    """A hook for compilers of versions that are not ``TRACEABLE``: it warns, and leaves nothing in the graph."""

    def warn() -> None:
        failures.warn("compiled code", NOT_OBSERVED)

    traced: Callable[[], None] = torch.compiler.assume_constant_result(warn)  # called while a compiler traces, not afterwards

    def hook(*_: Any) -> None:
        traced()

    return hook


class TracedInputs(TracedHook):
    """Before a module's forward.

    Args:
        seen: The inputs to observe.
        followed: The inputs whose gradients are observed.
    """

    def __init__(self, observed: ObservedHook, seen: TensorChoice, followed: TensorChoice) -> None:
        super().__init__(observed)
        self._seen = seen
        self._followed = followed

    def __call__(self, _module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        kwargs = kwargs or {}
        found = len(args) + len(kwargs)
        leaves = TENSOR_PATHS.inputs(args, kwargs)
        slots = ["input" + leaf.suffix for leaf in leaves]
        begin([leaf.tensor for leaf in leaves], self._handle, slots, _wanted(self._seen, self._followed, leaves, found), found)


class TracedOutputs(TracedHook):
    """After a module's forward, likewise."""

    def __init__(self, observed: ObservedHook, seen: TensorChoice, followed: TensorChoice) -> None:
        super().__init__(observed, ends=True)
        self._seen = seen
        self._followed = followed

    def __call__(self, _module: nn.Module, _args: Any = (), _kwargs: Any = None, result: Any = None) -> None:
        found = TENSOR_PATHS.length(result)
        leaves = TENSOR_PATHS.outputs(result)
        slots = ["output" + leaf.suffix for leaf in leaves]
        wanted = _wanted(self._seen, self._followed, leaves, found)
        end([leaf.tensor for leaf in leaves], self._handle, slots, wanted, found, TENSOR_PATHS.finds_all(result))


def _wanted(seen: TensorChoice, followed: TensorChoice, leaves: Sequence[TensorPath], found: int) -> list[int]:
    return [(SEE if _takes(seen, leaf, found) else 0) | (FOLLOW if _takes(followed, leaf, found) else 0) for leaf in leaves]


def _takes(choice: TensorChoice, leaf: TensorPath, found: int) -> bool:
    """Whether a leaf is wanted. If the choice expects another number of tensors than the call has, all are."""
    return choice.wanted and (choice.index is None or choice.index == leaf.position or choice.length not in (None, found))


# --- Code compiled before the monitor was attached has no hooks, and is not recompiled for them.

COMPILED_HOOK_ADVICE = (
    "is of a class that was compiled before the monitor was attached. Torch may use this code again, also for another model of "
    "the class. Then tensors of compiled code have no rows. Attach before the first model of the class is called, or call "
    "torch._dynamo.reset() afterwards to recompile everything."
)


def was_compiled(module: nn.Module) -> bool:
    """Whether compiled code may exist for the forward of this module's class."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    written: Any = type(getattr(module, "_orig_mod", module))
    code = getattr(getattr(written, "forward", None), "__code__", None)  # a scripted module has none
    if dynamo is None or code is None:
        return False
    return any(_compiled_for(entry, code) in {None, written} for entry in dynamo._debug_get_cache_entry_list(code))


def _compiled_for(entry: Any, code: CodeType) -> type | None:
    """The class whose forward was compiled; None if torch does not tell.

    Forwards of many classes may have one code: that of the function which a decorator of transformers returns. Torch guards
    the class of the first argument.
    """
    manager: Any = getattr(entry, "guard_manager", None)  # that of older versions of torch has no children
    for guarded in manager.root.get_child_managers() if hasattr(manager, "root") else ():
        if guarded.get_source() == f"L[{code.co_varnames[0]!r}]":
            of = guarded.get_type_of_guarded_value()
            return of if isinstance(of, type) and issubclass(of, nn.Module) else None
    return None


class HookGuards:
    """Makes torch guard code that is compiled from now on against hooks added to its modules.

    By default torch's compiler assumes that no hooks are added. It would reuse code compiled without the monitor's hooks, for
    an unmonitored model or before this one was monitored. The setting is torch's, for the whole process, and is restored when
    no monitor needs it.
    """

    def __init__(self) -> None:
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._off, self._before = False, True
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._early: set[type] = set()

    def meet(self, root: nn.Module) -> None:
        """Note which classes of modules in a model were compiled before the guards. Later compilations are guarded; and all are
        if the program itself has set the guards.
        """
        if self._before and root not in self._met:
            self._met.add(root)
            self._early |= {type(module) for module in root.modules() if was_compiled(module)}

    def came_late(self, module: nn.Module) -> bool:
        """Whether a module may have compiled code without guards for hooks."""
        return type(module) in self._early and was_compiled(module)

    def hold(self, holder: object) -> None:
        """Keep the guards on until ``holder`` is released or garbage-collected."""
        config: Any = torch._dynamo.config
        if not self._off:
            self._off, self._before = True, config.skip_nnmodule_hook_guards
            config.skip_nnmodule_hook_guards = False
        weakref.finalize(holder, self._put_back).atexit = False  # made first, called last
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """Release ``holder``. Idempotent."""
        self._holders.discard(holder)
        self._put_back()

    def _put_back(self) -> None:
        if self._off and not self._holders:
            config: Any = torch._dynamo.config
            self._off, config.skip_nnmodule_hook_guards = False, self._before
            self._met.clear()
            self._early.clear()


HOOK_GUARDS: Final = HookGuards()
"""One for the process, like torch's setting."""
