"""Records activations and their gradients by hooks on modules, and counts micro-steps by the forwards of the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, Protocol

from monitor.failures import Failures
from monitor.recording.backend import RecordingBackend, Target
from monitor.recording.dataflow import SeenModule
from monitor.recording.following import follow_inputs, follow_result, on_several_threads, slots_of
from monitor.recording.gradient_edges import SeveralThreadsError
from monitor.recording.protocols import CallIndex, Calls, HookSet, Removable
from monitor.recording.recorder import RecordedSeries, Recorder
from monitor.recording.step_clock import Clock
from monitor.recording.tensor_paths import HiddenError, TensorPath, hidden_result
from monitor.selection import ModuleSelection, TensorChoice
from monitor.series import Series

ADVICE = "The rows of this module are missing."


@dataclass(slots=True)
class ModuleCall:
    """One call of a module, between its pre-hook and its forward hook.

    Attributes:
        start: Autograd sequence number before the call. Nodes created during the call have this number or a later one.
        targets: The targets of the recorded input gradients, and the names of their rows.
    """

    place: CallIndex
    records_forward: bool
    start: int = 0
    targets: Mapping[Target, str] = field(default_factory=dict)


class OpenRoot(NamedTuple):
    """A root forward that has begun.

    Attributes:
        tracked: Whether it is part of training.
        handled: The exception being handled when it began: a loop may retry in its ``except`` clause.
    """

    tracked: bool
    handled: BaseException | None


class CallsOfStep(Protocol):
    """Counts a module's calls in the step in progress."""

    def forget_step(self) -> None:
        """Drop the data of the step that has ended."""

    def restart(self, chunk: int, micro_step: int) -> None:
        """The root's forward failed: count the calls of the micro-step from 0 again."""


class ModuleWatcher:
    """The hooks of one module.

    Its series are created when a tensor is first seen, since the number of tensors is unknown before.

    Attributes:
        is_attached: Whether gradients are still recorded. Hooks on a graph exist as long as the graph.
    """

    def __init__(self, module: Any, name: str, chunk: int, wanted: ModuleSelection, collector: ModuleCollector) -> None:
        self._module = module
        self._name = name
        self._chunk = chunk
        self._wanted = wanted
        self._micro_steps = tuple(range(collector.clock.micro_steps))
        self._collector = collector
        self._backend, self._graph = collector.backend, collector.backend.graph
        self._leaves = collector.backend.leaves
        self._recorder = collector.recorder
        self._clock = collector.clock
        self._watched: dict[tuple[str, str, int], RecordedSeries] = {}
        self._calls: Calls | None = None
        self._open: dict[int, list[ModuleCall | None]] = {}
        self.is_attached = True
        self._wants_grads = wanted.input_grad.wanted or wanted.output_grad.wanted

    def attach(self, hooks: HookSet) -> None:
        """Register the forward pre-hook and the forward hook."""
        guarded = self._collector.failures.guarded
        before = guarded("reading the inputs", self._before, ADVICE, of=self._name)
        after = guarded("reading the outputs", self._after, ADVICE, of=self._name)
        hooks.add(self._backend.before_forward(self._module, before))
        hooks.add(self._backend.after_forward(self._module, after, always=True))

    def forget_step(self) -> None:
        """Drop the data of the step that has ended."""
        self._calls = None
        self._open.clear()

    def seen(self) -> SeenModule:
        return SeenModule(self._chunk, self._name, self._watched)

    def restart(self, chunk: int, micro_step: int) -> None:
        """The root's forward failed: count the calls of the micro-step from 0 again."""
        if chunk == self._chunk and self._calls is not None:
            self._calls.restart(micro_step)
            self._open.clear()

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A replica of the module shares the hooks and runs on its own thread. Its calls do not count.
        if not self._recorder.active:
            return
        thread = get_ident()
        if not self._backend.repeating():  # a recomputation may run on a thread of the device
            self._collector.threads.add(thread)
        if module is not self._module:
            return
        call = self._begin(module)
        self._open.setdefault(thread, []).append(call)
        if call is None:
            return
        leaves = self._leaves.inputs(args, kwargs)
        found = len(args) + len(kwargs)
        if call.records_forward and self._wanted.input.wanted:
            self._record_forward("input", self._fitting("input", self._wanted.input, found), leaves, call)
        if self._wants_grads and self._graph.recording():
            if self._wanted.input_grad.wanted:
                choice = self._fitting("input_grad", self._wanted.input_grad, found)
                inputs = [(leaf.tensor, "input" + leaf.suffix, choice.takes(leaf.position)) for leaf in leaves]
                call.targets = slots_of(self._graph, inputs, "input_")
            call.start = self._graph.sequence_nr()

    def _after(self, module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        """Called after forward, without a result if it raised."""
        opened = self._open.get(get_ident())
        if not opened or module is not self._module:
            return
        call = opened.pop()
        leaves = self._leaves.outputs(result)
        if call is None or not leaves or not self._recorder.active:
            return
        found = self._leaves.length(result)
        if call.records_forward and self._wanted.output.wanted:
            self._record_forward("output", self._fitting("output", self._wanted.output, found), leaves, call)
        if self._wants_grads and self._graph.recording():
            self._watch_gradients(call, leaves, found, result)

    def _begin(self, module: Any) -> ModuleCall | None:
        """The call that begins now; None if it is not recorded."""
        if not self._collector.counts(self._chunk, module):
            return None
        if self._calls is None:
            self._calls = self._backend.new_calls()
            self._collector.remember(self)
        if not self._backend.repeating():
            return ModuleCall(self._calls.begin(self._clock.micro_step(self._chunk)), records_forward=True)
        place = self._calls.repeat()
        return None if place is None else ModuleCall(place, records_forward=False)

    def _record_forward(self, direction: str, choice: TensorChoice, leaves: list[TensorPath], call: ModuleCall) -> None:
        for leaf in leaves:
            if choice.takes(leaf.position):
                watched = self._series("actv", direction + leaf.suffix, call.place.call, leaf.tensor)
                self._recorder.record(watched, leaf.tensor, call.place.micro_step)

    def _watch_gradients(self, call: ModuleCall, leaves: list[TensorPath], found: int, result: Any) -> None:
        outputs = [leaf for leaf in leaves if self._graph.requires_grad(leaf.tensor)]
        handles: list[Removable] = []
        if self._wanted.output_grad.wanted:
            for leaf in self._differentiable(self._fitting("output_grad", self._wanted.output_grad, found), outputs):
                write = self._result_writer(leaf, call)
                handles += follow_result(self._graph, leaf.tensor, call.start, write)
        if call.targets:
            writer = partial(self._writer, place=call.place)
            results = self._all_results(outputs, result)
            handles += self._follow_inputs(call, results, writer)
        self._collector.until_step_ends(handles)

    def _follow_inputs(
        self, call: ModuleCall, results: list[Any], writer: Callable[[str], Callable[[Any], None]]
    ) -> list[Removable]:
        others_call = len(self._collector.threads) > 1
        try:
            return follow_inputs(self._graph, call.targets, call.start, results, writer, others_call=others_call)
        except SeveralThreadsError:
            self._collector.failures.warn("operations of several threads", on_several_threads(self._name))
            return []

    def _result_writer(self, leaf: TensorPath, call: ModuleCall) -> Callable[[Any], None]:
        write = self._writer("output" + leaf.suffix, call.place)
        if self._graph.made_since(leaf.tensor, 0):
            return write
        micro_step, micro_steps = call.place.micro_step, self._collector.micro_steps_of(leaf.tensor)
        micro_steps.add(micro_step)

        def write_own(gradient: Any) -> None:  # backwards of other micro-batches reach a parameter as well
            if self._collector.runs_backward_of(self._chunk, micro_step, micro_steps):
                write(gradient)

        return write_own

    def _all_results(self, outputs: list[TensorPath], result: Any) -> list[Any]:
        """All tensors with a gradient in the result of a call. Empty if some cannot be found: the gradients of inputs would
        then be too small, and are not recorded.
        """
        results = [leaf.tensor for leaf in outputs]
        try:
            held = self._leaves.held(result)
        except HiddenError as error:
            self._collector.failures.warn("hidden results", hidden_result(self._name, error))
            return []
        known = {id(x) for x in results}
        return results + [x for x in held if id(x) not in known and self._graph.requires_grad(x)]

    def _writer(self, slot: str, place: CallIndex) -> Callable[[Any], None]:
        step, (micro_step, number) = self._clock.step, place

        def write(gradient: Any) -> None:
            # A function may return no gradient for an input. Hooks then receive None.
            if gradient is not None and self.is_attached and self._collector.belongs(step):
                self._recorder.record(self._series("actv_grad", slot, number, gradient), gradient, micro_step)

        guarded: Callable[[Any], None] = self._collector.failures.guarded(
            "reading gradients of activations", write, ADVICE, of=self._name
        )
        return guarded

    def _series(self, kind: str, slot: str, call: int, seen: Any) -> RecordedSeries:
        watched = self._watched.get((kind, slot, call))
        if watched is None:
            name = f"{self._name}.{slot}" + (f"#{call}" if call else "")
            watched = self._watched[kind, slot, call] = RecordedSeries(Series(kind, self._chunk, name), self._micro_steps)
            self._recorder.table.series.place(watched.series, self._backend.activation_placement(seen))
        return watched

    def _differentiable(self, choice: TensorChoice, leaves: list[TensorPath]) -> list[TensorPath]:
        return [leaf for leaf in leaves if self._graph.requires_grad(leaf.tensor) and choice.takes(leaf.position)]

    def _fitting(self, slot: str, choice: TensorChoice, found: int) -> TensorChoice:
        """The choice; all tensors if a target expects another number of tensors than the call has."""
        if choice.length is None or choice.length == found:
            return choice
        message = f"targets expects {choice.length} elements in {slot} of {self._name!r}, but there are {found}."
        advice = "All of them are recorded. Correct the number in targets."
        self._collector.failures.warn(f"length of {self._name}.{slot}", f"{message} {advice}")
        return TensorChoice(wanted=True, length=None, index=None)


class ModuleCollector:
    """All watched modules of one attachment, and the root hooks that count micro-steps.

    Attributes:
        tracking: For each chunk, whether calls count. Off during a root forward outside training (evaluation, no_grad, the
            shape inference of a pipeline stage).
        threads: The threads that have called modules in this step.
    """

    def __init__(self, recorder: Recorder, clock: Clock, failures: Failures, backend: RecordingBackend) -> None:
        self.backend = backend
        self.recorder = recorder
        self.clock = clock
        self.failures = failures
        self.tracking = [True] * clock.chunks
        self.threads: set[int] = set()
        self._roots: dict[int, Any] = {}
        self._open_roots: list[list[OpenRoot]] = [[] for _ in range(clock.chunks)]
        self._watchers: list[ModuleWatcher] = []
        self._called: list[CallsOfStep] = []
        self._leaves: dict[Target, set[int]] = {}
        self._pass: int | None = None
        self._begun_in_pass: set[tuple[int, int]] = set()
        self._root_hooks = HookSet()
        self._hooks = HookSet()
        self._until_step_ends = HookSet()

    def watch_root(self, chunk: int, root: Any) -> None:
        """Count the micro-steps of a chunk by its root's forwards. Must be called before ``watch`` of the same root."""
        if not self.backend.takes_hooks(root):
            return
        advice = "Micro-steps may be miscounted."
        self._roots[chunk] = root
        before = self.failures.guarded("counting micro-steps", partial(self._root_begins, chunk), advice)
        after = self.failures.guarded("following the backward of the model", partial(self._root_ends, chunk), advice)
        self._hook_root(chunk, root, before, after)

    def watch(self, chunk: int, name: str, module: Any, wanted: ModuleSelection) -> None:
        if not self.backend.takes_hooks(module):
            said = f"{name!r} is a {type(module).__name__}, which takes no hooks. Its activations are not recorded."
            self.failures.warn("modules without hooks", said)
            return
        watcher = self._new_watcher(module, name, chunk, wanted)
        watcher.attach(self._hooks)
        self._watchers.append(watcher)

    def _new_watcher(self, module: Any, name: str, chunk: int, wanted: ModuleSelection) -> ModuleWatcher:
        return ModuleWatcher(module, name, chunk, wanted, self)

    def _hook_root(self, _chunk: int, root: Any, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._root_hooks.add(self.backend.before_forward(root, before))
        self._root_hooks.add(self.backend.after_forward(root, after, always=True))

    def until_step_ends(self, handles: list[Removable]) -> None:
        """Keep handles of hooks on tensors that may outlive the step, such as leaves, and remove them when the step ends."""
        for handle in handles:
            self._until_step_ends.add(handle)

    def counts(self, chunk: int, module: Any) -> bool:
        """Whether a call of a module that begins now belongs to training. The call may be a recomputation."""
        return self.tracking[chunk] and self.backend.trains(module)

    def remember(self, watcher: CallsOfStep) -> None:
        """Register a watcher whose module is called for the first time in this step."""
        self._called.append(watcher)

    def belongs(self, step: int) -> bool:
        """Whether a gradient of ``step`` arrives in time. After its step was sealed, a gradient has no row."""
        if self.clock.step != step:
            self.failures.warn("late gradients", "A backward ran after its optimizer step. Its gradients are not recorded.")
            return False
        return self.recorder.active

    def micro_steps_of(self, leaf: Any) -> set[int]:
        """The micro-steps of this step in which a leaf tensor was a result."""
        return self._leaves.setdefault(self.backend.graph.gradient_target(leaf), set())

    def runs_backward_of(self, chunk: int, micro_step: int, among: Collection[int]) -> bool:
        """Whether the backward in progress belongs only to ``micro_step``.

        Args:
            among: The micro-steps to which it may belong.
        """
        if self._pass == self.backend.graph.current_pass():
            return {begun for begun in self._begun_in_pass if begun[0] == chunk} == {(chunk, micro_step)}
        # No result of the root showed which micro-step the backward belongs to.
        return len(among) == 1 or (self.clock.backward[chunk] < 0 and self.clock.forward[chunk] == micro_step)

    def seen(self) -> list[SeenModule]:
        """The modules that were called in this step, in the order of their first calls, with their series."""
        return [watcher.seen() for watcher in self._called if isinstance(watcher, ModuleWatcher)]

    def end_step(self) -> None:
        self._until_step_ends.remove()
        self.threads.clear()
        for calls in self._open_roots:
            calls.clear()
        for watcher in self._called:
            watcher.forget_step()
        self._called.clear()
        self._leaves.clear()

    def unwatch(self) -> None:
        """Remove the hooks of all modules. Micro-steps are still counted."""
        self._hooks.remove()
        self.end_step()
        for watcher in self._watchers:
            watcher.is_attached = False
        self._watchers.clear()

    def remove(self) -> None:
        """Remove every hook."""
        self.unwatch()
        self._root_hooks.remove()

    def _root_begins(self, chunk: int, root: Any, _args: Any, _kwargs: Any) -> None:
        if not self.recorder.active or self.backend.repeating() or root is not self._roots[chunk]:
            return
        self.threads.add(get_ident())
        self.tracking[chunk] = self.backend.root_trains(root)
        if self.tracking[chunk] and not self._in_tracked_root(chunk):
            self.clock.forward_begins(chunk)
            self.recorder.micro_step_begins(chunk, self.clock.micro_steps)
            self._check_micro_step(self.clock.forward[chunk])
        self._open_roots[chunk].append(OpenRoot(self.tracking[chunk], sys.exc_info()[1]))

    def _in_tracked_root(self, chunk: int) -> bool:
        """Whether a training forward of the root is open. A nested one does not begin a micro-step: Lightning runs a training
        step as the forward of its module, which calls the module again.
        """
        return any(call.tracked for call in self._open_roots[chunk])

    def _root_ends(self, chunk: int, root: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        """Called after the root's forward. If it raised, the exception is being handled."""
        if not self._open_roots[chunk] or self.backend.repeating() or root is not self._roots[chunk]:
            return
        call = self._open_roots[chunk].pop()
        self.tracking[chunk] = self._open_roots[chunk][-1].tracked if self._open_roots[chunk] else True
        if not call.tracked:
            return
        if sys.exc_info()[1] is call.handled:
            self._follow_backward(chunk, result)
        elif not self._in_tracked_root(chunk):
            self._restart_micro_step(chunk)

    def _follow_backward(self, chunk: int, result: Any) -> None:
        begins = partial(self._backward_begins, chunk, self.clock.forward[chunk])
        for leaf in self.backend.leaves.outputs(result):
            self.backend.graph.backward_begins(leaf.tensor, begins)

    def _restart_micro_step(self, chunk: int) -> None:
        """Undo a micro-step whose forward failed. If the loop continues, the next forward takes its number."""
        micro_step = self.clock.forward[chunk]
        self.clock.forward[chunk] -= 1
        for watcher in self._called:
            watcher.restart(chunk, micro_step)

    def _backward_begins(self, chunk: int, micro_step: int, _gradient: Any) -> None:
        self.clock.backward[chunk] = micro_step
        if self._pass != (now := self.backend.graph.current_pass()):
            self._pass = now
            self._begun_in_pass.clear()
        self._begun_in_pass.add((chunk, micro_step))

    def _check_micro_step(self, micro_step: int) -> None:
        if micro_step == self.clock.micro_steps and self.clock.known:
            said = f"grad_acc_steps is {self.clock.micro_steps}, but step {self.clock.step} has more root forwards."
            advice = "Pass the true number to set_monitor, and call batch_ended() after a batch that failed or was skipped."
            self.failures.warn("more micro-steps", f"{said} They get the next micro-step numbers. {advice}")
