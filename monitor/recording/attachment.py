"""Attaches collectors to one model and its optimizers, follows their steps, and seals the rows at the end of each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from monitor.pipeline.process import PROCESS
from monitor.recording import phases
from monitor.recording.activations import ModuleCollector
from monitor.recording.attached_model import Attached, AttachmentSpec, Host, ModelNames, NamedModule, hook_parts
from monitor.recording.backend import HookSet
from monitor.recording.features.collector import FeatureCollector
from monitor.recording.late_modules import LateModules
from monitor.recording.module_info import StackCollector, StructureCollector
from monitor.recording.parameters import GradientCollector, MomentCollector, WeightCollector
from monitor.recording.recorder import RecordedSeries, SeenModule, observed_dataflow
from monitor.recording.run import Run
from monitor.recording.run_numbers import BATCH, LoggedStep, RunNumbers
from monitor.recording.startup_estimate import records_measurements
from monitor.recording.step_clock import Clock, Schedule
from monitor.series import CALL_KIND, CHECKED_KINDS, MICRO_STEP_KINDS, Series
from monitor.stats.table import Status

# --- Seals the rows of each collected step, and passes them to the pipeline of the run.


@final
class StepSealer:
    """Copies the rows of a step into a table of the pipeline's ring, and adds notes to the manifest.

    Attributes:
        micro_step_kinds: Kinds with a row for each micro-step.
        combined_kinds: Kinds whose micro-steps or operator calls are combined.
        counted_kinds: Kinds whose rows are operator calls, combined and counted.
        checked_kinds: Kinds whose rows have a checksum because replicas are checked.
    """

    def __init__(self, host: Host, clock: Clock, watch: AttachmentSpec, *, dataflow_written: bool) -> None:
        self._host, self._clock = host, clock
        self._introduced = self._dataflow_written = False
        self.use(watch)
        self._dataflow_written = dataflow_written

    def use(self, watch: AttachmentSpec) -> None:
        """Follow a configuration from the next step on. If it records activations, their dataflow is written again."""
        self._watch, config = watch, watch.config
        self._dataflow_written = self._dataflow_written and not config.xy_distribution
        calls = frozenset({CALL_KIND} if config.cc_distribution.enable else ())
        gradients = frozenset({"grad_unreduced"} if config.monitor_mbs_grad else ())
        each = config.micro_steps == "each"
        self.counted_kinds: frozenset[str] = calls
        self.checked_kinds = frozenset(CHECKED_KINDS if config.checks_replicas else ())
        self.micro_step_kinds: frozenset[str] = MICRO_STEP_KINDS | gradients if each else gradients
        self.combined_kinds: frozenset[str] = calls if each else MICRO_STEP_KINDS | calls

    def note(self, key: str, said: str) -> None:
        """Add a note to the manifest."""
        self._opened().manifest.note(key, said)

    def seal(self, status: Status, seen: Callable[[], Sequence[SeenModule]]) -> None:
        """Submit the rows of the step; without room in the ring they are dropped.

        Args:
            seen: Returns the modules that were called in the step.

        Raises:
            EarlierFailure: An operation of training has failed. What was measured before it was submitted.
        """
        failure = self._host.recorder.settle()
        try:
            self._submit(status, seen)
        except BaseException:
            self._host.recorder.discard()  # this step's measurements must not become rows of the next step
            raise
        if failure is not None:
            raise failure

    def _submit(self, status: Status, seen: Callable[[], Sequence[SeenModule]]) -> None:
        run, recorder, step = self._opened(), self._host.recorder, self._clock.step
        has_activations = recorder.due("xy_distribution").in_step
        if not self._dataflow_written and has_activations:  # of one step: the other steps are nearly the same
            self._dataflow_written = True
            write = self._host.failures.guarded(
                "following the flow of data", self._write_dataflow, "The manifest has none of it."
            )
            write(run, seen)
        recorder.note_unreadable(run.manifest.note)
        sealed = run.pipeline.reserve(step)
        if sealed is None:
            recorder.discard()
            return
        try:
            sealed.step, sealed.status, sealed.ops = step, status, self._watch.ops()
            sealed.micro_step_kinds, sealed.combined_kinds = self.micro_step_kinds, self.combined_kinds
            sealed.counted_kinds, sealed.checked_kinds = self.counted_kinds, self.checked_kinds
            recorder.seal(sealed)
        except BaseException:
            run.pipeline.give_back(sealed)
            raise
        run.pipeline.submit(sealed)

    def _write_dataflow(self, run: Run, seen: Callable[[], Sequence[SeenModule]]) -> None:
        run.manifest.flows(observed_dataflow(self._host.recorder.table, seen()))

    def _opened(self) -> Run:
        """The run. The first call adds the framework's notes to its manifest."""
        run = self._host.run()
        if not self._introduced:
            self._introduced = True
            notes = self._host.failures.guarded("asking the framework for notes", self._watch.framework.notes)() or {}
            for key, said in notes.items():
                run.manifest.note(key, said)
        return run


@final
class Attachment:
    """Listens to the steps of optimizers and to a model's hooks, and seals the recorded rows.

    Attributes:
        clock: The step and micro-step.
        schedule: The steps to collect.
        begun: Whether the step in progress has had a forward.
        collected: Number of steps that were scheduled for collection so far.
        expected: The kinds that this rank should record. If one has no rows, a warning follows.
        read: The kinds of parameters that it reads, also to compare replicas only.
        has_unheld: Whether a step has shown trained parameters without a known optimizer.
        last_collected: The last collected step that has ended; None before the first.
        on_first_step: Called once, after the next step, collected or not; may end the run.
        names: The recorded modules and parameters.
        modules: Records activations, and counts micro-steps.
        collectors: The other collectors.
        sealer: Submits the rows of each collected step.
        when_ended: Called after the end of each step. What it raises as an ``EarlierFailure`` reaches training.
        at_boundary: Called between two steps with the number of the next one; may call ``use`` to change what is recorded.
    """

    def __init__(
        self,
        watch: AttachmentSpec,
        names: ModelNames,
        host: Host,
        start_step: int,
        collected: int = 0,
        schedule: Schedule | None = None,
    ) -> None:
        self._backend, self._recorder, self._failures, self._run = host.backend, host.recorder, host.failures, host.run
        self.watch, self._note_batch = watch, host.note_batch
        self.schedule = schedule or Schedule.of(watch.config)
        self.clock = Clock(start_step, abs(watch.grad_acc_steps), len(watch.chunks), learning=watch.guesses)
        self.on_first_step: Callable[[], None] | None = None
        self.when_ended: Callable[[], object] | None = None
        self.at_boundary: Callable[[int], object] = _no_change
        self.expected, self.read = set[str](), set[str]()
        self.last_collected: int | None = None
        self.names, self.collected, self._scaling_said = names, collected, ""
        self._scaling: dict[str, RecordedSeries] = {}
        self._turns, self._others, self._logged = phases.OptimizerTurns(), phases.OtherOptimizers(), LoggedStep()
        self._now: phases.OptimizerTurn | None = None
        self._numbers: RunNumbers | None = None
        self.begun = self._has_forwards = self._any_turn = self.has_unheld = False
        self.sealer = StepSealer(host, self.clock, watch, dataflow_written=collected > 0)
        self._forks, self._hooks = PROCESS.forks, HookSet()
        self.modules = ModuleCollector(self._recorder, self.clock, self._failures, self._backend, self.settled)
        self.collectors = phases.Collectors()
        try:
            self._attach()
            self._steps = watch.framework.steps(self, self._failures)
            self.clock.known = len(self._steps.optimizers) < 2
        except BaseException:
            self._remove_hooks()
            raise
        self._begin_step()

    def use(self, watch: AttachmentSpec, names: ModelNames, schedule: Schedule, collected: int) -> None:
        """Change between two steps what is recorded of the same model, from the next step on.

        Args:
            collected: Number of steps of ``schedule`` that were scheduled for collection so far.
        """
        self.rest()
        self.watch, self.names = watch, names
        self.sealer.use(watch)
        self._attach()
        self.schedule, self.collected = schedule, collected

    def rest(self) -> None:
        """Stop recording between two steps, until ``use``."""
        self.schedule, self._scaling_said = Schedule(self.clock.step, 1, 0), ""
        # Made before the other one is removed: in between, torch's compiler would not guard code against new hooks.
        modules = ModuleCollector(self._recorder, self.clock, self._failures, self._backend, self.settled)
        self._remove_hooks()
        self.modules, self.collectors, self._numbers = modules, phases.Collectors(), None

    def _attach(self) -> None:
        config, watch = self.watch.config, self.watch
        self._monitored = watch.ownership.monitored
        parameters, modules = list(self.names.parameters()), list(self.names.modules())
        for chunk, root in enumerate(watch.chunks):
            self.modules.watch_root(chunk, root)
        if config.xy_distribution:
            self.watch_activations(modules)
        attached = Attached(watch, parameters, self._recorder, self.clock, self._failures, self._backend, self.sealer.note)
        self._held = phases.OptimizerParameters(attached)
        for field, collector in self._configured(attached, modules):
            self.collectors.add(collector, self._recorder.due(field))
        self.read = attached.read
        self.expected = attached.kinds | (self.names.activation_kinds() if config.xy_distribution else set())
        begins = self._failures.guarded("beginning a forward", self._forward_begins)
        for root in filter(self._backend.modules.takes_hooks, watch.chunks):
            self._hooks.add(self._backend.modules.before_forward(root, begins, compiled=True))
        part_begins = self._failures.guarded("beginning a part of the model", self._part_begins)
        hook_parts(watch.chunks, self._backend.modules, self._hooks, part_begins)

    def _configured(self, attached: Attached, modules: Sequence[NamedModule]) -> Iterator[tuple[str, phases.Collector]]:
        """Create the configured collectors, in the order of their calls, each with the configuration field that asks for it."""
        config, backend = attached.config, attached.backend
        if config.xy_distribution:
            yield "xy_distribution", LateModules.of_activations(attached, self.names)
        if config.recording_l2_features:
            yield "recording_l2_features", FeatureCollector(attached, self.names, self.modules)
        if config.stack_info and self._monitored:
            yield "stack_info", StackCollector(attached, modules, lambda: self._run().directory)
        if config.print_struct:
            yield "print_struct", StructureCollector(attached, modules)
        gradients: GradientCollector | None = None
        if config.wg_distribution:
            gradients = GradientCollector(attached, backend.factories.new_gradients)
            attached = replace(attached, is_reduced=gradients.is_reduced)
            yield "wg_distribution", gradients
        if config.mv_distribution:
            yield "mv_distribution", MomentCollector(attached)
        if config.param_distribution:
            yield "param_distribution", WeightCollector(attached)
        yield from backend.factories.new_updates(attached)
        if config.run_numbers is not False and self._monitored:
            automatic = config.run_numbers or records_measurements(config)
            self._numbers = RunNumbers(attached, gradients, automatic=automatic)
            yield "run_numbers", self._numbers

    def _has(self, field: str) -> bool:
        """Whether the step in progress, if it is collected, has the kinds of a configuration field."""
        return (self.clock.step - self.schedule.start_step) % self._period(field) == 0

    def _period(self, field: str) -> int:
        interval: int = getattr(self.watch.config.intervals, field, 1)
        return self.schedule.step_interval * interval

    @property
    def periods(self) -> dict[str, int]:
        """From one step to the next that has the kinds of a configuration field, counted from the first of the schedule."""
        return {field: self._period(field) for field, _ in self.watch.config.intervals}

    def watch_activations(self, modules: Sequence[NamedModule] | None = None) -> None:
        """Hook the selected modules."""
        for module in self.names.modules() if modules is None else modules:
            if module.wanted is not None:
                self.modules.watch(module.chunk, module.name, module.module, module.wanted)

    def set_activations(self, wanted: bool) -> None:
        """Start or stop recording activations."""
        self.modules.unwatch()
        if wanted:
            self.watch_activations()

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Record numbers of the step in progress. Between two steps those with a loss belong to the step that has ended."""
        late = self._logged.is_late(numbers, has_turn=self._turns.begun, has_rows=self._recorder.has_rows)
        collected = self.last_collected == self.clock.step - 1 if late else self._recorder.active
        recorded = self._logged.of_ended if late else self._numbers
        if not collected or (recorded is None and BATCH not in numbers):
            return
        if late is None:
            self._failures.warn("logging between two steps", self._logged.unknown(numbers))
            return
        if BATCH in numbers:
            note = self._failures.guarded("logging a batch", self._note_batch, "Its identifiers are not recorded.")
            note(self.clock.step - late, numbers[BATCH])
        if recorded is not None:
            recorded.log({name: given for name, given in numbers.items() if name != BATCH}, late=late)

    def _forward_begins(self, root: Any, _args: Any, _kwargs: Any) -> None:
        self._failures.reraise_deferred()
        trains = self._backend.modules.trains(root)
        self.begun = self.begun or trains
        self._shows_step(trains)
        self._others.forwards += trains and root is self.watch.chunks[0]
        if not self._steps.evaluating and self._turns.on_this_thread:
            self.collectors.all(phases.Collector.end_turn, None)  # data of a step that raised
        if trains and self._recorder.active:
            self.collectors.each(phases.Collector.forward_begins)

    def _part_begins(self, part: Any, *_: Any) -> None:
        """A part of a model that has no forward of its own begins one: the model itself will show none."""
        self._shows_step(self._backend.modules.trains(part))

    def _shows_step(self, trains: bool) -> None:
        """A forward begins. Numbers that are logged from now on belong to it, unless it only evaluates."""
        self._has_forwards = self._has_forwards or trains
        if self.modules.tracks_gradients() and self._logged.forward_begins(trains=trains):
            self._recorder.postscript.end()

    def micro_batch_begins(self) -> None:
        """Parts of the model are about to be called, and the model itself may not be: what its forward would begin begins."""
        for chunk, root in enumerate(self.watch.chunks):
            self._forward_begins(root, (), {})
            self.modules.root_begins(chunk, root)

    def micro_batch_ends(self, result: Any) -> None:
        """End the micro-batch: its parts were called, with this result."""
        for chunk, root in enumerate(self.watch.chunks):
            self.modules.root_ends(chunk, root, (), {}, result)

    # `StepListener`: the phases of an optimizer's step, in this order.

    def loss_scale(self, optimizer: Any, scale: Any, scaler: int = 0, *, late: bool = False) -> None:
        self._begin_turn(optimizer)
        self._scaling_said = phases.UNSCALED_LATE if late else phases.UNSCALED
        if self._records_scaled():
            self.sealer.note("loss_scale", phases.SCALED)
            self._recorder.record(self._scalar("loss_scale", scaler), scale, aliases=False)

    def scales_itself(self, optimizer: Any, found_inf: Any, still_scaled: bool) -> None:
        self._begin_turn(optimizer)
        if self._records_scaled():
            self.sealer.note("found_inf", phases.SKIPS_ITSELF)
            place = next((place for place, one in enumerate(self._steps.optimizers) if one is optimizer), 0)
            self._recorder.record(self._scalar("found_inf", place), found_inf, aliases=False)
            if still_scaled:
                self._scaling_said = phases.STILL_SCALED

    def before_step(self, optimizer: Any) -> None:
        self._failures.reraise_deferred()
        self._begin_turn(optimizer)
        if self._recorder.active:
            self._held.late.look_again()
            self.collectors.each(phases.Collector.before_step, self._stepping(optimizer))

    def unseen_step(self, optimizer: Any) -> None:
        """The optimizer has stepped, and it is too late to read what this step has left."""
        self._begin_turn(optimizer)
        self._end_turn(optimizer, skipped=False)

    def gradients_ready(self, optimizer: Any) -> None:
        if self._recorder.active:
            self.collectors.each(phases.Collector.gradients_ready, self._stepping(optimizer))

    def clipped(self, clipping: phases.Clipping) -> None:
        if self._recorder.active:
            self.collectors.each(phases.Collector.clipped, clipping)

    def after_step(self, optimizer: Any, *, skipped: bool = False) -> None:
        if self._recorder.active and not skipped:
            self.collectors.each(phases.Collector.after_step, self._stepping(optimizer))
        self._end_turn(optimizer, skipped=skipped)

    def all_stepped(self) -> None:
        """The container of the optimizers has stepped: optimizers without a turn in this step will have none."""
        if self._turns.begun:
            self._end_step(self._turns.status)

    def others_stepped(self, old: Any, new: Any, stepped: Collection[int], *, elsewhere: bool = False) -> None:
        """End the step at the next forward, unless optimizers that were passed take part in it."""
        begun = self.begun and not elsewhere and PROCESS.forks == self._forks  # a forked child records nothing
        self._others.stepped(None if elsewhere else old, new, stepped, beside=self._turns.begun, begun=begun)

    def settled(self) -> int:
        """End the step if another optimizer has stepped it, or if its end was interrupted. Returns the number of the step in
        progress.
        """
        if self._recorder.active and self._turns.begun and self._turns.complete(self._steps.optimizers):
            self._end_step(self._turns.status)
        if said := self._others.in_place(
            self.clock, lambda: (p for one in self.watch.chunks for _, p in self._backend.modules.parts(one).parameters)
        ):
            self._failures.warn("replaced optimizer", said)
            self._end_step("complete")
        return self.clock.step

    def _begin_turn(self, optimizer: Any) -> None:
        """End the step in progress if ``optimizer`` has had its turn in it. If all have had theirs, its end was interrupted."""
        self._now = None
        self._others.clear()
        if self._turns.begin(optimizer):
            if (missing := next((one for one in self._steps.optimizers if not self._turns.taken(one)), None)) is not None:
                said = self._held.left_out(optimizer, missing, self._steps.optimizers)
                self._failures.nothing_of("optimizers of a step", said)
            self._end_step(self._turns.status, before_a_turn=True)

    def _end_turn(self, optimizer: Any, *, skipped: bool) -> None:
        self._any_turn = True
        self._turns.take(optimizer, skipped=skipped)
        if self._turns.complete(self._steps.optimizers):
            self._end_step(self._turns.status)
        elif self._recorder.active:
            self.collectors.each(phases.Collector.end_turn, self._stepping(optimizer))
            self._scaling_said = ""

    def _stepping(self, optimizer: Any) -> phases.OptimizerTurn:
        """The current turn, with the parameters of its optimizer, which are determined once per turn."""
        if self._now is None or self._now.optimizer is not optimizer:
            held = self._held.by(optimizer, self._steps.optimizers)
            self._now = phases.OptimizerTurn(optimizer, held, self._scaling_said, self._held.ids_of(optimizer))
        return self._now

    def _scalar(self, name: str, place: int) -> RecordedSeries:
        """The series of a scalar of the step. The first has the plain name; most loops have only one."""
        full = f"{name}_{place}" if place else name
        return self._scaling.setdefault(full, RecordedSeries(Series("other", 0, full)))

    def batch_ended(self) -> None:
        """End a batch, after the call of the optimizer if there is one. Must be called for every batch.

        If the optimizer was not called after the last batch of a step, the step was skipped.
        """
        if not self.begun:  # the optimizer has ended the step
            return
        if self.clock.learning:
            self._failures.warn("batch_ended", "batch_ended() needs the number of micro-batches: pass micro_batches to watch.")
            return
        self._batches += 1
        if self._batches >= self.clock.micro_steps:
            self._end_step(self._turns.status)

    def _records_scaled(self) -> bool:
        return self._recorder.active and (self.watch.config.wg_distribution or self.watch.config.xy_distribution)

    # The end of a step and the beginning of the next one.

    def _end_step(self, status: Status, *, before_a_turn: bool = False) -> None:
        """Seal the step, and begin the next one. Rows that a wrong number of micro-batches has mixed up are dropped.

        Args:
            before_a_turn: Whether an optimizer is about to step, so that its gradients exist already.
        """
        right = not self.clock.misguessed
        collected = self._recorder.active and right
        try:  # if sealing fails, the next step must begin all the same
            if collected:
                self._failures.guarded("looking at the optimizers", self._report_optimizers)()
            self._before_seal()
            self._recorder.end_step()
            if collected:
                self._failures.guarded("sealing a step", self.sealer.seal, "Its rows are missing.")(status, self.modules.seen)
                self.last_collected = self.clock.step
            elif not right:
                self._recorder.discard()
        finally:
            self._end_step_of_collectors(collected=collected)
            self.modules.end_step()
            self.collectors.all(phases.Collector.end_turn, None)
            self.collected += right and self.schedule.collects(self.clock.step, self.collected)
            self._logged.step_ends(self._numbers)
            self.clock.next_step()
            self._finish_first_step()  # before the boundary, which may attach collectors that have not seen a step
            self.at_boundary(self.clock.step)
            self._begin_step(before_a_turn=before_a_turn)
        if self.when_ended is not None:
            self.when_ended()

    def _before_seal(self) -> None:
        if self._recorder.active:
            self._failures.guarded("recording the run's own numbers", self.collectors.each)(phases.Collector.before_seal)

    def _report_optimizers(self) -> None:
        """Note partly skipped steps in the manifest, and pass on which weights several optimizers step. Warn about parameters
        that no optimizer steps, or that are new.
        """
        self._recorder.rewritten = self._held.rewritten(self._others.ids)
        if self._turns.mixed:
            self.sealer.note("optimizers", phases.PARTLY_SKIPPED)
        if said := self.clock.unlike_before():
            self.sealer.note("more_forwards", said)
        for cause, key, said in self._held.late.said():
            self._failures.warn(cause, said)
            self.sealer.note(key, said)
        if not phases.measures_optimizers(self.watch.config):
            return
        if said := self._held.report_unstepped(self._steps.optimizers, self._others.ids):
            self.has_unheld = True
            self.sealer.note("parameters", said)

    def _begin_step(self, *, before_a_turn: bool = False) -> None:
        self.begun, self._batches = False, 0
        self._turns.clear()
        self._others.restart()
        self._recorder.activate(self._monitored and self.schedule.collects(self.clock.step, self.collected), self._has)
        if self._recorder.active and not before_a_turn:
            self._scaling_said = ""
        self.collectors.all(phases.Collector.begin_step, before_a_turn=before_a_turn)

    def _end_step_of_collectors(self, *, collected: bool) -> None:
        if PROCESS.forks == self._forks:
            self.collectors.end_step(collected=collected)

    def _finish_first_step(self) -> None:
        if self.on_first_step is not None and PROCESS.forks == self._forks:
            finish, self.on_first_step = self.on_first_step, None
            finish()

    def detach(self, *, keep: bool = True) -> None:
        """Remove every hook.

        Args:
            keep: Write the step in progress as incomplete, since it may contain the fault. If false, it is discarded.
        """
        self._steps.remove()
        if keep:
            self.settled()
        if keep and not self._any_turn and (said := self._others.alone(self._steps.optimizers, self.clock, self._has_forwards)):
            self._failures.warn(*said)
        try:
            was_active = self._recorder.active
            if keep:
                self._before_seal()
            self._recorder.end_step()
            if was_active and self._recorder.has_rows:
                if keep and not self.clock.misguessed:
                    self._failures.guarded("sealing the last step", self.sealer.seal)("incomplete", self.modules.seen)
                else:
                    self._recorder.discard()
        finally:
            if keep and self.begun:
                self._end_step_of_collectors(collected=False)
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        self.collectors.all(phases.Collector.end_turn, None)
        self.collectors.all(phases.Collector.remove)
        self.modules.remove()
        self._hooks.remove()

    def write_structure(self, path: Path) -> None:
        """Write ``module_struct.json`` atomically. Raises ``OSError`` if it cannot be written."""
        for one in self.collectors:
            if isinstance(one, StructureCollector):
                one.write(path)

    def shares(self, chunks: Sequence[Any], optimizers: Sequence[Any]) -> bool:
        """Whether this attachment already watches one of the chunks or one of the optimizers."""
        watched = {id(one) for one in (*self.watch.chunks, *self._steps.optimizers) if one is not None}
        return any(id(one) in watched for one in (*chunks, *optimizers))


def _no_change(_step: int) -> None:
    """Continue with the same configuration."""
