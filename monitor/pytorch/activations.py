"""Records activations and their gradients for PyTorch, in eager and compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monitor.failures import Failures
from monitor.pytorch.compiled.hooks import ADVICE as EARLIER
from monitor.pytorch.compiled.hooks import HOOK_GUARDS, TracedHook, TracedInputs, TracedOutputs
from monitor.pytorch.compiled.operators import TRACEABLE, ObservedHook
from monitor.pytorch.compiled.tracing import GuardedObserver, device_of
from monitor.pytorch.hooks import after_forward, before_forward
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.recording import activations
from monitor.recording.activations import ADVICE, ModuleCall
from monitor.recording.backend import RecordingBackend
from monitor.recording.protocols import CallIndex, HookSet, Removable
from monitor.recording.recorder import Recorder
from monitor.recording.step_clock import Clock
from monitor.selection import ALL_TENSORS, NO_TENSORS, ModuleSelection, TensorChoice


class CompiledCall(NamedTuple):
    """A call in compiled code, and the step that it belongs to."""

    call: ModuleCall
    step: int


class ModuleWatcher(activations.ModuleWatcher):
    """The hooks of one module, and their counterparts in compiled code."""

    _module: nn.Module
    _collector: ModuleCollector
    _reader: TorchTensorReader
    _observed: ObservedHook | None = None

    def attach(self, hooks: HookSet) -> None:
        assert isinstance(self._recorder.reader, TorchTensorReader)
        self._reader = self._recorder.reader
        guarded, wanted = self._collector.failures.guarded, self._wanted
        before = guarded("reading the inputs", self._before, ADVICE, of=self._name)
        after = guarded("reading the outputs", self._after, ADVICE, of=self._name)
        if not TRACEABLE:
            hooks.add(before_forward(self._module, before))
            hooks.add(after_forward(self._module, after, always=True))
            return
        observer = GuardedObserver(self, self._collector.failures, self._name)
        observed = self._observed = ObservedHook(observer, self._collector.device(self._chunk, self._module))
        hooks.add(before_forward(self._module, before, TracedInputs(observed, wanted.input, wanted.input_grad)))
        hooks.add(after_forward(self._module, after, TracedOutputs(observed, wanted.output, wanted.output_grad), always=True))

    # Called by the operators in compiled code.

    def begins(self, tag: Tensor) -> CompiledCall | None:
        if not self._recorder.active and tag.is_cpu:  # a capture on a device may be replayed in collected steps
            return None
        call = self._begin(self._module) or self._repeated()
        self._open.setdefault(get_ident(), []).append(call)
        return self._compiled(call, tag)

    def ends(self, tag: Tensor) -> CompiledCall | None:
        opened = self._open.get(get_ident())
        return self._compiled(opened.pop() if opened else None, tag)

    def _compiled(self, call: ModuleCall | None, tag: Tensor) -> CompiledCall | None:
        if call is None:
            return None
        self._reader.keep_micro_step(tag, self._chunk)
        return CompiledCall(call, self._clock.step)

    def _repeated(self) -> ModuleCall | None:
        """The call that a checkpoint around compiled code repeats in a backward."""
        micro_step = self._clock.backward[self._chunk]
        if micro_step < 0 or self._calls is None or not self._backend.repeating():
            return None
        return ModuleCall(CallIndex(micro_step, 0), records_forward=False) if self._calls.begun(micro_step) == 1 else None

    def sees(self, x: Tensor, call: CompiledCall, tag: Tensor, slot: str, found: int, value: int) -> None:
        (micro_step, number), records_forward = call.call.place, call.call.records_forward
        if records_forward and call.step == self._clock.step:
            side = "input" if slot.startswith("input") else "output"
            self._fitting(side, self._choice(side), found)
            self._reader.record_value(self._series("actv", slot, number, x), x, micro_step, value, tag)

    def sees_gradient(self, gradient: Tensor, call: CompiledCall, tag: Tensor, slot: str, value: int) -> None:
        micro_step, number = call.call.place
        if self.is_attached and (not tag.is_cpu or self._collector.belongs(call.step)):
            self._reader.record_value(self._series("actv_grad", slot, number, gradient), gradient, micro_step, value, tag)

    def keep(self, handles: Sequence[Removable]) -> None:
        self._collector.until_step_ends(list(handles))

    def forget_step(self) -> None:
        super().forget_step()
        if self._observed is not None:
            self._observed.forget_step()

    def _choice(self, side: str) -> TensorChoice:
        return self._wanted.input if side == "input" else self._wanted.output


class RootObserver:
    """A whole model that is compiled together with its hooks."""

    def __init__(self, collector: ModuleCollector, chunk: int, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._collector = collector
        self._chunk = chunk
        self._before = before
        self._after = after

    def begins(self, _tag: Tensor) -> None:
        self._before(self._collector.root(self._chunk), (), {})

    def ends(self, _tag: Tensor) -> int | None:
        """The micro-step, if the call that ends trains."""
        tracked = self._collector.in_tracked_root(self._chunk)
        self._after(self._collector.root(self._chunk), (), {}, None)
        return self._collector.clock.forward[self._chunk] if tracked else None

    def sees(self, *_: Any) -> None:
        """Ignored: the modules' own hooks read inputs and outputs."""

    def sees_gradient(self, gradient: Tensor, call: int, *_: Any) -> None:
        self._collector.backward_begins(self._chunk, call, gradient)

    def keep(self, handles: Sequence[Removable]) -> None:
        self._collector.until_step_ends(list(handles))


class ModuleCollector(activations.ModuleCollector):
    """All watched modules of one attachment."""

    def __init__(self, recorder: Recorder, clock: Clock, failures: Failures, backend: RecordingBackend) -> None:
        super().__init__(recorder, clock, failures, backend)
        self._observed_roots: list[ObservedHook] = []
        HOOK_GUARDS.hold(self)

    def end_step(self) -> None:
        super().end_step()
        for observed in self._observed_roots:
            observed.forget_step()

    def remove(self) -> None:
        super().remove()
        HOOK_GUARDS.release(self)

    def root(self, chunk: int) -> nn.Module:
        root: nn.Module = self._roots[chunk]
        return root

    def in_tracked_root(self, chunk: int) -> bool:
        """Whether a forward of a chunk's root that trains is in progress."""
        return self._in_tracked_root(chunk)

    def backward_begins(self, chunk: int, micro_step: int, gradient: Tensor) -> None:
        """A backward reaches the result of a chunk."""
        self._backward_begins(chunk, micro_step, gradient)

    def device(self, chunk: int, module: nn.Module) -> torch.device:
        """The device of a module, as far as known before it runs."""
        return device_of(module, self._roots.get(chunk))

    def _new_watcher(self, module: Any, name: str, chunk: int, wanted: ModuleSelection) -> ModuleWatcher:
        if HOOK_GUARDS.came_late(module):
            self.failures.warn("compiled before", f"{name or type(module).__name__!r} {EARLIER}")
        return ModuleWatcher(module, name, chunk, wanted, self)

    def _hook_root(self, chunk: int, root: Any, before: Callable[..., None], after: Callable[..., None]) -> None:
        HOOK_GUARDS.meet(root)
        if not TRACEABLE:
            super()._hook_root(chunk, root, before, after)
            return
        observer = GuardedObserver(RootObserver(self, chunk, before, after), self.failures, "")
        observed = ObservedHook(observer, self.device(chunk, root))
        self._observed_roots.append(observed)
        self._root_hooks.add(before_forward(root, before, TracedHook(observed)))
        self._root_hooks.add(after_forward(root, after, TracedOutputs(observed, NO_TENSORS, ALL_TENSORS), always=True))
