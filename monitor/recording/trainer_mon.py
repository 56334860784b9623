"""``ModelMonitor``, the part of ``TrainerMon`` that no framework affects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from monitor.anomalies.callbacks import AlertEvent
from monitor.config import MonitorConfig
from monitor.config.loading import configuration_of
from monitor.config.model import CcDistribution
from monitor.coordinator.manifest_format import RECORDINGS, RecordedModel
from monitor.coordinator.output import base_directory, prepare
from monitor.coordinator.ownership import Ownership, no_rank_monitored
from monitor.failures import LOGGER, EarlierFailure, Failures, giving_way_to
from monitor.forwarding.forwarding import forwarding_of, forwarding_to
from monitor.recording.arguments import count, flag, given
from monitor.recording.attached_model import AttachmentSpec, ModelNames
from monitor.recording.backend import FrameworkAdapter, RecordingBackend
from monitor.recording.deprecated import DeprecatedMethods
from monitor.recording.recorder import GRADIENT_KINDS, Metrics, of_kinds, reduced_from_local
from monitor.recording.recording import Recording, WatcherFactory, is_staged, names_of, role_of, shapes_of, with_recording_off
from monitor.recording.run import RecordingSpec, RunEnded
from monitor.recording.startup_estimate import announce
from monitor.recording.step_clock import MicroBatchCount, Schedule
from monitor.series import ACTIVATION_KINDS, CALL_KIND
from monitor.stats.ops import CALLS, known_ops

AlertCallback = Callable[[Sequence[AlertEvent]], object]

SpecOf = Callable[[MonitorConfig], AttachmentSpec]
"""What a configuration asks to record of one model."""


class ModelMonitor(DeprecatedMethods):
    """Records the training state of a model according to a configuration file.

    >>> monitor = TrainerMon("monitor_config.json", params_have_main_grad=False)  # doctest: +SKIP
    >>> monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)  # doctest: +SKIP

    Files go to ``$MONITOR_OUTPUT_DIR`` (``./monitor_output``). After ``set_monitor`` no failure of the monitor reaches the
    training loop: it is logged once and counted. Queued steps are written when the interpreter exits, at the latest. A monitor
    without references to it records as long as its model and optimizer live, and does not keep them alive.

    Args:
        config_file_path: A JSON file, in which comments are allowed; or a dictionary with the fields of one; or a
            ``MonitorConfig``.
        process_group: The pipeline-parallel group of this rank.
        params_have_main_grad: Whether gradients are in ``main_grad``, as in Megatron. A parameter without it has ``grad`` read.

    Raises:
        ConfigError: The configuration cannot be used. The message names the field, the value and what is allowed.
        TypeError: ``params_have_main_grad`` is neither True nor False.
        OutputError: The output directory cannot be created or written.

    Attributes:
        guessed: How many micro-batches a step has, where ``watch`` is not told.
    """

    guessed = 1
    _backend: ClassVar[RecordingBackend]

    def __init__(
        self,
        config_file_path: str | os.PathLike[str] | Mapping[str, Any] | MonitorConfig,
        process_group: Any = None,
        params_have_main_grad: bool = True,
        opt_ty: Any = None,
    ) -> None:
        """Create a monitor. ``set_monitor`` attaches it.

        Args:
            opt_ty: Accepted from older scripts, and ignored.
        """
        if opt_ty is not None:
            warnings.warn("opt_ty is ignored: remove the argument.", DeprecationWarning, stacklevel=2)
        config, path, dynamic = configuration_of(config_file_path)
        self._begin_with(config, path, dynamic, base_directory(), process_group, params_have_main_grad)

    @classmethod
    def of_config(cls, config: MonitorConfig, base: Path, *, params_have_main_grad: bool = True) -> Self:
        """A monitor that records to ``base``, with a configuration that is not read from a file.

        Raises:
            OutputError: The output directory cannot be created or written.
        """
        made = cls.__new__(cls)
        made._begin_with(config, "", False, base, None, params_have_main_grad)
        return made

    def _begin_with(
        self, config: MonitorConfig, path: str, dynamic: bool, base: Path, process_group: Any, params_have_main_grad: bool
    ) -> None:
        self._config = config
        self._config_path = path
        self._base = prepare(base)
        self._process_group = process_group
        self._main_grad = flag(params_have_main_grad, "params_have_main_grad")
        self._failures = Failures(self._backend.job.place().rank)
        self._ops = self._known(self._config.ops)
        self._warn_if_no_activations()
        self._recordings: list[Recording] = []
        self._closed = False
        self._said: set[str] = set()
        self._forwarding: dict[str, WatcherFactory] = {**forwarding_of(config.forward, self._failures)}
        self._dynamic = dynamic
        self._listening: dict[str, WatcherFactory] = {}
        self._alert_callbacks: list[AlertCallback] = []
        # Start now: the first step may communicate before a model is attached.
        made = None if dynamic else self._backend.factories.communication(config.cc_distribution, self._failures)
        self._communication = made

    def forward_to(self, call: Callable[[dict[str, float], int], object], **chosen: Any) -> None:
        """Call a function with numbers of each step: ``{"monitor/grad_reduced/layers.0.weight/norm": 1.5}``, and the step.

        Args:
            call: Called on a thread of the monitor, some steps late. For example ``run.log`` of an experiment tracker.
            chosen: ``kinds``, ``names``, ``ops`` and ``most``, as in the configuration field ``forward``.

        Raises:
            ConfigError: ``chosen`` cannot be used.
        """
        name = f"forwarding {len(self._listening) + 1} to {getattr(call, '__qualname__', call)}"
        self.listen(name, forwarding_to(call, chosen, self._failures))

    @property
    def ops(self) -> tuple[str, ...]:
        """The statistics that are written. They may still be changed for the step in progress."""
        return self._ops

    @ops.setter
    def ops(self, ops: Iterable[str]) -> None:
        self._ops = self._known(ops)
        for recording in self._recordings:
            recording.use_ops(self._ops)

    @property
    def config(self) -> MonitorConfig:
        """The configuration as read when the monitor was created."""
        return self._config

    def set_monitor(
        self,
        model: Any,
        grad_acc_steps: int,
        optimizer: Any,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Attach to a model and its optimizers.

        A second call for the same model or optimizer attaches again and continues the step count. A call for another model
        with another optimizer starts a separate recording in its own directory.

        Args:
            model: A module, or the list of chunks of a virtual pipeline.
            grad_acc_steps: Number of micro-batches per step.
            optimizer: The optimizer or its wrapper; several optimizers as a sequence, a dictionary or a container. A parameter
                is measured around the step of its own optimizer. A step ends when every optimizer has stepped or was skipped.
            dp_group: Data-parallel group. Tensors that its ranks replicate are written by its first monitored rank only.
            tp_group: Tensor-parallel group: the same, for parameters that are not split (``tensor_model_parallel``).
            start_iteration: Number of the first step.

        Raises:
            TypeError: An argument has a wrong type.
            ValueError: ``grad_acc_steps`` or ``start_iteration`` is out of range.
        """
        micro_steps, start = count("grad_acc_steps", grad_acc_steps, 1), count("start_iteration", start_iteration, 0)
        self._attach(self._framework_of(model, optimizer), micro_steps, (dp_group, tp_group), start)

    def watch(
        self, model: Any, optimizer: Any, *, micro_batches: int | None = None, dp_group: Any = None, start_iteration: int = 0
    ) -> None:
        """Attach as ``set_monitor`` does, and find out what it is not told.

        Args:
            micro_batches: How many a step has. By default the forwards of the first step show it, which has rows if it has
                ``guessed`` many.
            dp_group: Data-parallel group, where no wrapper of the model shows it. Of ranks that a wrapper shows to hold
                replicas, the first one writes.
        """
        start = count("start_iteration", start_iteration, 0)
        learned = 1 if self._ends_after_first_step else -self.guessed
        micro_steps = learned if micro_batches is None else count("micro_batches", micro_batches, 1)
        self._attach(self._framework_of(model, optimizer), micro_steps, (dp_group, None), start, claims=True)

    def watches(self, optimizer: Any) -> bool:
        """Whether the steps of an optimizer are followed."""
        return any(recording.attachment.shares((), (optimizer,)) for recording in self._recordings)

    def _framework_of(self, model: Any, optimizer: Any) -> FrameworkAdapter:
        chunks = self._backend.modules.chunks_of(model)
        return self._framework(chunks, given(optimizer, self._backend.factories.optimizer_expected))

    def _attach(
        self,
        framework: FrameworkAdapter,
        grad_acc_steps: int,
        groups: tuple[Any, Any],
        start: int,
        *,
        claims: bool = False,
    ) -> None:
        if self._closed:
            raise RuntimeError("This TrainerMon was closed. Create a new one.")
        watch_of = partial(self._watch_of, framework, grad_acc_steps, groups, claims)
        shared = next((one for one in self._recordings if one.attachment.shares(framework.chunks, framework.optimizers)), None)
        # Count on every rank, monitored or not: ranks agree on a name for each recording of a role.
        watched = self._watched(framework, groups) if shared is None else None
        config = self._first_config(shared)
        watch = watch_of(config)
        if not watch.ownership.monitored:
            self._close_communication()
        if not watch.ownership.monitored and not self._ends_after_first_step and not self._dynamic:
            self._warn_if_none_monitored(watch.ownership)
        elif shared is not None:
            if {*map(id, framework.optimizers)} <= {*map(id, shared.attachment.watch.framework.optimizers)}:
                said = "set_monitor was called again for the same model or optimizer. It is attached again, at the same step."
                self._failures.warn("attached twice", said)
            self._hook(shared, watch, self._names(watch), start or shared.attachment.settled(), watch_of)
        elif watched is not None:
            self._begin(watch, groups, start, watched, watch_of)

    def _watched(self, framework: FrameworkAdapter, groups: tuple[Any, Any]) -> RecordedModel:
        find = self._failures.guarded("telling this model from others", role_of)
        role = find(framework, self._backend, *groups, self._process_group) or framework.name
        return RECORDINGS.begin(role, names_of(framework, self._backend), shapes_of(framework, self._backend))

    def _first_config(self, shared: Recording | None) -> MonitorConfig:
        """The configuration that applies when a model is attached."""
        switching = None if shared is None else shared.switching
        followed = with_recording_off(self._config) if switching is None else switching.config
        return followed if self._dynamic else self._config

    def _watch_of(
        self, framework: FrameworkAdapter, grad_acc_steps: int, groups: tuple[Any, Any], claims: bool, config: MonitorConfig
    ) -> AttachmentSpec:
        ownership = replace(self._ownership(framework, *groups, config.module_ranks), claims=claims)
        return AttachmentSpec(framework.chunks, framework, grad_acc_steps, config, ownership, ops=lambda: self._ops)

    def _framework(self, chunks: Sequence[Any], optimizer: Any) -> FrameworkAdapter:
        try:
            found: FrameworkAdapter = self._backend.factories.framework_of(
                chunks, optimizer, main_grad=self._main_grad_of(chunks)
            )
        except EarlierFailure as failure:
            raise failure.error from None
        return found

    def _names(self, watch: AttachmentSpec) -> ModelNames:
        names = ModelNames([self._backend.modules.parts(chunk) for chunk in watch.chunks], watch.config)
        for said in (names.selection.warning(), names.selection.notice()):
            if said is not None and said not in self._said:
                self._said.add(said)
                LOGGER.warning("[rank %d] %s", watch.ownership.rank, said)
        return names

    def _begin(
        self,
        watch: AttachmentSpec,
        groups: tuple[Any, Any],
        start: int,
        watched: RecordedModel,
        watch_of: SpecOf,
    ) -> None:
        names = self._names(watch)
        groups_of = watch.framework.groups
        where = partial(
            self._backend.job.place, groups_of, len(watch.chunks), pp=self._process_group, dp=groups[0], tp=groups[1]
        )
        spec = RecordingSpec(self._config, self._config_path, self._base, watched, self._failures, start)
        first = self._listening | self._forwarding if not self._recordings else self._listening
        recording = Recording(spec, where, self._backend, first)
        if self._backend.job.is_settled() and watch.ownership.monitored:
            recording.open()
        try:
            self._hook(recording, watch, names, start, watch_of)
        except BaseException:
            recording.close()
            raise
        self._recordings.append(recording)
        if not self._dynamic and not watch.guesses:
            self._announce(watch, names, recording)

    def _hook(
        self,
        recording: Recording,
        watch: AttachmentSpec,
        names: ModelNames,
        start: int,
        watch_of: SpecOf,
    ) -> None:
        recording.attach(watch, names, start)
        recording.attachment.when_ended = partial(self._deliver_alerts, recording)
        if watch.guesses:
            learn = partial(self._learn, recording, watch, MicroBatchCount(-watch.grad_acc_steps))
            recording.attachment.at_boundary = self._failures.guarded("counting micro-batches", learn, "Nothing is recorded.")
        elif self._dynamic:
            recording.follow_file(partial(self._switch, recording, watch_of))
        if self._communication is not None:
            recording.record_communication(self._communication)
        if self._communication is not None or self._ends_after_first_step:
            recording.attachment.on_first_step = partial(self._after_first_step, recording)

    def _learn(self, recording: Recording, watch: AttachmentSpec, count: MicroBatchCount, step: int) -> None:
        """A step has ended, and shows how many micro-batches a step has: as many as were guessed, or others."""
        attachment, first = recording.attachment, not count.adopted
        seen = attachment.clock.ended_with
        if not count.step_ended(seen):
            return
        kept, right = (first and seen <= attachment.clock.micro_steps), count.adopted == attachment.clock.micro_steps
        micro_steps = attachment.clock.micro_steps = count.adopted

        def watch_of(config: MonitorConfig) -> AttachmentSpec:
            ownership = replace(watch.ownership, module_ranks=config.module_ranks)
            return replace(watch, config=config, grad_acc_steps=micro_steps, ownership=ownership)

        said = count.said(step, seen, late=first and (not kept or self._dynamic))
        if seen:
            LOGGER.info("[rank %d] %s", self._failures.rank, said)
        else:
            self._failures.advise("micro-batches", f"{said} Pass micro_batches if that is wrong.")
        if self._dynamic:
            recording.follow_file(partial(self._switch, recording, watch_of))
            attachment.at_boundary(step)
        elif kept and right:
            self._announce(watch_of(self._config), attachment.names, recording)
        else:
            config = self._config.model_copy(update={"ops": self._ops})
            self._switch(recording, watch_of, config, Schedule.of(config), attachment.collected)
        if recording.run is not None:
            recording.run.manifest.note("micro_steps", said)

    def _switch(
        self,
        recording: Recording,
        watch_of: SpecOf,
        config: MonitorConfig,
        schedule: Schedule,
        collected: int,
    ) -> None:
        """Switch to ``config`` between two steps. If that fails, nothing is recorded."""
        try:
            watch = watch_of(config)
            names = self._names(watch)
            self.ops = config.ops
            recording.use(watch, names, schedule, collected)
            self._switch_communication(recording, watch)
        except BaseException:
            recording.attachment.rest()
            if recording is self._recordings[0]:
                self._close_communication()
            raise
        if config.collect_times and watch.ownership.monitored:
            self._announce(watch, names, recording)

    def _switch_communication(self, recording: Recording, watch: AttachmentSpec) -> None:
        """Switch the recording of communication, whose rows belong to the first recording. Unchanged settings stay active."""
        wanted = watch.config.cc_distribution if watch.ownership.monitored else CcDistribution()
        if recording is not self._recordings[0] or (self._communication is not None and self._communication.wanted == wanted):
            return
        self._close_communication()
        self._communication = self._backend.factories.communication(wanted, self._failures)
        if self._communication is not None:
            recording.record_communication(self._communication)
            recording.attachment.on_first_step = partial(self._after_first_step, recording)

    def _announce(self, watch: AttachmentSpec, names: ModelNames, recording: Recording) -> None:
        reckon = self._failures.guarded("reckoning what a step will come to", announce)
        reckon(watch, names, self._base, recording.series, self._backend)

    @property
    def step(self) -> int:
        """The number of the step in progress, of the first attached model; 0 before a model is attached."""
        return self._recordings[0].attachment.clock.step if self._recordings else 0

    def log(self, **numbers: Any) -> None:
        """Record numbers of the step in progress, such as its loss, as rows of the kind ``run``.

        Call it before ``optimizer.step()``, which ends the step, or right after it: there a call that has a loss belongs to the
        step that has ended, and takes numbers of the host only. It does not wait for a device. Numbers belong to the first
        attached model. If a step logs a name several times, the mean is recorded; of ``tokens`` the sum. A logged number
        replaces one that the monitor records itself under this name, such as ``grad_norm``.

        Args:
            numbers: Numbers of Python or numpy, or tensors of one element. Anything else has no row and is reported once.
                ``batch`` is no number: it identifies the batch, as a text, a whole number, or a list or tuple of them.
        """
        if self._recordings and not self._closed:
            self._failures.guarded("logging numbers", self._recordings[0].attachment.log)(numbers)

    def batch_ended(self) -> None:
        """Report the end of a batch after which the optimizer may not have been called.

        Only the training loop knows that a call was left out, for example after a loss scale that was too large. When all
        batches of the step have ended, the step ends as skipped. Otherwise the next batch would count to the same step.
        """
        for recording in self._recordings:
            self._failures.guarded("ending a batch", recording.attachment.batch_ended)()

    def micro_batch_begins(self) -> None:
        """For trainers that call parts of a model and not the model, whose forwards count the micro-batches: one begins.

        ``micro_batch_ends`` must follow before the next one. A forward of the model in between does not count again.
        """
        for recording in self._recordings:
            self._failures.guarded("beginning a micro-batch", recording.attachment.micro_batch_begins)()

    def micro_batch_ends(self, result: Any = None) -> None:
        """The forward of the micro-batch has ended, with this result, such as its loss."""
        for recording in self._recordings:
            self._failures.guarded("ending a micro-batch", recording.attachment.micro_batch_ends)(result)

    def generate_wgrad_metrics(self) -> tuple[Metrics, Metrics]:
        """The weight gradients of the current step, ``(reduced, unreduced)``, each ``{tag: {op: value}}``.

        The current step is the step in progress. After a step has ended it is that step, until the next forward begins. Values
        that are not known yet are absent, and so are all values of a step that is not collected. In a single process, which
        reduces nothing, the reduced gradients before the optimizer's step are the local ones. May wait for the device.
        """
        reduced, unreduced = self._metrics(GRADIENT_KINDS)
        return reduced, unreduced

    def generate_xy_metrics(self) -> tuple[Metrics, Metrics]:
        """The activations of the current step and their gradients, in the form of ``generate_wgrad_metrics``."""
        activations, gradients = self._metrics(ACTIVATION_KINDS)
        return activations, gradients

    def generate_cc_metrics(self) -> Metrics:
        """The tensors of communication operators in the current step, ``{tag: {op: value}}``.

        The extra key ``calls`` is the number of calls that the values combine. Empty without ``cc_distribution``; otherwise as
        ``generate_wgrad_metrics``.
        """
        (rows,) = self._metrics((CALL_KIND,))
        return {tag: values for tag, values in rows.items() if CALLS in values}

    def listen(self, name: str, make: WatcherFactory) -> None:
        """Add a watcher that reads the rows of every recording, from the next step on.

        Args:
            name: Name of the watcher in messages about its failures.
            make: Creates the watcher for the series of a recording.
        """
        self._listening[name] = make
        for recording in self._recordings:
            recording.listen(name, make)

    def add_alert_callback(self, function: AlertCallback) -> None:
        """Call ``function`` with the alerts of the rules, for example to skip a batch, save a checkpoint or stop.

        It is called at the end of a step, in the thread that trains, with the ``AlertEvent`` of all steps that were judged
        since the last call, at most 100 of a step. Rules judge a step while the next ones are trained. What the function
        raises is raised by ``optimizer.step()``, as an exception of the program's own.
        """
        if not callable(function):
            raise TypeError(f"function: expected a function, got {type(function).__name__}")
        if not self._config.alert.rules:
            self._failures.advise("no rules", "add_alert_callback: there are no alert.rules, so there will be no alerts.")
        if not self._alert_callbacks:
            for recording in self._recordings:  # what was found before is not for it
                self._alerts_of(recording)
        self._alert_callbacks.append(function)

    def _alerts_of(self, recording: Recording) -> tuple[AlertEvent, ...]:
        return () if recording.run is None else tuple(recording.run.alerts.take())

    def _deliver_alerts(self, recording: Recording) -> None:
        """Call all callbacks; then the first of their exceptions is raised."""
        if not self._alert_callbacks or not (events := self._alerts_of(recording)):
            return
        errors = []
        for function in tuple(self._alert_callbacks):
            try:
                function(events)
            except Exception as error:
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"Another alert callback raised {other!r}.")
            raise EarlierFailure(errors[0]) from None

    @property
    def last_collected(self) -> int | None:
        """The last collected step that has ended, of the first attached model; None if there is none."""
        return self._recordings[0].attachment.last_collected if self._recordings else None

    @property
    def knows_every_optimizer(self) -> bool:
        """Whether each trained parameter of the first model belongs to a passed optimizer, as far as steps have shown."""
        return not self._recordings or not self._recordings[0].attachment.has_unheld

    @property
    def local_gradients_note(self) -> str | None:
        """Why local gradients of the first model do not cover all micro-batches of a step; None if they do."""
        return self._recordings[0].local_gradients_note if self._recordings else None

    def flush(self, seconds: float) -> bool:
        """Wait until every ended step is written and watched, up to ``seconds`` for each recording. Whether all were."""
        flushed = [recording.flush(seconds) for recording in self._recordings]
        return all(flushed)

    def close(self) -> None:
        """Detach, write queued steps within ``close_seconds``, and log what was lost. May be called repeatedly.

        Alerts of the last steps are passed to the callbacks; what one of them raises is raised.
        """
        if self._closed:
            return
        self._closed = True
        self._close_communication()
        with ExitStack() as closing:  # all are closed, also if one raises an error of training
            for recording in reversed(self._recordings):
                closing.callback(self._failures.guarded("closing", recording.close))
        for recording in self._recordings:
            self._failures.guarded("calling back", self._deliver_alerts)(recording)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with giving_way_to(kind):
            self.close()

    def _known(self, ops: Iterable[str]) -> tuple[str, ...]:
        known, unknown = known_ops([ops] if isinstance(ops, str) else ops)
        if unknown:
            LOGGER.warning("ops: %s are unknown and ignored. Recorded: %s.", list(unknown), list(known))
        return known

    def _ownership(self, framework: FrameworkAdapter, dp_group: Any, tp_group: Any, module_ranks: Sequence[int]) -> Ownership:
        here, group_ranks = self._backend.job.place(), self._backend.job.group_ranks
        given = {"dp_group": dp_group, "tp_group": tp_group, "process_group": self._process_group}
        dp, tp, pp = (group_ranks(role, group) for role, group in given.items())
        staged = is_staged(framework, self._backend, self._process_group)
        return Ownership(here.rank, here.world_size, module_ranks, dp, tp, pp, staged)

    def _warn_if_none_monitored(self, ownership: Ownership) -> None:
        warning = no_rank_monitored(self._config.module_ranks, ownership.world_size)
        if warning is not None and ownership.rank == 0:
            LOGGER.warning("%s", warning)

    def _warn_if_no_activations(self) -> None:
        if self._config.xy_distribution and self._config.forward_only and self._config.backward_only:
            LOGGER.warning("forward_only and backward_only are both true: no activations will be recorded.")

    def _main_grad_of(self, chunks: Sequence[Any]) -> bool:
        """Whether gradients are read from ``main_grad``."""
        del chunks
        return self._main_grad

    @property
    def _ends_after_first_step(self) -> bool:
        wanted = self._config.cc_distribution
        return not self._dynamic and (self._config.print_struct or (wanted.enable and wanted.cc_log_only))

    def _after_first_step(self, recording: Recording) -> None:
        """Write the log or the structure, and end the run if the configuration says so. All ranks end here, so a rank that
        cannot write must end as well.
        """
        if self._communication is not None:
            self._failures.guarded("writing the communication log", recording.end_communication_log)(self._communication)
        if not self._ends_after_first_step:
            return
        reason = "cc_log_only ends the run here, after the first step."
        if self._config.print_struct:
            path = self._failures.guarded("writing the structure", recording.write_structure)()
            outcome = f"was written to {path}" if path is not None else "could not be written"
            reason = f"The structure of the model {outcome}; print_struct ends the run here."
        self.close()
        LOGGER.info("[rank %d] %s", self._failures.rank, reason)
        raise RunEnded(reason)

    def _close_communication(self) -> None:
        if self._communication is not None:
            self._failures.guarded("closing communication", self._communication.close)()
            self._communication = None

    def _metrics(self, kinds: Sequence[str]) -> list[Metrics]:
        merged: list[Metrics] = [{} for _ in kinds]
        for recording in self._recordings:
            self._failures.guarded("reading the current step", self._add_metrics)(recording, kinds, merged)
        return merged

    def _add_metrics(self, recording: Recording, kinds: Sequence[str], merged: list[Metrics]) -> None:
        measured, layouts = recording.current()
        rank, counted = recording.attachment.watch.ownership.rank, recording.attachment.sealer.counted_kinds
        rows = of_kinds(kinds, measured, self._ops, recording.series, layouts, rank, counted)
        if kinds == GRADIENT_KINDS and not rows[0] and recording.backward_leaves_what_is_given:
            rows[0] = reduced_from_local(rows[1])
        for into, found in zip(merged, rows, strict=True):
            into.update(found)
