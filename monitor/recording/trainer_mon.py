"""``TrainerMon``: what users attach, as far as it is the same for every framework."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from monitor.config import MonitorConfig, load_config
from monitor.config.loading import is_dynamic
from monitor.config.model import CcDistribution
from monitor.coordinator.manifest_format import RECORDINGS, RecordedModel
from monitor.coordinator.output import base_directory, prepare
from monitor.coordinator.ownership import Ownership, no_rank_monitored
from monitor.failures import LOGGER, EarlierFailure, Failures
from monitor.recording.attachment_spec import Watch
from monitor.recording.backend import Backend, Framework
from monitor.recording.current_step import GRADIENT_KINDS, Metrics, of_kinds, reduced_by_nobody
from monitor.recording.model_names import ModelNames
from monitor.recording.protocols import RunEnded, count, given
from monitor.recording.recording import Listening, Recording, is_staged, names_of, role_of
from monitor.recording.startup_estimate import announce
from monitor.recording.step_clock import Schedule
from monitor.recording.switching import resting
from monitor.series import ACTIVATION_KINDS, CALL_KIND
from monitor.stats.histograms import HISTOGRAM_OPS
from monitor.stats.ops import CALLS, known_ops


class TrainerMon:
    """Records the training state of a model, as its configuration file says.

    >>> monitor = TrainerMon("monitor_config.json", params_have_main_grad=False)  # doctest: +SKIP
    >>> monitor.set_monitor(model, grad_acc_steps=1, optimizer=optimizer)  # doctest: +SKIP

    Files go to ``$MONITOR_OUTPUT_DIR`` (``./monitor_output``). After ``set_monitor`` no failure of the monitor reaches the
    training loop: it is logged once and counted. What is left at the end is written when the interpreter exits, at the latest.
    A monitor that nobody holds records for as long as its model and optimizer live, and keeps neither of them alive.

    Args:
        config_file_path: JSON, comments welcome.
        process_group: The pipeline-parallel group of this rank.
        params_have_main_grad: Whether gradients are kept in ``main_grad``, as Megatron does. Without one, ``grad`` is read.

    Raises:
        ConfigError: The configuration cannot be used. The message names the field, the value and what is allowed.
        OutputError: The output directory cannot be made or written.
    """

    _backend: ClassVar[Backend]
    _wrapped_optimizer: Any = None

    def __init__(
        self,
        config_file_path: str | os.PathLike[str],
        process_group: Any = None,
        params_have_main_grad: bool = True,
        opt_ty: Any = None,
    ) -> None:
        """Make a monitor, which is to be attached.

        Args:
            opt_ty: Accepted from older scripts, and ignored.
        """
        if opt_ty is not None:
            warnings.warn("opt_ty is ignored: the optimizer is recognised by itself.", DeprecationWarning, stacklevel=2)
        config = load_config(config_file_path)
        path = _spelled(config_file_path)
        self._begin_with(config, path, is_dynamic(path), base_directory(), process_group, params_have_main_grad)

    @classmethod
    def of_config(cls, config: MonitorConfig, base: Path, *, params_have_main_grad: bool = True) -> Self:
        """A monitor that records to ``base`` what a configuration asks for that no file holds.

        Raises:
            OutputError: The output directory cannot be made or written.
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
        self._main_grad = params_have_main_grad
        self._failures = Failures(self._backend.place().rank)
        self._ops = self._known(self._config.ops)
        self._say_if_no_activations()
        self._recordings: list[Recording] = []
        self._closed = False
        self._dynamic = dynamic
        self._listening: dict[str, Listening] = {}
        # Now, since communication of the first step may come before the model is there.
        self._communication = (
            None if self._dynamic else self._backend.communication(self._config.cc_distribution, self._failures)
        )

    @property
    def ops(self) -> tuple[str, ...]:
        """The statistics that are written; those of the step in progress may still be changed."""
        return self._ops

    @ops.setter
    def ops(self, ops: Iterable[str]) -> None:
        self._ops = self._known(ops)
        for recording in self._recordings:
            recording.count_magnitudes(not set(HISTOGRAM_OPS).isdisjoint(self._ops))

    @property
    def config(self) -> MonitorConfig:
        """What the configuration file said when the monitor was made."""
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

        Called again for the same model or optimizer it attaches anew and goes on counting; for another model with another
        optimizer it starts a recording of its own, in a directory of its own.

        Args:
            model: A module, or the list of chunks of a virtual pipeline.
            grad_acc_steps: Micro-batches a step.
            optimizer: The optimizer, or what wraps it; of several a sequence, a dictionary, or what holds them. Each parameter
                is measured around the step of the optimizer that has it, and a step ends when every optimizer has had its turn.
            dp_group: Data-parallel group: what its ranks hold alike is written by its first monitored rank alone.
            tp_group: Tensor-parallel group: the same, for parameters that are not split (``tensor_model_parallel``).
            start_iteration: Number of the first step.

        Raises:
            TypeError: An argument is not what it should be.
            ValueError: ``grad_acc_steps`` or ``start_iteration`` is out of range.
        """
        micro_steps, start = count("grad_acc_steps", grad_acc_steps, 1), count("start_iteration", start_iteration, 0)
        framework = self._framework(self._backend.chunks_of(model), given(optimizer, self._backend.optimizer_expected))
        self._attach(framework, micro_steps, (dp_group, tp_group), start)

    def set_wrapped_optimizer(self, optimizer: Any) -> None:
        """Deprecated: pass the optimizer to ``set_monitor``."""
        warnings.warn("set_wrapped_optimizer will go: pass the optimizer to set_monitor.", DeprecationWarning, stacklevel=2)
        self._wrapped_optimizer = optimizer

    def _attach(self, framework: Framework, grad_acc_steps: int, groups: tuple[Any, Any], start: int) -> None:
        if self._closed:
            raise RuntimeError("This TrainerMon was closed. Make a new one.")
        watch_of = partial(self._watch_of, framework, grad_acc_steps, groups)
        shared = next((one for one in self._recordings if one.attachment.shares(framework.chunks, framework.optimizers)), None)
        # Counted on every rank, also on one that is not monitored: ranks agree on a name for each recording of a role.
        watched = self._watched(framework, groups) if shared is None else None
        config = self._first_config(shared)
        watch = watch_of(config)
        if not watch.ownership.monitored:
            self._close_communication()
        if not watch.ownership.monitored and not self._ends_after_first_step and not self._dynamic:
            self._say_if_nobody(watch.ownership)
        elif shared is not None:
            said = "set_monitor was called again for the same model or optimizer: it is attached anew, and the count goes on."
            self._failures.warn("attached twice", said)
            self._hook(shared, watch, self._names(watch), start or shared.attachment.clock.step, watch_of)
        elif watched is not None:
            self._begin(watch, groups, start, watched, watch_of)

    def _watched(self, framework: Framework, groups: tuple[Any, Any]) -> RecordedModel:
        find = self._failures.guarded("telling this model from others", role_of)
        role = find(framework, self._backend, *groups, self._process_group) or framework.name
        return RECORDINGS.begin(role, names_of(framework, self._backend))

    def _first_config(self, shared: Recording | None) -> MonitorConfig:
        """What is in force when a model is attached."""
        if not self._dynamic:
            return self._config
        switching = None if shared is None else shared.switching
        return resting(self._config) if switching is None else switching.config

    def _watch_of(self, framework: Framework, grad_acc_steps: int, groups: tuple[Any, Any], config: MonitorConfig) -> Watch:
        ownership = self._ownership(framework, *groups, config.module_ranks)
        return Watch(framework.chunks, framework, grad_acc_steps, config, ownership, ops=lambda: self._ops)

    def _framework(self, chunks: Sequence[Any], optimizer: Any) -> Framework:
        try:
            found: Framework = self._backend.framework_of(chunks, optimizer, main_grad=self._main_grad_of(chunks))
        except EarlierFailure as failure:
            raise failure.error from None
        return found

    def _names(self, watch: Watch) -> ModelNames:
        names = ModelNames([self._backend.parts(chunk) for chunk in watch.chunks], watch.config)
        for said in (names.selection.warning(), names.selection.notice()):
            if said is not None:
                LOGGER.warning("[rank %d] %s", watch.ownership.rank, said)
        return names

    def _begin(
        self,
        watch: Watch,
        groups: tuple[Any, Any],
        start: int,
        watched: RecordedModel,
        watch_of: Callable[[MonitorConfig], Watch],
    ) -> None:
        names = self._names(watch)
        dp_group, tp_group = groups
        groups_of = watch.framework.groups
        where = partial(self._backend.place, groups_of, len(watch.chunks), pp=self._process_group, dp=dp_group, tp=tp_group)
        recording = Recording(
            self._config,
            self._config_path,
            self._base,
            where,
            watched.ordinal,
            self._failures,
            self._backend,
            start,
            self._listening,
            watched,
        )
        if self._backend.is_settled() and watch.ownership.monitored:
            recording.open()
        try:
            self._hook(recording, watch, names, start, watch_of)
        except BaseException:
            recording.close()
            raise
        self._recordings.append(recording)
        if not self._dynamic:
            self._announce(watch, names, recording)

    def _hook(
        self, recording: Recording, watch: Watch, names: ModelNames, start: int, watch_of: Callable[[MonitorConfig], Watch]
    ) -> None:
        recording.attach(watch, names, start)
        if self._dynamic:
            recording.follow_file(partial(self._switch, recording, watch_of))
        if self._communication is not None:
            recording.record_communication(self._communication)
        if self._communication is not None or self._ends_after_first_step:
            recording.attachment.on_first_step = partial(self._after_first_step, recording)

    def _switch(
        self,
        recording: Recording,
        watch_of: Callable[[MonitorConfig], Watch],
        config: MonitorConfig,
        schedule: Schedule,
        collected: int,
    ) -> None:
        """Between two steps: record what ``config`` asks for; nothing, if that cannot be."""
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

    def _switch_communication(self, recording: Recording, watch: Watch) -> None:
        """Of several recordings, the rows of communication stand with the first. What is listened to already goes on."""
        wanted = watch.config.cc_distribution if watch.ownership.monitored else CcDistribution()
        if recording is not self._recordings[0] or (self._communication is not None and self._communication.wanted == wanted):
            return
        self._close_communication()
        self._communication = self._backend.communication(wanted, self._failures)
        if self._communication is not None:
            recording.record_communication(self._communication)
            recording.attachment.on_first_step = partial(self._after_first_step, recording)

    def _announce(self, watch: Watch, names: ModelNames, recording: Recording) -> None:
        reckon = self._failures.guarded("reckoning what a step will come to", announce)
        reckon(watch, names, watch.config, recording.series, self._backend)

    @property
    def step(self) -> int:
        """The number of the step in progress, of the model that was attached first; 0 before that."""
        return self._recordings[0].attachment.clock.step if self._recordings else 0

    def batch_ended(self) -> None:
        """Say that a batch is through, where the optimizer may have been left out.

        Only who has called the optimizer knows that it will not come any more: after a loss scale that was too large, for one.
        A step whose batches are all through then ends as skipped; otherwise its numbering would go on with the next batch.
        """
        for recording in self._recordings:
            self._failures.guarded("ending a batch", recording.attachment.batch_ended)()

    def generate_wgrad_metrics(self) -> tuple[Metrics, Metrics]:
        """The weight gradients of the current step, ``(reduced, unreduced)``, each ``{tag: {op: value}}``.

        The current step is the one in progress or, until the next one begins with a forward, the one just ended. What is not
        known yet is absent, and so is all of a step that is not collected. In one process, which has nothing to reduce, the
        reduced gradients before the optimizer's step are those that backward has left. May wait for the device.
        """
        reduced, unreduced = self._metrics(GRADIENT_KINDS)
        return reduced, unreduced

    def generate_xy_metrics(self) -> tuple[Metrics, Metrics]:
        """The activations of the current step and their gradients, as ``generate_wgrad_metrics`` gives weight gradients."""
        activations, gradients = self._metrics(ACTIVATION_KINDS)
        return activations, gradients

    def generate_cc_metrics(self) -> Metrics:
        """What communication operators have moved in the current step, ``{tag: {op: value}}``.

        Beside the ops stands ``calls``, how many calls the values are of. Empty without ``cc_distribution``, otherwise as
        ``generate_wgrad_metrics``.
        """
        (rows,) = self._metrics((CALL_KIND,))
        return {tag: values for tag, values in rows.items() if CALLS in values}

    def listen(self, name: str, make: Listening) -> None:
        """Have another one look at the rows of every recording, from the next step on.

        Args:
            name: What a failure in it is called.
            make: Makes it, for the series of a recording.
        """
        self._listening[name] = make
        for recording in self._recordings:
            recording.listen(name, make)

    @property
    def last_collected(self) -> int | None:
        """The last step that ended and was collected, of the first model that was attached; None before it."""
        return self._recordings[0].attachment.last_collected if self._recordings else None

    @property
    def knows_every_optimizer(self) -> bool:
        """Whether each parameter of the first model that is trained has an optimizer that was passed, as far as a step has
        shown.
        """
        return not self._recordings or not self._recordings[0].attachment.has_unheld

    @property
    def local_gradients_note(self) -> str | None:
        """Why local gradients of the first model are not those of all micro-batches of a step; None where they are."""
        return self._recordings[0].local_gradients_note if self._recordings else None

    def flush(self, seconds: float) -> bool:
        """Whether, within ``seconds`` for each recording, every step that has ended was written and looked at."""
        flushed = [recording.flush(seconds) for recording in self._recordings]
        return all(flushed)

    def close(self) -> None:
        """Detach, write what is left within ``close_seconds``, and say what was lost. Any number of times."""
        if self._closed:
            return
        self._closed = True
        self._close_communication()
        for recording in self._recordings:
            self._failures.guarded("closing", recording.close)()

    def __enter__(self) -> TrainerMon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self, ops: Iterable[str]) -> tuple[str, ...]:
        known, unknown = known_ops([ops] if isinstance(ops, str) else ops)
        if unknown:
            LOGGER.warning("ops %s are not known and left out. Recorded: %s.", list(unknown), list(known))
        return known

    def _ownership(self, framework: Framework, dp_group: Any, tp_group: Any, module_ranks: Sequence[int]) -> Ownership:
        here, group_ranks = self._backend.place(), self._backend.group_ranks
        given = {"dp_group": dp_group, "tp_group": tp_group, "process_group": self._process_group}
        dp, tp, pp = (group_ranks(role, group) for role, group in given.items())
        staged = is_staged(framework, self._backend, self._process_group)
        return Ownership(here.rank, here.world_size, module_ranks, dp, tp, pp, staged)

    def _say_if_nobody(self, ownership: Ownership) -> None:
        warning = no_rank_monitored(self._config.module_ranks, ownership.world_size)
        if warning is not None and ownership.rank == 0:
            LOGGER.warning("%s", warning)

    def _say_if_no_activations(self) -> None:
        if self._config.xy_distribution and self._config.forward_only and self._config.backward_only:
            LOGGER.warning("forward_only and backward_only are both true: no activations will be recorded.")

    def _main_grad_of(self, chunks: Sequence[Any]) -> bool:
        """Whether gradients are looked for in ``main_grad``."""
        del chunks
        return self._main_grad

    @property
    def _ends_after_first_step(self) -> bool:
        wanted = self._config.cc_distribution
        return not self._dynamic and (self._config.print_struct or (wanted.enable and wanted.cc_log_only))

    def _after_first_step(self, recording: Recording) -> None:
        """The other ranks end here, too: that this one could not write must not leave it to wait for them."""
        if self._communication is not None:
            self._failures.guarded("writing the communication log", recording.end_communication_log)(self._communication)
        if not self._ends_after_first_step:
            return
        reason = "cc_log_only ends the run here, after the first step."
        if self._config.print_struct:
            path = self._failures.guarded("writing the structure", recording.write_structure)()
            told = f"was written to {path}" if path is not None else "could not be written"
            reason = f"The structure of the model {told}; print_struct ends the run here."
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
        rank, counted = recording.attachment.watch.ownership.rank, recording.attachment.counted_kinds
        rows = of_kinds(kinds, measured, self._ops, recording.series, layouts, rank, counted)
        if kinds == GRADIENT_KINDS and not rows[0] and recording.backward_leaves_what_is_given:
            rows[0] = reduced_by_nobody(rows[1])
        for into, found in zip(merged, rows, strict=True):
            into.update(found)


def _spelled(path: str | os.PathLike[str]) -> str:
    """The absolute path, as text that every file can hold."""
    return os.path.abspath(os.path.expanduser(os.fsdecode(path))).encode("utf-8", "backslashreplace").decode()
