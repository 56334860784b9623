"""Records activations and their gradients by hooks on modules, and counts micro-steps by the forwards of the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Final, Protocol, final

from monitor.failures import Failures
from monitor.recording.backend import HookSet, RecordingBackend, Removable, Target
from monitor.recording.gradient_edges import SeveralThreadsError, follow_inputs, follow_result, on_several_threads, slots_of
from monitor.recording.module_calls import ADVICE, ALL, NOTHING, Calls, GradientGate, Left, ModuleCall, Repetitions
from monitor.recording.recorder import RecordedSeries, Recorder, SeenModule
from monitor.recording.step_clock import Clock, RootForwards
from monitor.recording.tensor_paths import HiddenError, TensorPath, hidden_result
from monitor.selection import ModuleSelection, TensorChoice
from monitor.series import Series

MOST_FORWARDS: Final = 1024
"""Training forwards of a step that have rows, if the step was not said to have more."""


class CallsOfStep(Protocol):
    """Counts a module's calls in the step in progress."""

    def forget_step(self) -> None:
        """Drop the data of the step that has ended."""

    def restart(self, chunk: int, micro_step: int) -> None:
        """The root's forward failed: count the calls of the micro-step from 0 again."""


class CallHooks(Protocol):
    """Hooks the modules of one ``ModuleCollector``. The adapter that a framework implements."""

    @property
    def is_running(self) -> Callable[[Any, int], bool] | None:
        """Whether that many calls of a root are on the stack. None if hooks are called after a forward that raised, too."""

    def is_alone(self, root: Any) -> bool:
        """Whether the call of a root that begins now is known to be its only one on the stack. An earlier one may have ended
        without a hook.
        """

    def hook_module(
        self, watcher: ModuleWatcher, before: Callable[..., None], after: Callable[..., None], hooks: HookSet
    ) -> Callable[[], None] | None:
        """Call ``before`` and ``after`` around each forward of a module, and add each handle to ``hooks`` at once.

        Returns:
            A function that drops the data of a step that has ended; None if the hooks keep no data.
        """

    def hook_root(self, chunk: int, root: Any, before: Callable[..., None], after: Callable[..., None], hooks: HookSet) -> None:
        """Likewise for the root of a chunk."""

    def root_trains(self, root: Any | None) -> bool:
        """Whether a forward of the whole model that begins now is part of training, or, with None, a call of a module that is
        in no such forward.
        """

    def backward_begins(self, x: Any, call: Callable[[Any], None]) -> None:
        """Call ``call`` when a backward reaches the result ``x`` of a forward, if a backward can start from ``x``."""

    def repetitions(self) -> Repetitions:
        """Recognises repeated calls of one module, step by step."""

    def end_step(self) -> None:
        """Drop the data of the step that has ended."""

    def remove(self) -> None:
        """The collector has removed its hooks."""


@final
class ModuleWatcher:
    """The hooks of one module.

    Its series are created when a tensor is first seen, since the number of tensors is unknown before.

    Attributes:
        calls: Counts the calls in the step in progress.
        open_calls: The calls that have begun and not ended, by thread. None is a call that is not recorded.
    """

    def __init__(self, module: Any, name: str, chunk: int, wanted: ModuleSelection, collector: ModuleCollector) -> None:
        self.module = module
        self.name = name
        self.chunk = chunk
        self.wanted = wanted
        self.collector = collector
        self._micro_steps = tuple(range(collector.clock.micro_steps))
        self._graph, self._leaves = collector.backend.autograd, collector.backend.tensors.paths
        self._recording, self._sequence_nr = self._graph.recording, self._graph.sequence_nr
        self._repeating, self._threads = collector.backend.modules.repeating, collector.threads
        self._recorder, self._due = collector.recorder, collector.due
        self._clock = collector.clock
        self._watched: dict[tuple[str, str, int], RecordedSeries] = {}
        self.calls = Calls(collector.repetitions())
        self._was_called = False
        self.open_calls: dict[int, list[ModuleCall | None]] = {}
        self._wants_grads = wanted.input_grad.wanted or wanted.output_grad.wanted
        self._forget: Callable[[], None] | None = None
        self._gate = collector.gate
        self._plans = collector.backend.factories.new_plans(self)

    def attach(self, adapter: CallHooks, hooks: HookSet) -> None:
        """Register the forward pre-hook and the forward hook."""
        guarded = self.collector.failures.guarded
        before = guarded("reading the inputs", self._before, ADVICE, of=self.name)
        after = guarded("reading the outputs", self._after, ADVICE, of=self.name)
        self._forget = adapter.hook_module(self, before, after, hooks)

    def forget_step(self) -> None:
        """Drop the data of the step that has ended."""
        self._was_called = False
        self.calls.forget_step()
        self.open_calls.clear()
        if self._forget is not None:
            self._forget()

    def seen(self) -> SeenModule:
        return SeenModule(self.chunk, self.name, self._watched)

    def restart(self, chunk: int, micro_step: int) -> None:
        """The root's forward failed: count the calls of the micro-step from 0 again."""
        if chunk == self.chunk:
            self.calls.restart(micro_step)
            self.open_calls.clear()

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A replica of the module shares the hooks and runs on its own thread. Its calls do not count.
        if not self._due.now:
            return
        thread, repeating = get_ident(), self._repeating()
        if not repeating:  # a recomputation may run on a thread of the device
            self._threads.add(thread)
        if module is not self.module:
            return
        call = self.begin(repeating=repeating)
        opened = self.open_calls.get(thread)
        if opened is None:
            opened = self.open_calls[thread] = []
        opened.append(call)
        self.collector.depth += 1
        if call is None:
            return
        graph = self._wants_grads and self._recording()
        left = ALL if self._plans is None else self._plans.begin(call, args, kwargs, graph=graph)
        if left is not NOTHING:
            self._begin_call(call, args, kwargs, left, graph=graph)
        if graph:
            call.start = self._sequence_nr()

    def _after(self, module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        """Called after forward, without a result if it raised."""
        opened = self.open_calls.get(get_ident())
        if not opened or module is not self.module:
            return
        call = opened.pop()
        if call is not None and self._due.now:
            graph = self._wants_grads and self._recording()
            left = ALL if self._plans is None else self._plans.end(call, result, graph=graph)
            if left is not NOTHING:
                self._end_call(call, result, left, graph=graph)
        self.collector.call_ended()

    def begin(self, *, repeating: bool) -> ModuleCall | None:
        """The call that begins now; None if it is not recorded.

        Args:
            repeating: Whether it is a recomputation.
        """
        if not self.collector.counts(self.chunk, self.module):
            return None
        if not self._was_called:
            self._was_called = True
            self.collector.remember(self)
        if not repeating:
            return ModuleCall(self.calls.begin(self.collector.forwards[self.chunk].micro_step), True)
        place = self.calls.repeat()
        return None if place is None else ModuleCall(place, False)

    def _begin_call(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], left: Left, *, graph: bool
    ) -> None:
        leaves, found = self._leaves.inputs(args, kwargs), len(args) + len(kwargs)
        if left.rows and call.records_forward and self.wanted.input.wanted:
            self._record_forward("input", self.fitting("input", self.wanted.input, found), leaves, call)
        if left.gradients and graph and self.wanted.input_grad.wanted:
            choice = self.fitting("input_grad", self.wanted.input_grad, found)
            inputs = [(leaf.tensor, "input" + leaf.suffix, choice.takes(leaf.position)) for leaf in leaves]
            names = slots_of(self._graph, inputs, "input_")
            call.targets = {at: self.expected("actv_grad", name, call.place.call) for at, name in names.items()}

    def _end_call(self, call: ModuleCall, result: Any, left: Left, *, graph: bool) -> None:
        leaves, found = self._leaves.outputs(result), self._leaves.length(result)
        if left.rows and call.records_forward and self.wanted.output.wanted:
            self._record_forward("output", self.fitting("output", self.wanted.output, found), leaves, call)
        if not graph:
            return
        outputs = [leaf for leaf in leaves if self._graph.requires_grad(leaf.tensor)]
        if left.gradients and self.wanted.output_grad.wanted:
            choice = self.fitting("output_grad", self.wanted.output_grad, found)
            self._watch_results([leaf for leaf in outputs if choice.takes(leaf.position)], call)
        if left.inputs and call.targets:
            self.collector.until_step_ends(self._follow_inputs(call, call.targets, outputs, result))

    def _record_forward(self, direction: str, choice: TensorChoice, leaves: list[TensorPath], call: ModuleCall) -> None:
        for leaf in leaves:
            if choice.takes(leaf.position):
                watched = self.series("actv", direction + leaf.suffix, call.place.call, leaf.tensor)
                self._recorder.record(watched, leaf.tensor, call.place.micro_step)

    def _watch_results(self, outputs: list[TensorPath], call: ModuleCall) -> None:
        for leaf in outputs:
            write = self._result_writer(leaf, call)
            self.collector.until_step_ends(follow_result(self._graph, leaf.tensor, call.start, write))

    def _follow_inputs(
        self, call: ModuleCall, targets: Mapping[Target, RecordedSeries], outputs: list[TensorPath], result: Any
    ) -> list[Removable]:
        others_call, writer = len(self._threads) > 1, partial(self._writer, micro_step=call.place.micro_step)
        results = self._all_results(outputs, result)
        try:
            return follow_inputs(self._graph, targets, call.start, results, writer, others_call=others_call)
        except SeveralThreadsError:
            self.collector.failures.warn("operations of several threads", on_several_threads(self.name))
            return []

    def _result_writer(self, leaf: TensorPath, call: ModuleCall) -> Callable[[Any], None]:
        (micro_step, number), slot = call.place, "output" + leaf.suffix
        write = self._writer(self.expected("actv_grad", slot, number), micro_step)
        if self._graph.made_since(leaf.tensor, 0):
            return write
        micro_steps = self.collector.micro_steps_of(leaf.tensor)
        micro_steps.add(micro_step)

        def write_own(gradient: Any) -> None:  # backwards of other micro-batches reach a parameter as well
            if self.collector.runs_backward_of(self.chunk, micro_step, micro_steps):
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
            self.collector.failures.warn("hidden results", hidden_result(self.name, error))
            return []
        known = {id(x) for x in results}
        return results + [x for x in held if id(x) not in known and self._graph.requires_grad(x)]

    def _writer(self, watched: RecordedSeries, micro_step: int) -> Callable[[Any], None]:
        gate, step = self._gate, self._clock.step

        def write(gradient: Any) -> None:
            # A function may return no gradient for an input. Hooks then receive None.
            if gradient is not None and gate.attached:
                gate.take(watched, gradient, step, micro_step)

        return write

    def expected(self, kind: str, slot: str, call: int) -> RecordedSeries:
        """The series of one tensor of a call, which may not be there yet."""
        watched = self._watched.get((kind, slot, call))
        if watched is None:
            name = f"{self.name}.{slot}" + (f"#{call}" if call else "")
            watched = self._watched[kind, slot, call] = RecordedSeries(Series(kind, self.chunk, name), self._micro_steps)
        return watched

    def series(self, kind: str, slot: str, call: int, seen: Any) -> RecordedSeries:
        """The series of one tensor of a call, which is there."""
        watched = self._watched.get((kind, slot, call))
        if watched is None or not watched.slots:  # it has no rows yet
            watched = self.expected(kind, slot, call)
            self._gate.place(watched, seen)
        return watched

    def fitting(self, slot: str, choice: TensorChoice, found: int) -> TensorChoice:
        """The choice; all tensors if a target expects another number of tensors than the call has."""
        if choice.length is None or choice.length == found:
            return choice
        wanted = f"{choice.length} element{'' if choice.length == 1 else 's'}"
        message = f"targets expects {wanted} in {slot} of {self.name!r}, but there {'is' if found == 1 else 'are'} {found}."
        advice = "All of them are recorded. Correct the number in targets."
        self.collector.failures.warn(f"length of {self.name}.{slot}", f"{message} {advice}")
        return TensorChoice(wanted=True, length=None, index=None)


@final
class ModuleCollector:
    """All watched modules of one attachment, and the root hooks that count micro-steps.

    Attributes:
        forwards: The forwards of each chunk that are under way.
        threads: The threads that have called modules in this step.
        roots: The roots by chunk.
        due: Whether activations are recorded in the step in progress.
        repetitions: Creates the ``Repetitions`` of one module.
        gate: Takes the gradients of the modules that are watched now.
        depth: Number of watched calls in progress.
        nodes: What ``CallPlans`` know of the graph of these calls. It keeps the graph alive.
        before_forward: Called before a root's forward is counted; may end the step.
    """

    def __init__(
        self,
        recorder: Recorder,
        clock: Clock,
        failures: Failures,
        backend: RecordingBackend,
        before_forward: Callable[[], object],
    ) -> None:
        self.backend, self.before_forward = backend, before_forward
        self.recorder, self.due = recorder, recorder.due("xy_distribution")
        self.clock = clock
        self.failures = failures
        self.gate = self._new_gate()
        self.depth, self.nodes = 0, dict[Any, Any]()
        self.threads: set[int] = set()
        self.roots: dict[int, Any] = {}
        self._watchers: list[ModuleWatcher] = []
        self._called: list[CallsOfStep] = []
        self._leaves: dict[Target, set[int]] = {}
        self._pass: int | None = None
        self._begun_in_pass: set[tuple[int, int]] = set()
        self._root_hooks = HookSet()
        self._hooks = HookSet()
        self._until_step_ends: list[Removable] = []
        self._adapter = backend.modules.new_hooks(self)
        self.repetitions, self._is_running = self._adapter.repetitions, self._adapter.is_running
        by_thread = self._is_running is None
        self.forwards = [RootForwards(clock, chunk, failures, by_thread=by_thread) for chunk in range(clock.chunks)]
        self._trains, self._repeating = backend.modules.trains, backend.modules.repeating
        self._current_pass = backend.autograd.engine.current_pass

    def _new_gate(self) -> GradientGate:
        return GradientGate(self.recorder, self.clock, self.failures, self.backend.tensors.activation_placement)

    def watch_root(self, chunk: int, root: Any) -> None:
        """Count the micro-steps of a chunk by its root's forwards. Must be called before ``watch`` of the same root."""
        if not self.backend.modules.takes_hooks(root):
            return
        advice = "Micro-steps may be miscounted."
        self.roots[chunk] = root
        before = self.failures.guarded("counting micro-steps", partial(self.root_begins, chunk), advice)
        after = self.failures.guarded("following the backward of the model", partial(self.root_ends, chunk), advice)
        self._adapter.hook_root(chunk, root, before, after, self._root_hooks)

    def watch(self, chunk: int, name: str, module: Any, wanted: ModuleSelection) -> None:
        if not self.backend.modules.takes_hooks(module):
            said = f"{name!r} is a {type(module).__name__}, which takes no hooks. Its activations are not recorded."
            self.failures.nothing_of("modules without hooks", said)
            return
        watcher = ModuleWatcher(module, name, chunk, wanted, self)
        watcher.attach(self._adapter, self._hooks)
        self._watchers.append(watcher)

    def call_ended(self) -> None:
        """A watched call has ended."""
        self.depth -= 1
        if self.depth <= 0:
            self.forget_graph()

    def forget_graph(self) -> None:
        """No watched call is in progress."""
        self.depth = 0
        self.nodes.clear()

    def until_step_ends(self, handles: Sequence[Removable]) -> None:
        """Keep handles of hooks on tensors that may outlive the step, such as leaves, and remove them when the step ends."""
        self._until_step_ends += handles

    def counts(self, chunk: int, module: Any) -> bool:
        """Whether a call of a module that begins now belongs to training. The call may be a recomputation."""
        forwards = self.forwards[chunk]
        if self._is_running is not None and forwards.mine:
            if self._is_running(self.roots[chunk], 1):
                return forwards.train  # also for calls that are not recorded: the backward may repeat them
            self._forward_raised(chunk)
        trains = forwards.train and self._trains(module)
        return trains and (forwards.any_is_open or self._adapter.root_trains(None))

    def tracks_gradients(self) -> bool:
        """Whether a backward may follow a call that begins now."""
        return self._adapter.root_trains(None)

    def remember(self, watcher: CallsOfStep) -> None:
        """Register a watcher whose module is called for the first time in this step."""
        self._called.append(watcher)

    def micro_steps_of(self, leaf: Any) -> set[int]:
        """The micro-steps of this step in which a leaf tensor was a result."""
        return self._leaves.setdefault(self.backend.autograd.gradient_target(leaf), set())

    def runs_backward_of(self, chunk: int, micro_step: int, among: Collection[int]) -> bool:
        """Whether the backward in progress belongs only to ``micro_step``.

        Args:
            among: The micro-steps to which it may belong.
        """
        if self._pass == self._current_pass():
            return {begun for begun in self._begun_in_pass if begun[0] == chunk} == {(chunk, micro_step)}
        # No result of the root showed which micro-step the backward belongs to.
        return len(among) == 1 or (self.clock.backward[chunk] < 0 and self.clock.forward[chunk] == micro_step)

    def seen(self) -> list[SeenModule]:
        """The modules that were called in this step, in the order of their first calls, with their series."""
        return [watcher.seen() for watcher in self._called if isinstance(watcher, ModuleWatcher)]

    def end_step(self) -> None:
        while self._until_step_ends:
            self._until_step_ends.pop().remove()
        self.threads.clear()
        for forwards in self.forwards:
            forwards.end_step()
        for watcher in self._called:
            watcher.forget_step()
        self._called.clear()
        self._leaves.clear()
        self.forget_graph()
        self._adapter.end_step()

    def unwatch(self) -> None:
        """Remove the hooks of all modules. Micro-steps are still counted."""
        self._hooks.remove()
        self.end_step()
        self.gate.attached = False
        self.gate = self._new_gate()
        self._watchers.clear()

    def remove(self) -> None:
        """Remove every hook."""
        self.unwatch()
        self._root_hooks.remove()
        self._adapter.remove()

    def root_begins(self, chunk: int, root: Any, _args: Any = (), _kwargs: Any = None) -> None:
        """Called before the root's forward."""
        if self.forwards[chunk].mine and self._adapter.is_alone(root):
            self._forward_raised(chunk)
        self.before_forward()
        if self._repeating() or root is not self.roots.get(chunk):
            return
        self.threads.add(get_ident())
        counted = self.recorder.active or self.clock.learning
        tracked = counted and self._adapter.root_trains(root) and self._has_room(chunk)
        if tracked and not self.in_tracked_root(chunk):
            self.clock.forward_begins(chunk)
            self.recorder.micro_step_begins(chunk, self.clock.micro_steps)
            self._check_micro_step(self.clock.forward[chunk])
        self.forwards[chunk].begin(tracked=tracked)

    def _has_room(self, chunk: int) -> bool:
        """Whether the step may have another forward: a step that no optimizer ends must not take ever more memory."""
        begun = self.clock.forward[chunk] + 1
        if begun < max(MOST_FORWARDS, self.clock.micro_steps):
            return True
        said = f"Step {self.clock.step} has had {begun} training forwards and has not ended. Its further ones have no rows."
        self.failures.warn("endless step", f"{said} Pass the optimizers whose step() the loop calls.")
        return False

    def in_tracked_root(self, chunk: int) -> bool:
        """Whether a training forward of the root is open on this thread. A nested one does not begin a micro-step: Lightning
        runs a training step as the forward of its module, which calls the module again.
        """
        return any(call.tracked for call in self.forwards[chunk].mine)

    def root_ends(self, chunk: int, root: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        """Called after the root's forward. If it raised, the exception is being handled."""
        forwards = self.forwards[chunk]
        if not forwards.mine or self._repeating() or root is not self.roots[chunk]:
            return
        call = forwards.mine.pop()
        if not forwards.is_current(call):
            return
        if sys.exc_info()[1] is call.handled:
            self._follow_backward(chunk, call.micro_step, result)
        elif not self.in_tracked_root(chunk):
            self._restart_micro_step(chunk, call.micro_step)

    def _follow_backward(self, chunk: int, micro_step: int, result: Any) -> None:
        begins = partial(self.backward_begins, chunk, micro_step)
        for leaf in self.backend.tensors.paths.outputs(result):
            self._adapter.backward_begins(leaf.tensor, begins)

    def _forward_raised(self, chunk: int) -> None:
        """Close the open forwards of a root, which raised, and no hook was called."""
        forwards = self.forwards[chunk]
        tracked = [one for one in forwards.mine if forwards.is_current(one)]
        forwards.mine.clear()
        if tracked:
            self._restart_micro_step(chunk, tracked[0].micro_step)

    def _restart_micro_step(self, chunk: int, micro_step: int) -> None:
        """Undo a micro-step whose forward failed. If the loop continues, the next forward takes its number, unless another
        thread has begun a later one.
        """
        if self.clock.forward[chunk] == micro_step:
            self.clock.forward[chunk] -= 1
        self.forget_graph()
        for watcher in self._called:
            watcher.restart(chunk, micro_step)

    def backward_begins(self, chunk: int, micro_step: int, _gradient: Any) -> None:
        """A backward reaches a result of a chunk."""
        self.clock.backward[chunk] = micro_step
        if self._pass != (now := self._current_pass()):
            self._pass = now
            self._begun_in_pass.clear()
        self._begun_in_pass.add((chunk, micro_step))
        self.clock.reached[chunk] = max(begun for of, begun in self._begun_in_pass if of == chunk)

    def _check_micro_step(self, micro_step: int) -> None:
        if micro_step == self.clock.micro_steps and (said := self.clock.more_forwards):
            advice = (
                "If a step accumulates several micro-batches, pass their number (grad_acc_steps of set_monitor, micro_batches "
                "of watch). Call batch_ended() after a batch that failed or was skipped, and set_monitor again with a new "
                "optimizer. Other loops that call the model several times, as a GAN's, need no change."
            )
            self.failures.advise("more micro-steps", f"{said} {advice}")
