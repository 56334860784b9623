"""Activations and their gradients: what goes into a module, what comes out, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from monitor.failures import Failures
from monitor.pytorch.clock import Clock
from monitor.pytorch.hooks import HookSet, ModuleHook, Removable
from monitor.pytorch.input_gradients import Target, gradient_target, producers, sequence_nr, watch
from monitor.pytorch.leaves import Leaf, input_leaves, length, output_leaves
from monitor.pytorch.recorder import Recorder, Watched
from monitor.selection import ModuleSelection, TensorChoice
from monitor.series import Series

ADVICE = "The rows of this module are missing."


def recomputing() -> bool:
    """Whether this forward repeats an earlier one inside a backward pass (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


@dataclass(slots=True)
class Call:
    """One call of a module, between its pre-hook and its forward hook.

    Attributes:
        index: How many calls of this module the micro-step had before.
        start: Autograd sequence number before the call: nodes made during the call have it or a later one.
        targets: The gradient edges of the inputs that are watched, with their suffixes.
    """

    micro_step: int
    index: int
    records_forward: bool
    start: int = 0
    targets: dict[Target, str] = field(default_factory=dict)


@dataclass(slots=True)
class Calls:
    """The calls of one module in one micro-step.

    A module under reentrant checkpointing is called without a graph first and again, in backward, with one. Its segments are
    recomputed last first, each in forward order, so the place of a recomputed call is known once its segment is complete.

    Attributes:
        begun: Calls so far, recomputed ones left out.
        with_graph: Whether those calls built a graph: then a recomputation is not the one whose backward will run.
        segments: For each recomputed segment, by the number of the node that recomputes it, how many calls it held so far.
    """

    begun: int = 0
    with_graph: bool = False
    segments: dict[int, int] = field(default_factory=dict)

    def recomputed(self, segment: int) -> Callable[[], int]:
        """Count a recomputed call; what is returned says, later, which call of the micro-step it repeats."""
        position = self.segments.get(segment, 0)
        self.segments[segment] = position + 1
        return partial(self._place, segment, position)

    def _place(self, segment: int, position: int) -> int:
        until = list(self.segments)
        later = sum(self.segments[other] for other in until[: until.index(segment) + 1])
        return max(0, self.begun - later + position)


class ModuleWatcher:
    """The hooks of one module.

    Its series are named when a tensor is first seen, since nobody knows before how many there are.
    """

    def __init__(self, module: nn.Module, name: str, chunk: int, wanted: ModuleSelection, collector: ModuleCollector) -> None:
        self._module = module
        self._name = name
        self._chunk = chunk
        self._wanted = wanted
        self._micro_steps = tuple(range(collector.clock.micro_steps))
        self._collector = collector
        self._recorder = collector.recorder
        self._clock = collector.clock
        self._watched: dict[tuple[str, str, int], Watched] = {}
        self._calls: dict[int, Calls] = {}
        self._open: list[Call | None] = []
        self._wants_grads = wanted.input_grad.wanted or wanted.output_grad.wanted

    def attach(self, hooks: HookSet) -> None:
        """Register the forward pre-hook and the forward hook."""
        guarded = self._collector.failures.guarded
        before = ModuleHook(guarded(f"reading the inputs of {self._name!r}", self._before, ADVICE))
        after = ModuleHook(guarded(f"reading the outputs of {self._name!r}", self._after, ADVICE))
        hooks.add(self._module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.add(self._module.register_forward_hook(after, with_kwargs=True))

    def forget_step(self) -> None:
        """Let go of what belongs to the step that has ended (calls that raised have left theirs open)."""
        self._calls.clear()
        self._open.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._recorder.active:
            return
        call = self._begin(module)
        self._open.append(call)
        if call is None or not (call.records_forward or self._wants_grads):
            return
        leaves = input_leaves(args, kwargs)
        found = len(args) + len(kwargs)
        if call.records_forward and self._wanted.input.wanted:
            self._record_forward("input", self._fitting("input", self._wanted.input, found), leaves, call)
        if self._wanted.input_grad.wanted and torch.is_grad_enabled():
            choice = self._fitting("input_grad", self._wanted.input_grad, found)
            call.targets = {gradient_target(leaf.tensor): leaf.suffix for leaf in _differentiable(choice, leaves)}
            call.start = sequence_nr()

    def _after(self, _module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        if not self._open:
            return
        call = self._open.pop()
        if call is None or not self._recorder.active:
            return
        leaves = output_leaves(result)
        if call.records_forward and self._wanted.output.wanted:
            self._record_forward("output", self._fitting("output", self._wanted.output, length(result)), leaves, call)
        if self._wants_grads and torch.is_grad_enabled():
            self._watch_gradients(call, leaves, length(result))

    def _begin(self, module: nn.Module) -> Call | None:
        """The call that begins now; None if nothing of it is to be recorded."""
        if not module.training or not self._collector.tracking[self._chunk]:
            return None
        again = recomputing()
        micro_step = (self._clock.backward_micro_step if again else self._clock.micro_step)(self._chunk)
        calls = self._calls.setdefault(micro_step, Calls())
        if not again:
            calls.begun += 1
            return Call(micro_step, calls.begun - 1, records_forward=True)
        if calls.with_graph:
            return None
        return Call(micro_step, -1, records_forward=False)

    def _record_forward(self, direction: str, choice: TensorChoice, leaves: list[Leaf], call: Call) -> None:
        for leaf in leaves:
            if choice.takes(leaf.position):
                watched = self._series("actv", direction + leaf.suffix, call.index)
                self._recorder.record(watched, leaf.tensor, call.micro_step)

    def _watch_gradients(self, call: Call, leaves: list[Leaf], found: int) -> None:
        outputs = [leaf for leaf in leaves if leaf.tensor.requires_grad]
        if not outputs:
            return
        place = self._place_of(call)
        if self._wanted.output_grad.wanted:
            for leaf in _differentiable(self._fitting("output_grad", self._wanted.output_grad, found), outputs):
                self._watch_tensor(leaf.tensor, self._writer("output" + leaf.suffix, call, place))
        if call.targets:
            self._watch_inputs(call, [leaf.tensor for leaf in outputs], place)

    def _place_of(self, call: Call) -> Callable[[], int]:
        calls = self._calls.setdefault(call.micro_step, Calls())
        if call.records_forward:
            calls.with_graph = True
            return lambda: call.index
        node = torch._C._current_autograd_node()
        return calls.recomputed(-1 if node is None else node._sequence_nr())

    def _watch_inputs(self, call: Call, outputs: list[Tensor], place: Callable[[], int]) -> None:
        passed = {gradient_target(t): t for t in outputs}
        through = call.targets.keys() & passed.keys()
        for target in through:
            self._watch_tensor(passed[target], self._writer("input" + call.targets[target], call, place))
        inside = call.targets.keys() - through
        if not inside:
            return
        for target, edges in producers(outputs, inside, call.start).items():
            if edges:
                handles = watch(target, edges, self._writer("input" + call.targets[target], call, place))
                if _outlives_the_graph(target):
                    self._collector.until_step_ends(handles)

    def _watch_tensor(self, tensor: Tensor, write: Callable[[Tensor], None]) -> None:
        handle: Removable = tensor.register_hook(write)
        if tensor.grad_fn is None:
            self._collector.until_step_ends([handle])

    def _writer(self, slot: str, call: Call, place: Callable[[], int]) -> Callable[[Tensor], None]:
        step, micro_step = self._clock.step, call.micro_step

        def write(gradient: Tensor) -> None:
            if self._collector.belongs(step):
                self._recorder.record(self._series("actv_grad", slot, place()), gradient, micro_step)

        guarded: Callable[[Tensor], None] = self._collector.failures.guarded(
            f"reading gradients of {self._name!r}", write, ADVICE
        )
        return guarded

    def _series(self, kind: str, slot: str, call: int) -> Watched:
        watched = self._watched.get((kind, slot, call))
        if watched is None:
            name = f"{self._name}.{slot}" + (f"#{call}" if call else "")
            watched = self._watched[kind, slot, call] = Watched(Series(kind, self._chunk, name), self._micro_steps)
        return watched

    def _fitting(self, slot: str, choice: TensorChoice, found: int) -> TensorChoice:
        """The choice, or everything where a target counts on another number of tensors than the call has."""
        if choice.length is None or choice.length == found:
            return choice
        message = f"targets counts on {choice.length} elements in {slot} of {self._name!r} and there are {found}."
        self._collector.failures.warn(f"length of {self._name}.{slot}", f"{message} All of them are recorded.")
        return TensorChoice(wanted=True, length=None, index=None)


class ModuleCollector:
    """All watched modules of one attachment, and the root hooks that tell micro-steps apart.

    Attributes:
        tracking: For each chunk, whether calls count: off during a root forward that trains nothing (evaluation, no_grad).
    """

    def __init__(self, recorder: Recorder, clock: Clock, failures: Failures) -> None:
        self.recorder = recorder
        self.clock = clock
        self.failures = failures
        self.tracking = [True] * clock.chunks
        self._watchers: list[ModuleWatcher] = []
        self._root_hooks = HookSet()
        self._hooks = HookSet()
        self._until_step_ends = HookSet()

    def watch_root(self, chunk: int, root: nn.Module) -> None:
        """Count the micro-steps of a chunk by its root's forwards. To be called before ``watch`` of the same root."""
        advice = "Micro-steps may be miscounted."
        before = self.failures.guarded("counting micro-steps", partial(self._root_begins, chunk), advice)
        after = self.failures.guarded("following the backward of the model", partial(self._root_ends, chunk), advice)
        self._root_hooks.add(root.register_forward_pre_hook(ModuleHook(before), with_kwargs=True))
        self._root_hooks.add(root.register_forward_hook(ModuleHook(after), with_kwargs=True))

    def watch(self, chunk: int, name: str, module: nn.Module, wanted: ModuleSelection) -> None:
        watcher = ModuleWatcher(module, name, chunk, wanted, self)
        watcher.attach(self._hooks)
        self._watchers.append(watcher)

    def until_step_ends(self, handles: list[Any]) -> None:
        """Hooks on leaves, which outlive the graph."""
        for handle in handles:
            self._until_step_ends.add(handle)

    def belongs(self, step: int) -> bool:
        """Whether a gradient of ``step`` arrives in time. One that comes after its step was sealed has no row any more."""
        if self.clock.step != step:
            self.failures.warn("late gradients", "A backward ran after its optimizer step: its gradients are not recorded.")
            return False
        return self.recorder.active

    def end_step(self) -> None:
        self._until_step_ends.remove()
        for watcher in self._watchers:
            watcher.forget_step()

    def unwatch(self) -> None:
        """Take the hooks of all modules away; micro-steps are still counted."""
        self._hooks.remove()
        self.end_step()
        self._watchers.clear()

    def remove(self) -> None:
        """Take every hook away."""
        self.unwatch()
        self._root_hooks.remove()

    def _root_begins(self, chunk: int, root: nn.Module, _args: Any, _kwargs: Any) -> None:
        if not self.recorder.active or recomputing():
            return
        self.tracking[chunk] = root.training and torch.is_grad_enabled()
        if self.tracking[chunk]:
            self.clock.forward[chunk] += 1
            self._check_micro_step(self.clock.forward[chunk])

    def _root_ends(self, chunk: int, _root: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        if self.tracking[chunk] and torch.is_grad_enabled() and not recomputing():
            begins = partial(self._backward_begins, chunk, self.clock.forward[chunk])
            for leaf in output_leaves(result):
                if leaf.tensor.requires_grad and leaf.tensor.grad_fn is not None:
                    leaf.tensor.register_hook(begins)
        self.tracking[chunk] = True

    def _backward_begins(self, chunk: int, micro_step: int, _gradient: Tensor) -> None:
        self.clock.backward[chunk] = micro_step

    def _check_micro_step(self, micro_step: int) -> None:
        if micro_step == self.clock.micro_steps:
            said = f"grad_acc_steps is {self.clock.micro_steps}, but step {self.clock.step} has more root forwards."
            self.failures.warn("more micro-steps", f"{said} Their numbering goes on; pass the true number to set_monitor.")


def _differentiable(choice: TensorChoice, leaves: list[Leaf]) -> list[Leaf]:
    return [leaf for leaf in leaves if leaf.tensor.requires_grad and choice.takes(leaf.position)]


def _outlives_the_graph(target: Target) -> bool:
    return target[0].name().endswith("AccumulateGrad")
