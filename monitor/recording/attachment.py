"""Attaches collectors to one model and its optimizers, follows their steps, and seals the rows at the end of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from monitor.failures import Failures
from monitor.pipeline.process import PROCESS
from monitor.recording.activations import ModuleCollector
from monitor.recording.attachment_spec import AttachmentSpec
from monitor.recording.backend import HookSet, RecordingBackend
from monitor.recording.dataflow import observed_dataflow
from monitor.recording.features.collector import FeatureCollector
from monitor.recording.model_names import ModelNames, NamedModule
from monitor.recording.module_info import StackCollector, StructureCollector
from monitor.recording.optimizer_turns import OptimizerParameters, OptimizerTurn, OptimizerTurns, unstepped_warning
from monitor.recording.parameter_rows import ParameterRows
from monitor.recording.recorder import RecordedSeries, Recorder
from monitor.recording.run import Run
from monitor.recording.step_clock import Clock, Schedule
from monitor.series import ACTIVATION_KINDS, CALL_KIND, FORWARD_FEATURE_KINDS, Series
from monitor.stats.rows import Status

PARTLY_SKIPPED: Final = (
    "in some steps one optimizer was skipped and another one stepped: such a step counts as complete, and the parameters of "
    "the skipped optimizer have no param_updated in it"
)
NEVER_STEPPED: Final = (
    "no optimizer that was passed to set_monitor has stepped ({names}), so no step has ended. Pass the "
    "optimizers whose step() the loop calls."
)
LEFT_OUT: Final = (
    "{twice} stepped twice before {once} stepped once: the step ended between the two. Rows measured between them are recorded "
    "in the step that ended. docs/optimizers.md shows the rows of such steps."
)


class Attachment:
    """Listens to the steps of optimizers and to a model's hooks, and seals the recorded rows.

    Attributes:
        clock: The step and micro-step.
        schedule: The steps to collect.
        begun: Whether the step in progress has had a forward.
        collected: Number of steps that were scheduled for collection so far.
        expected: The kinds that this rank should record. If one has no rows, a warning follows.
        has_unheld: Whether a step has shown trained parameters without a known optimizer.
        last_collected: The last collected step that has ended; None before the first.
        on_first_step: Called once, after the next step, collected or not; may end the run.
        at_boundary: Called between two steps with the number of the next one; may call ``use`` to change what is recorded.
    """

    def __init__(
        self,
        watch: AttachmentSpec,
        names: ModelNames,
        recorder: Recorder,
        run: Callable[[], Run],
        start_step: int,
        failures: Failures,
        backend: RecordingBackend,
        collected: int = 0,
        schedule: Schedule | None = None,
    ) -> None:
        self._backend, self._trains = backend, backend.modules.trains
        self.watch = watch
        self.schedule = schedule or Schedule.of(watch.config)
        self.clock = Clock(start_step, watch.grad_acc_steps, len(watch.chunks))
        self.structure = StructureCollector(failures, backend) if watch.config.print_struct else None
        self.on_first_step: Callable[[], None] | None = None
        self.at_boundary: Callable[[int], object] = _no_change
        self.begun = False
        self.expected: set[str] = set()
        self.collected = collected
        self._batches = 0
        self.last_collected: int | None = None
        self._dataflow_written = collected > 0
        self._names = names
        self._recorder = recorder
        self._run = run
        self._failures = failures
        self._scaling: dict[str, RecordedSeries] = {}
        self._turns = OptimizerTurns()
        self._now: OptimizerTurn | None = None
        self._any_turn = False
        self._unheld_reported = False
        self.has_unheld = False
        self._introduced = False
        self._forks = PROCESS.forks
        self._hooks = HookSet()
        self.modules = ModuleCollector(recorder, self.clock, failures, backend)
        self._stacks: StackCollector | None = None
        self._rows = ParameterRows()
        self._features: FeatureCollector | None = None
        self._held = OptimizerParameters((), watch.framework)
        try:
            self._attach()
            self._steps = watch.framework.steps(self, failures)
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
        self.watch, self._names = watch, names
        self._dataflow_written = self._dataflow_written and not watch.config.xy_distribution
        self._attach()
        self.schedule, self.collected = schedule, collected

    def rest(self) -> None:
        """Stop recording between two steps, until ``use``."""
        self.schedule = Schedule(self.clock.step, 1, 0)
        self._remove_hooks()
        self.modules = ModuleCollector(self._recorder, self.clock, self._failures, self._backend)
        self._stacks = self._features = None
        self._rows = ParameterRows()

    def _attach(self) -> None:
        config, watch = self.watch.config, self.watch
        parameters = list(self._names.parameters())
        modules = list(self._names.modules())
        for chunk, root in enumerate(watch.chunks):
            self.modules.watch_root(chunk, root)
        if config.xy_distribution:
            self.watch_activations(modules)
        if config.recording_l2_features:
            reading = self._backend.features
            self._features = FeatureCollector(self._names, config, self.modules, watch.framework, watch.ownership, reading)
        if config.stack_info and watch.ownership.monitored:
            self._stacks = self._attach_stacks(modules)
        if self.structure is not None:
            for module in modules:
                self.structure.watch(_key(module), module.module)
        self._held = OptimizerParameters(parameters, watch.framework)
        self._rows = ParameterRows.of(watch, parameters, self._recorder, self.clock, self._failures, self._backend, self._note)
        self.expected = set(self._rows.kinds)
        self.expected |= _of_activations(modules) if config.xy_distribution else set()
        self._attach_beginning()

    def _attach_beginning(self) -> None:
        begins = self._failures.guarded("beginning a forward", self._forward_begins)
        ends = self._failures.guarded("ending a forward", self._forward_ends)
        for root in filter(self._backend.modules.takes_hooks, self.watch.chunks):
            self._hooks.add(self._backend.modules.before_forward(root, begins, compiled=True))
            if self.watch.config.wg_distribution:
                self._hooks.add(self._backend.modules.after_forward(root, ends, compiled=True))

    def watch_activations(self, modules: Sequence[NamedModule] | None = None) -> None:
        """Hook the selected modules."""
        for module in self._names.modules() if modules is None else modules:
            if module.wanted is not None:
                self.modules.watch(module.chunk, module.name, module.module, module.wanted)

    def set_activations(self, wanted: bool) -> None:
        """Start or stop recording activations."""
        self.modules.unwatch()
        if wanted:
            self.watch_activations()

    def _attach_stacks(self, modules: Sequence[NamedModule]) -> StackCollector:
        stacks = StackCollector(self._failures, self._backend)
        for module in modules:
            if module.wanted is not None:
                stacks.watch(_key(module), module.module)
        return stacks

    def _forward_begins(self, root: Any, _args: Any, _kwargs: Any) -> None:
        self._failures.reraise_deferred()
        trains = self._trains(root)
        self.begun = self.begun or trains
        if not self._steps.evaluating:
            self._rows.forget_step()  # data of a step that raised
        if trains and self._recorder.active:
            others = self._backend.job.has_others()
            self._rows.forward_begins(root, self.watch, self.clock, has_others=others)

    def _forward_ends(self, *_: Any) -> None:
        if self._recorder.active:
            self._rows.forward_ends()

    def _note(self, key: str, said: str) -> None:
        self._opened().manifest.note(key, said)

    def _opened(self) -> Run:
        """The run. The first call adds the framework's notes to its manifest."""
        run = self._run()
        if not self._introduced:
            self._introduced = True
            notes = self._failures.guarded("asking the framework for notes", self.watch.framework.notes)() or {}
            for key, said in notes.items():
                run.manifest.note(key, said)
        return run

    # `StepListener`: the phases of an optimizer's step, in this order.

    def loss_scale(self, optimizer: Any, scale: Any, scaler: int = 0) -> None:
        self._begin_turn(optimizer)
        if self._rows.gradients is not None:
            self._rows.gradients.may_be_unscaled()
        if self._records_scaled():
            self._note("loss_scale", "grad_unreduced and actv_grad are multiplied by the loss scale, whose rows are in `other`")
            self._recorder.record(self._scalar("loss_scale", scaler), scale, aliases=False)

    def scales_itself(self, optimizer: Any, found_inf: Any, still_scaled: bool) -> None:
        self._begin_turn(optimizer)
        if self._records_scaled():
            self._note("found_inf", "the optimizer skips a step by itself if found_inf, whose rows are in `other`, is not 0")
            self._recorder.record(self._scalar("found_inf", self._place_of(optimizer)), found_inf, aliases=False)
            if still_scaled and self._rows.gradients is not None:
                self._rows.gradients.are_still_scaled()

    def before_step(self, optimizer: Any) -> None:
        self._failures.reraise_deferred()
        self._begin_turn(optimizer)
        if self._recorder.active:
            self._rows.before_step(self._stepping(optimizer))

    def gradients_ready(self, optimizer: Any) -> None:
        if self._recorder.active:
            self._rows.gradients_ready(self._stepping(optimizer))

    def after_step(self, optimizer: Any) -> None:
        if self._recorder.active:
            self._rows.after_step(self._stepping(optimizer))
        self._end_turn(optimizer)

    def step_skipped(self, optimizer: Any) -> None:
        self._end_turn(optimizer, skipped=True)

    def all_stepped(self) -> None:
        """The container of the optimizers has stepped: optimizers without a turn in this step will have none."""
        if self._turns.begun:
            self._end_step(self._turns.status)

    def _begin_turn(self, optimizer: Any) -> None:
        """End the step in progress if ``optimizer`` has had its turn in it."""
        self._now = None
        if self._turns.taken(optimizer):
            missing = next((one for one in self._steps.optimizers if not self._turns.taken(one)), None)
            said = LEFT_OUT.format(twice=self._called(optimizer), once=self._called(missing))
            self._failures.warn("optimizers of a step", said)
            self._end_step(self._turns.status, before_a_turn=True)

    def _end_turn(self, optimizer: Any, *, skipped: bool = False) -> None:
        self._any_turn = True
        self._turns.take(optimizer, skipped=skipped)
        if self._turns.complete(self._steps.optimizers):
            self._end_step(self._turns.status)
        elif self._recorder.active:
            self._rows.end_turn(self._stepping(optimizer))

    def _stepping(self, optimizer: Any) -> OptimizerTurn:
        """The current turn, with the parameters of its optimizer, which are determined once per turn."""
        if self._now is None or self._now.optimizer is not optimizer:
            self._now = OptimizerTurn(optimizer, self._held.by(optimizer, self._steps.optimizers))
        return self._now

    def _scalar(self, name: str, place: int) -> RecordedSeries:
        """The series of a scalar of the step. The first has the plain name; most loops have only one."""
        full = f"{name}_{place}" if place else name
        if full not in self._scaling:
            self._scaling[full] = RecordedSeries(Series("other", 0, full))
        return self._scaling[full]

    def _called(self, optimizer: Any) -> str:
        """The description of an optimizer in messages: its class, and the first parameter that it steps."""
        return f"{type(optimizer).__name__} of {self._held.first(optimizer, self._steps.optimizers)!r}"

    def _place_of(self, optimizer: Any) -> int:
        return next((place for place, one in enumerate(self._steps.optimizers) if one is optimizer), 0)

    def batch_ended(self) -> None:
        """End a batch, after the call of the optimizer if there is one. Must be called for every batch.

        If the optimizer was not called after the last batch of a step, the step was skipped.
        """
        if not self.begun:  # the optimizer has ended the step
            return
        self._batches += 1
        if self._batches >= self.clock.micro_steps:
            self._end_step(self._turns.status)

    def _records_scaled(self) -> bool:
        return self._recorder.active and (self.watch.config.wg_distribution or self.watch.config.xy_distribution)

    # The end of a step and the beginning of the next one.

    def _end_step(self, status: Status, *, before_a_turn: bool = False) -> None:
        """Seal the step, and begin the next one.

        Args:
            before_a_turn: Whether an optimizer is about to step, so that its gradients exist already.
        """
        was_active = self._recorder.active
        try:  # if sealing fails, the next step must begin all the same
            if was_active:
                self._failures.guarded("looking at the optimizers", self._report_optimizers)()
            self._recorder.end_step()
            if was_active:
                self._failures.guarded("sealing a step", self._seal, "Its rows are missing.")(status)
            if was_active:
                self.last_collected = self.clock.step
            if was_active and self._features is not None:
                self._failures.guarded("ending a step of features", self._features.end_step)()
        finally:
            self.modules.end_step()
            self._rows.forget_step()
            self.collected += self.schedule.collects(self.clock.step, self.collected)
            self.clock.next_step()
            self._finish_first_step()  # before the boundary, which may attach collectors that have not seen a step
            self.at_boundary(self.clock.step)
            self._begin_step(before_a_turn=before_a_turn)

    def _report_optimizers(self) -> None:
        """Note partly skipped steps in the manifest, and warn once about parameters that no optimizer steps."""
        if self._turns.mixed:
            self._note("optimizers", PARTLY_SKIPPED)
        if self._unheld_reported or not self._needs_optimizers():
            return
        self._unheld_reported = True
        parameters = list(self._names.parameters())
        if missing := OptimizerParameters(parameters, self.watch.framework).unstepped(self._steps.optimizers):
            self.has_unheld = True
            said = unstepped_warning(missing, len(parameters))
            self._failures.warn("parameters of no optimizer", said)
            self._note("parameters", said)

    def _needs_optimizers(self) -> bool:
        config = self.watch.config
        of_weights = config.wg_distribution or config.param_distribution or config.mv_distribution
        return of_weights or config.update_ratio or config.mg_direction or config.ur_distribution

    def _seal(self, status: Status) -> None:
        try:
            self._submit(status)
        except BaseException:
            self._recorder.discard()  # this step's measurements must not become rows of the next step
            raise

    def _submit(self, status: Status) -> None:
        run = self._opened()
        if not self._dataflow_written:
            self._dataflow_written = True
            self._failures.guarded("following the flow of data", self._write_dataflow, "The manifest has none of it.")(run)
        pipeline = run.pipeline
        sealed = pipeline.reserve(self.clock.step)
        if sealed is None:
            self._recorder.discard()
            return
        try:
            sealed.step, sealed.status, sealed.ops = self.clock.step, status, self.watch.ops()
            sealed.micro_step_kinds, sealed.combined_kinds = self.micro_step_kinds()
            sealed.counted_kinds = self.counted_kinds
            self._recorder.seal(sealed)
        except BaseException:
            pipeline.give_back(sealed)
            raise
        pipeline.submit(sealed)

    def _write_dataflow(self, run: Run) -> None:
        """Write the dataflow of one step to the manifest. The other steps are nearly the same."""
        run.manifest.flows(observed_dataflow(self._recorder.table, self.modules.seen()))

    def micro_step_kinds(self) -> tuple[frozenset[str], frozenset[str]]:
        """Kinds with a row for each micro-step, and kinds whose micro-steps or operator calls are combined."""
        config = self.watch.config
        gradients = frozenset({"grad_unreduced"} if config.monitor_mbs_grad else ())
        activations = frozenset((*ACTIVATION_KINDS, *FORWARD_FEATURE_KINDS))
        calls = self.counted_kinds
        return (activations | gradients, calls) if config.micro_steps == "each" else (gradients, activations | calls)

    @property
    def counted_kinds(self) -> frozenset[str]:
        """Kinds whose rows are operator calls, combined and counted."""
        return frozenset({CALL_KIND} if self.watch.config.cc_distribution.enable else ())

    def _begin_step(self, *, before_a_turn: bool = False) -> None:
        self.begun = False
        self._batches = 0
        self._turns.clear()
        wanted = self.watch.ownership.monitored and self.schedule.collects(self.clock.step, self.collected)
        self._recorder.activate(wanted)
        if self._recorder.active:
            self._rows.begin_step(before_a_turn=before_a_turn)
        else:
            self._rows.pause()

    def _finish_first_step(self) -> None:
        if PROCESS.forks != self._forks:
            return
        self._finish_stacks()
        if self.on_first_step is not None:
            finish, self.on_first_step = self.on_first_step, None
            finish()

    def _finish_stacks(self) -> None:
        if self._stacks is not None:
            stacks, self._stacks = self._stacks, None
            stacks.remove()
            self._failures.guarded("writing stack_info.csv", lambda: stacks.write(self._run().directory))()

    def detach(self, *, keep: bool = True) -> None:
        """Remove every hook.

        Args:
            keep: Write the step in progress as incomplete, since it may contain the fault. If false, it is discarded.
        """
        self._steps.remove()
        if keep and not self._any_turn and max(self.clock.forward) >= self.clock.micro_steps:
            names = ", ".join(dict.fromkeys(type(one).__name__ for one in self._steps.optimizers))
            self._failures.warn("no optimizer's step", NEVER_STEPPED.format(names=names))
        was_active = self._recorder.active
        self._recorder.end_step()
        if was_active and self._recorder.has_rows:
            if keep:
                self._failures.guarded("sealing the last step", self._seal)("incomplete")
            else:
                self._recorder.discard()
        if keep and self.begun and PROCESS.forks == self._forks:
            self._finish_stacks()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        self._rows.remove()
        self.modules.remove()
        self._hooks.remove()
        for collector in (self._stacks, self.structure, self._features):
            if collector is not None:
                collector.remove()

    def shares(self, chunks: Sequence[Any], optimizers: Sequence[Any]) -> bool:
        """Whether this attachment already watches one of the chunks or one of the optimizers."""
        watched = [*self.watch.chunks, *self._steps.optimizers]
        return any(one is other for one in (*chunks, *optimizers) for other in watched if other is not None)


def _key(module: NamedModule) -> str:
    return f"{module.chunk}:{module.name}"


def _of_activations(modules: Iterable[NamedModule]) -> set[str]:
    """The kinds of activations that are recorded for at least one of the modules."""
    wanted = [one.wanted for one in modules if one.wanted is not None]
    forward = any(one.input.wanted or one.output.wanted for one in wanted)
    backward = any(one.input_grad.wanted or one.output_grad.wanted for one in wanted)
    return {kind for kind, asked in (("actv", forward), ("actv_grad", backward)) if asked}


def _no_change(_step: int) -> None:
    """Continue with the same configuration."""
