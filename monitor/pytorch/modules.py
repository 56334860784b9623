"""Access to PyTorch's modules: hooks in eager and compiled code, and which calls train.

``torch.distributed.pipelining`` rehearses a stage whose input shapes are unknown, before the first micro-batch. The forward and
backward of empty tensors look like training, and no public hook announces them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from monitor.pytorch import hooks as module_hooks
from monitor.pytorch.autograd import CheckpointRepetitions
from monitor.pytorch.compiled import calls, operators
from monitor.pytorch.hooks import TRACEABLE, runs_backward
from monitor.pytorch.silent_writes import SilentWrites
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.recording import arguments
from monitor.recording.activations import ModuleCollector, ModuleWatcher
from monitor.recording.attached_model import NamedParts
from monitor.recording.backend import HookSet, Removable, Shown
from monitor.recording.module_calls import ADVICE, CallIndex, ModuleCall
from monitor.selection import ALL_TENSORS, NO_TENSORS

takes_hooks = module_hooks.takes_hooks
repeating = runs_backward
_transform = torch._C._functorch.peek_interpreter_stack


def chunks_of(model: Any) -> Sequence[nn.Module]:
    """The chunks of a virtual pipeline, or the one module as a list of itself. Raises ``TypeError`` and ``ValueError``."""
    return arguments.chunks_of(model, nn.Module, "torch.nn.Module")


def parts(chunk: nn.Module) -> NamedParts:
    return NamedParts(chunk.named_modules(), chunk.named_parameters())


def never_called(module: nn.Module) -> bool:
    """Whether a module has no forward: it only contains others, or parameters."""
    return getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module)


def before_forward(module: nn.Module, call: Callable[..., None], *, compiled: bool = False) -> Removable:
    return module_hooks.before_forward(module, call, _reporting(call, module) if compiled else None)


def after_forward(module: nn.Module, call: Callable[..., None], *, always: bool = False, compiled: bool = False) -> Removable:
    return module_hooks.after_forward(module, call, _reporting(call, module, ends=True) if compiled else None, always=always)


def around_forward(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None], whole: Callable[..., None], shows: Shown
) -> Sequence[Removable]:
    begins: operators.TracedHook | None = None
    ends: operators.TracedHook | None = None
    if TRACEABLE:
        observed = operators.ObservedHook(calls.WholeCallObserver(whole, module), operators.device_of(module))
        begins = None if shows == "results" else calls.TracedBegin(observed, looks=shows == "calls")
        ends = calls.TracedWhole(observed, arguments=shows != "results")
    return module_hooks.before_forward(module, before, begins), module_hooks.after_forward(module, after, ends, always=True)


def _reporting(call: Callable[..., None], module: nn.Module, *, ends: bool = False) -> operators.TracedHook | None:
    """A hook of compiled code that reports calls, if this version of torch keeps operators in order."""
    return (
        operators.TracedHook(
            operators.ObservedHook(operators.CallObserver(call, module), operators.device_of(module)), ends=ends
        )
        if TRACEABLE
        else None
    )


def trains(module: nn.Module) -> bool:
    """Whether a call of the module that begins now is a training call. Under a transform of ``torch.func`` it is not: the
    tensors are placeholders and hold no numbers.
    """
    return module.training and _transform() is None


def rehearsing() -> bool:
    """Whether the forward that begins is a stage's rehearsal. Free if there are no stages."""
    rehearsal = _rehearsal()
    frame: FrameType | None = sys._getframe(1) if rehearsal is not None else None
    while frame is not None and frame.f_code is not rehearsal:
        frame = frame.f_back
    return frame is not None


def _rehearsal() -> CodeType | None:
    """Code of the rehearsing function. Versions of torch that infer shapes with meta tensors, without gradients, have none."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    return getattr(getattr(stage, "_forward_metadata_inference", None), "__code__", None)


_CALLS: Final[CodeType] = nn.Module._call_impl.__code__
_FUNCTIONS: Final[CodeType] = torch.autograd.Function.apply.__code__


def _in_a_function() -> bool:
    """Whether this thread is in the forward of a function of autograd, as checkpointing has one: gradients are off there."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _FUNCTIONS:
        frame = frame.f_back
    return frame is not None


def _calls_on_stack(root: nn.Module) -> int:
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        count += frame.f_code is _CALLS and frame.f_locals.get("self") is root
        frame = frame.f_back
    return count


class CompilableHooks:
    """The hooks of a collector's modules, and their counterparts in compiled code (``CallHooks``)."""

    is_running = None
    repetitions = CheckpointRepetitions

    def __init__(self, collector: ModuleCollector) -> None:
        self._collector = collector
        self._observed_roots: list[operators.ObservedHook] = []
        self._silent_writes: SilentWrites | None = None
        operators.HOOK_GUARDS.hold(self)

    def is_alone(self, root: nn.Module) -> bool:
        """False in compiled code, whose calls are not on the stack. Torch calls hooks after an exception, but not after an
        interrupt, or another exception that is no ``Exception``.
        """
        return _calls_on_stack(root) == 1

    def hook_module(
        self, watcher: ModuleWatcher, before: Callable[..., None], after: Callable[..., None], hooks: HookSet
    ) -> Callable[[], None] | None:
        module, name, wanted, failures = watcher.module, watcher.name, watcher.wanted, self._collector.failures
        if self._silent_writes is None:
            self._silent_writes = SilentWrites(cast(TorchTensorReader, self._collector.recorder.reader).forget_versions)
        if operators.HOOK_GUARDS.came_late(module):
            failures.warn("compiled before", f"{name or type(module).__name__!r} {operators.COMPILED_HOOK_ADVICE}")
        if not TRACEABLE:
            _hook(module, before, after, hooks, operators.unobserved(failures))
            return None
        device = operators.device_of(module, self._collector.roots.get(watcher.chunk))
        observed = operators.ObservedHook(CompiledModule(watcher), device, failures, name)
        begins = operators.TracedInputs(observed, wanted.input, wanted.input_grad)
        ends = operators.TracedOutputs(observed, wanted.output, wanted.output_grad)
        _hook(module, before, after, hooks, begins, ends)
        return observed.forget_step

    def hook_root(
        self, chunk: int, root: nn.Module, before: Callable[..., None], after: Callable[..., None], hooks: HookSet
    ) -> None:
        operators.HOOK_GUARDS.meet(root)
        if not TRACEABLE:
            _hook(root, before, after, hooks, operators.unobserved(self._collector.failures))
            return
        compiled = CompiledRoot(self._collector, chunk, before, after)
        observed = operators.ObservedHook(compiled, operators.device_of(root), self._collector.failures)
        self._observed_roots.append(observed)
        _hook(
            root,
            before,
            after,
            hooks,
            operators.TracedHook(observed),
            operators.TracedOutputs(observed, NO_TENSORS, ALL_TENSORS),
        )

    def root_trains(self, root: nn.Module | None) -> bool:
        """The rehearsal of a pipeline stage does not. Without gradients only functions of autograd call modules in training."""
        if root is None:
            return torch.is_grad_enabled() or _in_a_function()
        return trains(root) and torch.is_grad_enabled() and not rehearsing()

    def backward_begins(self, x: Tensor, call: Callable[[Tensor], None]) -> None:
        if x.requires_grad and x.grad_fn is not None:
            x.register_hook(call)

    def end_step(self) -> None:
        if self._silent_writes is not None:
            self._silent_writes.look_again()
        for observed in self._observed_roots:
            if observed.calls or observed.earlier:
                observed.forget_step()

    def remove(self) -> None:
        operators.HOOK_GUARDS.release(self)
        if self._silent_writes is not None:
            self._silent_writes.remove()


new_hooks = CompilableHooks


def _hook(
    module: nn.Module,
    before: Callable[..., None],
    after: Callable[..., None],
    hooks: HookSet,
    begins: Callable[..., None] | None = None,
    ends: Callable[..., None] | None = None,
) -> None:
    hooks.add(module_hooks.before_forward(module, before, begins))
    hooks.add(module_hooks.after_forward(module, after, ends, always=True))


# --- What the operators in compiled code call, in place of hooks.


class CompiledCall(NamedTuple):
    """A call in compiled code, and the step that it belongs to."""

    call: ModuleCall
    step: int


class CompiledModule:
    """The calls of one module in compiled code."""

    def __init__(self, watcher: ModuleWatcher) -> None:
        self._watcher = watcher
        self._collector, self._clock, self._gate = watcher.collector, watcher.collector.clock, watcher.collector.gate
        self._due = watcher.collector.due
        self._reader = cast(TorchTensorReader, watcher.collector.recorder.reader)

    def begins(self, tag: Tensor) -> CompiledCall | None:
        if not self._due.now and tag.is_cpu:  # a capture on a device may be replayed in collected steps
            return None
        call = self._watcher.begin(repeating=repeating()) or self._repeated()
        self._watcher.open_calls.setdefault(get_ident(), []).append(call)
        return self._compiled(call, tag)

    def ends(self, tag: Tensor) -> CompiledCall | None:
        opened = self._watcher.open_calls.get(get_ident())
        return self._compiled(opened.pop() if opened else None, tag)

    def _compiled(self, call: ModuleCall | None, tag: Tensor) -> CompiledCall | None:
        if call is None:
            return None
        self._reader.keep_micro_step(tag, self._watcher.chunk)
        return CompiledCall(call, self._clock.step)

    def _repeated(self) -> ModuleCall | None:
        """The call that a checkpoint around compiled code repeats in a backward."""
        micro_step, calls = self._clock.backward[self._watcher.chunk], self._watcher.calls
        if micro_step < 0 or not repeating():
            return None
        return ModuleCall(CallIndex(micro_step, 0), records_forward=False) if calls.begun(micro_step) == 1 else None

    def sees(self, x: Tensor, call: CompiledCall, tag: Tensor, slot: str, found: int, value: int) -> None:
        if not call.call.records_forward or call.step != self._clock.step:
            return
        (micro_step, number), watcher = call.call.place, self._watcher
        try:
            side = "input" if slot.startswith("input") else "output"
            watcher.fitting(side, watcher.wanted.input if side == "input" else watcher.wanted.output, found)
            self._reader.record_value(watcher.series("actv", slot, number, x), x, micro_step, value, tag, self._due)
        except Exception as error:  # the other tensors of the call have rows
            self._collector.failures.report("reading activations", error, ADVICE, of=watcher.name)

    def sees_gradient(self, gradient: Tensor, call: CompiledCall, tag: Tensor, slot: str, value: int) -> None:
        micro_step, number = call.call.place
        if self._gate.attached and (not tag.is_cpu or self._gate.belongs(call.step)):
            series = self._watcher.series("actv_grad", slot, number, gradient)
            self._reader.record_value(series, gradient, micro_step, value, tag, self._due)

    def keep(self, handles: Sequence[Removable]) -> None:
        self._collector.until_step_ends(handles)


class CompiledRoot:
    """A whole model that is compiled together with its hooks."""

    def __init__(self, collector: ModuleCollector, chunk: int, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._collector = collector
        self._chunk = chunk
        self._before = before
        self._after = after

    def begins(self, _tag: Tensor) -> None:
        self._before(self._collector.roots[self._chunk], (), {})

    def ends(self, _tag: Tensor) -> int | None:
        """The micro-step, if the call that ends trains."""
        tracked, micro_step = self._collector.in_tracked_root(self._chunk), self._collector.forwards[self._chunk].micro_step
        self._after(self._collector.roots[self._chunk], (), {}, None)
        return micro_step if tracked else None

    def sees(self, *_: Any) -> None:
        """Ignored: the modules' own hooks read inputs and outputs."""

    def sees_gradient(self, gradient: Tensor, call: int, *_: Any) -> None:
        self._collector.backward_begins(self._chunk, call, gradient)

    def keep(self, handles: Sequence[Removable]) -> None:
        self._collector.until_step_ends(handles)
