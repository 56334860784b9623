"""One recording: a table, the attachment that fills it, the run that writes it, and the recording's role in the job."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from monitor.config import MonitorConfig
from monitor.config.model import CHECKSUM, HIGHER_OPS, HISTOGRAM_OPS, CcDistribution, Intervals
from monitor.coordinator.batches import BatchNotes
from monitor.coordinator.manifest import MOST_CONFIGURATIONS
from monitor.coordinator.manifest_format import ConfigurationRecord
from monitor.dynamic import FROM_ALERT, RETURN, ConfigJournal, Controller, JobConnection, Switch
from monitor.failures import LOGGER, NEW_OPTIMIZERS, Failures
from monitor.pipeline.delivery import Watcher
from monitor.pipeline.process import PROCESS
from monitor.recording.attached_model import AttachmentSpec, Host, ModelNames
from monitor.recording.attachment import Attachment
from monitor.recording.backend import FrameworkAdapter, RecordingBackend
from monitor.recording.collectives import Communication
from monitor.recording.parameters import NOT_OF_THE_STEP, SUMMED_EARLY
from monitor.recording.recorder import Recorder
from monitor.recording.run import OPEN, ProcessTopology, RecordingSpec, Run, identity_of
from monitor.recording.startup_estimate import MissingKinds, PartlyUnseenGradients
from monitor.recording.step_clock import Schedule
from monitor.selection import clean_name
from monitor.series import SeriesTable
from monitor.stats.partials import KindRows, TensorLayout, combined_micro_steps

# --- Dynamic monitoring of one recording: applies the agreed configuration at each boundary between two steps.

ApplyConfig = Callable[[MonitorConfig, Schedule, int], None]
"""Applies a configuration and a schedule between two steps, as if the given number of steps had been collected."""


_BATCHES: Final = "the batches"
"""The name of the watcher that writes identifiers of batches, from the first one on."""


class ConfigTarget(Protocol):
    """The recording that a configuration is applied to."""

    def job(self) -> JobConnection:
        """The job: how this rank reaches the others."""

    def apply_config(self, config: MonitorConfig, schedule: Schedule, collected: int) -> None:
        """See ``ApplyConfig``. Where it raises, nothing is recorded until the next change."""

    def collected(self) -> int:
        """Number of steps of the current schedule that were scheduled for collection so far."""


class ConfigSwitcher:
    """Applies the configuration that the ranks agreed on, at each boundary between two steps.

    The first boundary is the end of the first step, when rank, world size and store are known. Nothing is recorded before.

    Args:
        path: Path of the configuration file.
        config: The configuration read at the start of the program.

    Attributes:
        config: The active configuration; with everything off while monitoring is off.
    """

    def __init__(self, path: str, config: MonitorConfig, switched: ConfigTarget, failures: Failures) -> None:
        self.config = with_recording_off(config)
        self._path, self._first = path, config
        self._switched = switched
        self._failures = failures
        self._journal = _PendingJournal()
        self._control: Controller | None = None
        self._schedule = Schedule.counted_from(0, self.config)
        self._on = self._ended = False
        self._suspended: tuple[Schedule, int] | None = None
        self._forks = PROCESS.forks
        self.at_boundary: Callable[[int], object] = failures.guarded("switching the configuration", self._boundary)

    def opened(self, run: Run) -> None:
        """Connect to a run and its manifest, which now exist."""
        run.notify_of_alerts(self.alert)
        self._journal.attach_manifest(run.manifest)

    def alert(self) -> None:
        """Report that an alert rule has fired on this rank. Safe on any thread; does not block."""
        if self._control is not None:
            self._control.alert()

    def close(self) -> None:
        """End dynamic monitoring. May be called repeatedly."""
        if self._control is not None and PROCESS.forks == self._forks:
            self._control.close()

    def _boundary(self, step: int) -> None:
        if PROCESS.forks != self._forks:  # a forked child records nothing, and has no connection to other ranks
            return
        if self._control is None:
            self._begin(step)
        elif (switch := self._control.begin(step)) is not None:
            self._follow(switch, step)
        elif self._on and self._suspended is None and self._switched.collected() >= self._schedule.collect_times:
            self._ended = True
            self._control.ended()
            self._apply_config(self.config.model_copy(update={"dynamic_on": False}), self._schedule, 0)

    def _begin(self, step: int) -> None:
        control = Controller(self._path, self._first, self._switched.job(), self._failures, step, accept_running)
        self._control = control
        weakref.finalize(self, control.retire).atexit = False  # at exit it is closed, within bounds
        control.start(self._journal)
        config = (control.begin(step) or control).config
        self._apply_config(config, Schedule.counted_from(step, config), 0)

    def _follow(self, switch: Switch[MonitorConfig], step: int) -> None:
        """Apply an agreed change. An alert applies ``on_alert`` for some steps, and then the previous schedule continues."""
        schedule = Schedule.counted_from(switch.from_step, switch.config)
        if switch.origin == FROM_ALERT and not self._ended:
            if self._suspended is None:
                self._suspended = self._schedule, self._schedule.collected_before(switch.from_step)
            schedule = _closer(schedule, switch.config)
            self._apply_config(switch.config, schedule, schedule.collected_before(step))
        elif switch.origin == RETURN and self._suspended is not None:
            schedule, collected = self._suspended
            self._suspended = None
            self._apply_config(switch.config, schedule, collected)
        elif switch.origin not in (FROM_ALERT, RETURN):
            self._ended, self._suspended = False, None
            self._apply_config(switch.config, schedule, schedule.collected_before(step))

    def _apply_config(self, config: MonitorConfig, schedule: Schedule, collected: int) -> None:
        self._on = config.dynamic_on and config.collect_times > 0
        self.config = config if self._on else with_recording_off(config)
        self._schedule = schedule if self._on else replace(schedule, collect_times=0)
        try:
            self._switched.apply_config(self.config, self._schedule, collected)
        except Exception as error:
            self._failures.report("applying a configuration", error, "Nothing is recorded until the next change.")
            self._on, self.config = False, with_recording_off(config)


class _PendingJournal:
    """Keeps entries until there is a manifest to write them to: a rank that is not monitored may have none."""

    def __init__(self) -> None:
        self._kept: deque[ConfigurationRecord] = deque(maxlen=MOST_CONFIGURATIONS)
        self._undecided_since: int | None = None
        self._manifest: ConfigJournal | None = None

    def attach_manifest(self, manifest: ConfigJournal) -> None:
        """Write all kept and future entries to ``manifest``. Training thread only."""
        self._manifest = manifest
        manifest.undecided(self._undecided_since)
        while self._kept:
            manifest.configured(self._kept.popleft())

    def configured(self, record: ConfigurationRecord) -> None:
        """See ``ConfigJournal``."""
        if self._manifest is not None:
            self._manifest.configured(record)
        else:
            self._kept.append(record)

    def undecided(self, since: int | None) -> None:
        """See ``ConfigJournal``."""
        self._undecided_since = since
        if self._manifest is not None:
            self._manifest.undecided(since)


def _closer(schedule: Schedule, config: MonitorConfig) -> Schedule:
    """The schedule after an alert: limited by the steps of ``on_alert``, and not by the rest of ``collect_times``."""
    wanted = config.on_alert
    if wanted is None or "collect_times" in wanted.set.model_fields_set:
        return schedule
    return replace(schedule, collect_times=wanted.steps)


def with_recording_off(config: MonitorConfig) -> MonitorConfig:
    """``config`` with all recording switched off."""
    off = dict.fromkeys((*Intervals.model_fields, "stack_info", "print_struct", "replica_check", "run_numbers"), False)
    return config.model_copy(update={**off, "cc_distribution": CcDistribution(), "collect_times": 0})


def accept_running(config: MonitorConfig) -> None:
    """Check that a configuration may be applied while training runs.

    Raises:
        ValueError: It has a field that is only allowed at the start, or not with dynamic monitoring.
    """
    if config.print_struct or (config.cc_distribution.enable and config.cc_distribution.cc_log_only):
        raise ValueError("print_struct and cc_log_only end a run after its first step: unset DYNAMIC_MONITOR to use them")


WatcherFactory = Callable[[SeriesTable], Watcher]
"""Creates a watcher of the rows of a recording, whose series are passed."""


class Recording:
    """The recording that one ``set_monitor`` started.

    Args:
        where: The position of this process in its job, once it is known.
        listening: Create watchers of each step's rows in addition to the alert rules, by the name for failure messages.

    Attributes:
        attachment: Set by ``attach``.
        switching: Switches the configuration under dynamic monitoring; else None.
    """

    attachment: Attachment

    def __init__(
        self,
        spec: RecordingSpec,
        where: Callable[[], ProcessTopology],
        backend: RecordingBackend,
        listening: Mapping[str, WatcherFactory] = MappingProxyType({}),
    ) -> None:
        self._spec, self._failures = spec, spec.failures
        self._where = where
        self._backend = backend
        self._start_step = spec.start_step
        self.series = SeriesTable()
        reader = backend.factories.new_reader(
            self.series,
            spec.config.eps,
            magnitudes=spec.config.counts_magnitudes,
            higher=spec.config.measures_higher_moments,
            check_sums=spec.config.measures_check_sums,
        )
        self._recorder = Recorder(reader)
        self._opened: Run | None = None
        self._closed = False
        self._communication: Communication | None = None
        self.switching: ConfigSwitcher | None = None
        self._apply_config: ApplyConfig = _nothing
        self._missing_kinds = MissingKinds(spec.failures, weakref.WeakMethod(self._notes))
        self._batches = BatchNotes()
        self._listening: dict[str, Watcher] = {
            "the check for missing kinds": self._missing_kinds,
            "the check for unseen gradients": PartlyUnseenGradients(spec.failures, self.series),
        }
        self._listening |= {name: make(self.series) for name, make in listening.items()}

    def listen(self, name: str, make: WatcherFactory) -> None:
        """Add a watcher of the rows, from the next step on."""
        self._listening[name] = make(self.series)
        if self.run is not None:
            self.run.listen(name, self._listening[name])

    def _notes(self) -> Mapping[str, object]:
        return {} if self._opened is None else self._opened.manifest.notes

    def _note_batch(self, step: int, given: Any) -> None:
        """Keep identifiers, which the writer thread writes. A loop without any pays nothing in a step."""
        self._batches.note(step, given)
        if _BATCHES not in self._listening:
            self.listen(_BATCHES, lambda _series: self._batches)

    def follow_file(self, apply_config: ApplyConfig) -> None:
        """Follow the configuration file from the end of the first step on.

        Args:
            apply_config: Applies a configuration between two steps by calling ``use``. If it raises, nothing is recorded.
        """
        self._apply_config = apply_config
        if self.switching is None:
            self.switching = ConfigSwitcher(self._spec.config_path, self._spec.config, self, self._failures)
            if self._opened is not None:
                self.switching.opened(self._opened)
        self.attachment.at_boundary = self.switching.at_boundary

    def use(self, watch: AttachmentSpec, names: ModelNames, schedule: Schedule, collected: int) -> None:
        """Change between two steps what is recorded, as if ``collected`` steps of ``schedule`` had been collected."""
        if watch.ownership.monitored or self._opened is not None:
            self.open().use(watch.config)
        self._recorder.use(
            watch.config.eps,
            magnitudes=watch.config.counts_magnitudes,
            higher=watch.config.measures_higher_moments,
            check_sums=watch.config.measures_check_sums,
        )
        self.attachment.use(watch, names, schedule, collected)
        self._expect()

    def _expect(self) -> None:
        of = self.attachment
        self._missing_kinds.expect(of.expected, of.clock.step, of.schedule.start_step, of.periods)

    def use_ops(self, ops: Iterable[str]) -> None:
        """Measure what the ops need, from the next tensor on."""
        magnitudes, higher, check_sums = (not some.isdisjoint(ops) for some in (HISTOGRAM_OPS, HIGHER_OPS, {CHECKSUM}))
        self._recorder.use(self._recorder.reader.eps, magnitudes=magnitudes, higher=higher, check_sums=check_sums)

    def apply_config(self, config: MonitorConfig, schedule: Schedule, collected: int) -> None:
        """Apply a configuration between two steps, with the function that ``follow_file`` received."""
        self._apply_config(config, schedule, collected)

    def collected(self) -> int:
        """Number of steps that were scheduled for collection so far."""
        return self.attachment.collected

    def job(self, purpose: str = "dynamic") -> JobConnection:
        """How this rank reaches the others; each purpose has its own keys in their store."""
        here = self._where()
        run = self.run
        identity = identity_of(here, self._spec.recorded.key, self._failures) if run is None else run.identity
        return JobConnection(
            here.rank,
            here.world_size,
            here.store,
            f"monitor/{purpose}/{identity.job_id}",
            self._backend.job.initialized,
            self._backend.job.asked_per_second,
        )

    def attach(self, watch: AttachmentSpec, names: ModelNames, start_step: int) -> None:
        """Hook the model and the optimizer. An earlier attachment is detached first."""
        rest: tuple[int, Schedule | None] = (0, None)
        if hasattr(self, "attachment"):
            self._count_new_optimizers(watch.framework)
            # The step in progress continues under its number. Writing its rows so far would write the step twice.
            self.attachment.detach(keep=False)
            rest = self.attachment.collected, None if self.attachment.clock.learning else self.attachment.schedule
        host = Host(self._recorder, self.open, self._failures, self._backend, self._note_batch)
        self.attachment = Attachment(watch, names, host, start_step, *rest)
        self._expect()
        self._show_steps()
        if (twin := OPEN.twin_of(self)) is not None:
            self._failures.advise(
                "a model that is watched twice",
                f"An earlier monitor of this model still records, to {twin.directory}, so each tensor is read twice. If you "
                "attached again to replace it, call its close() first.",
            )

    def _show_steps(self) -> None:
        """Let the run show which step training is in. It keeps the clock, and not the model."""
        if self._opened is not None and hasattr(self, "attachment"):
            clock = self.attachment.clock
            self._opened.manifest.watch_steps(lambda: clock.step)

    def open(self) -> Run:
        """The run, which the first call creates: before the first record at the latest, when rank and job are known."""
        if self._opened is None:
            here = self._where()
            self._failures.rank = here.rank
            beside = next(iter(OPEN.runs()), None)
            self._opened = Run(self._spec, here, beside, self.series, self._backend.job.versions(), self._listening)
            self._batches.directory = self._opened.directory
            OPEN.add(self)
            self._opened.compare_copies(self.job("copies"))
            self._show_steps()
            if self.switching is not None:
                self.switching.opened(self._opened)
            self._announce(here.rank, self._opened)
        return self._opened

    @property
    def watched(self) -> frozenset[int]:
        """The ids of the parameters that this recording watches."""
        named = self.attachment.names.parameters() if hasattr(self, "attachment") else ()
        return frozenset(id(one.tensor) for one in named)

    def _announce(self, rank: int, run: Run) -> None:
        if run.resumes_after < 0:
            LOGGER.info("[rank %d] recording to %s", rank, run.directory)
            return
        said = "[rank %d] append_output: recording from step %d to %s, which has steps up to %d"
        LOGGER.info(said, rank, self._start_step, run.directory, run.resumes_after)
        if self._start_step == 0:
            self._failures.warn(
                "resumed at step 0",
                f"append_output: steps 0 to {run.resumes_after} in {run.directory} will be overwritten. To continue after "
                "them, pass the step of the checkpoint as start_iteration.",
            )

    def current(self) -> tuple[Mapping[str, KindRows], list[TensorLayout]]:
        """The rows of the step in progress; after a step has ended, its rows, until the next forward begins."""
        table = self._recorder.table
        if self._recorder.has_rows:
            return self._now(), table.layouts
        return ({} if self.attachment.begun else self._just_ended()), table.layouts

    def _now(self) -> Mapping[str, KindRows]:
        combined = self.attachment.sealer.combined_kinds
        kinds = self._recorder.kinds_now()
        return {kind: combined_micro_steps(rows) if kind in combined else rows for kind, rows in kinds.items()}

    def _just_ended(self) -> Mapping[str, KindRows]:
        """The rows of the step that has just ended; empty if it was not collected, or was dropped.

        A step that ``close`` ended as incomplete keeps its number.
        """
        step = self.attachment.clock.step
        latest = self._opened.pipeline.latest(self._spec.config.close_seconds) if self._opened is not None else None
        return latest.kinds if latest is not None and latest.step in (step - 1, step) else {}

    def write_structure(self) -> Path:
        """Write ``module_struct.json`` of this rank."""
        run = self.open()
        path = run.base / "module_struct" / f"rank{self._where().rank}" / "module_struct.json"
        self.attachment.write_structure(path)
        return path

    def record_communication(self, communication: Communication) -> None:
        """Record the rows of communication operators in this recording."""
        self._communication = communication  # keeps it alive, so that it observes
        communication.record_into(self._recorder, self._where().groups, self._note)

    def end_communication_log(self, communication: Communication) -> None:
        """Write the communication log into the rank's directory, unless it was written before."""
        communication.end_log(self.open().directory)

    def _count_new_optimizers(self, framework: FrameworkAdapter) -> None:
        known = {*map(id, self.attachment.watch.framework.optimizers)}
        if self.run is not None and not known.issuperset(map(id, framework.optimizers)):
            manifest = self.run.manifest
            manifest.note(NEW_OPTIMIZERS, int(manifest.notes.get(NEW_OPTIMIZERS, 0)) + 1)

    def _note(self, key: str, said: str) -> None:
        if (run := self.run) is not None:
            run.manifest.note(key, said)

    @property
    def backward_leaves_what_is_given(self) -> bool:
        """Whether the optimizer of the step in progress receives the local gradients of backward: a single process reduces
        nothing, and plain frameworks do not change them. Loss scales and clipping are applied later.
        """
        watch = self.attachment.watch
        plain = watch.framework.name in ("torch", "mindspore") and not self._backend.job.has_others()
        rows_are_of_steps = not watch.config.monitor_mbs_grad and self.local_gradients_note is None
        return self._recorder.has_rows and plain and rows_are_of_steps

    @property
    def local_gradients_note(self) -> str | None:
        """Why ``grad_unreduced`` does not cover all micro-batches of a step; None if it does."""
        said = "" if self.run is None else str(self.run.manifest.notes.get("grad_unreduced", ""))
        several = self.attachment.clock.micro_steps > 1
        of_others = {SUMMED_EARLY, *(NOT_OF_THE_STEP if several else ())}
        return said if any(one in said for one in of_others) else None

    @property
    def run(self) -> Run | None:
        """The run; None before the first record, and in a forked child, where the run belongs to the parent."""
        return None if self._opened is None or self._opened.pipeline.inert else self._opened

    def detach(self) -> None:
        """Remove every hook, and submit the step in progress to the pipeline."""
        if not hasattr(self, "attachment"):
            return
        try:
            self._failures.guarded("detaching", self.attachment.detach)()
        finally:
            self._failures.guarded("closing the reader", self._recorder.reader.close)()
            if self.run is not None and self.attachment.clock.step > self._start_step:
                self.run.trained(self._start_step, self.attachment.clock.step - 1)

    def flush(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until every ended step is written. Whether all were."""
        return self.run is None or self._closed or self.run.pipeline.flush(seconds)

    def close(self) -> None:
        """Detach, write queued steps, and log what was lost. May be called repeatedly."""
        try:
            if self.switching is not None:
                self._failures.guarded("closing dynamic monitoring", self.switching.close)()
            self.detach()
        finally:
            self._close_run()

    def _close_run(self) -> None:
        run = self.run
        if run is None or self._closed:
            return
        self._closed = True
        OPEN.discard(self)
        complete = run.close()
        lost = sum(run.pipeline.dropped.values())
        if lost or not complete:
            said = f"{lost} step{' was' if lost == 1 else 's were'} dropped" if lost else "not everything could be written"
            LOGGER.warning("[rank %d] %s; see %s", self._failures.rank, said, run.directory / "manifest.json")


def _nothing(_config: MonitorConfig, _schedule: Schedule, _collected: int) -> None:
    """Ignore configurations until there is a file to follow."""


# --- The role of a model: the same on every rank that trains it, and different for other models of the process.

INNER: Final = ("_orig_mod", "module")
"""Attributes in which wrappers keep the wrapped module."""

MOST_WRAPPERS: Final = 8


def role_of(framework: FrameworkAdapter, backend: RecordingBackend, dp: Any, tp: Any, pp: Any) -> str:
    """The role of the model of ``framework``.

    For a pipeline the role does not depend on the module: stages may have different classes, or no trained parameter.

    Args:
        dp: The passed data-parallel group, or None. Ranks that do not belong to the group pass it as well.
        tp: The tensor-parallel group.
        pp: The pipeline-parallel group.
    """
    groups = [name for name, group in (("dp", dp), ("tp", tp), ("pp", pp)) if group is not None]
    *wrappers, model = _classes(framework.chunks[0]) if framework.chunks else [""]
    own = [] if is_staged(framework, backend, pp) else [model, *_training(framework, backend)]
    return " ".join([framework.name, *wrappers, *own, *(f"{name}_group" for name in groups)])


def names_of(framework: FrameworkAdapter, backend: RecordingBackend) -> Iterator[str]:
    """The names of all parameters, chunk by chunk."""
    for chunk, root in enumerate(framework.chunks):
        for name, _ in backend.modules.parts(root).parameters:
            yield f"{chunk}:{clean_name(name)}"


def shapes_of(framework: FrameworkAdapter, backend: RecordingBackend) -> Iterator[str]:
    """The shapes of all parameters, chunk by chunk; "" for a parameter that has none yet."""
    for root in framework.chunks:
        for _, parameter in backend.modules.parts(root).parameters:
            try:
                yield str(tuple(parameter.shape))
            except Exception:  # torch raises one for a parameter that is not initialised
                yield ""


def _training(framework: FrameworkAdapter, backend: RecordingBackend) -> tuple[str, str]:
    """The classes of the model's optimizers, and whether the model is trained: an average of weights is not."""
    parameters = (parameter for root in framework.chunks for _, parameter in backend.modules.parts(root).parameters)
    trained = any(getattr(parameter, "requires_grad", False) for parameter in parameters)
    classes = dict.fromkeys(type(one).__name__ for one in framework.optimizers)  # each class once
    return "+".join(classes), "trained" if trained else "frozen"


def is_staged(framework: FrameworkAdapter, backend: RecordingBackend, pp: Any) -> bool:
    """Whether other ranks may have other stages of the same model."""
    known = [_ranks_of(pp, backend), framework.groups().get("pp")]
    return any(ranks is not None and len(ranks) > 1 for ranks in known) or "torch.distributed.pipelining" in sys.modules


def _ranks_of(pp: Any, backend: RecordingBackend) -> Any:
    """The ranks of a group; None if it is no group. ``set_monitor`` raises an error where it needs the group."""
    try:
        return backend.job.group_ranks("process_group", pp)
    except (TypeError, ValueError):
        return None


def _classes(root: Any) -> list[str]:
    """The classes of the wrappers around a model, outermost first, and of the model."""
    found = [type(root).__name__]
    while len(found) < MOST_WRAPPERS and (root := _wrapped(root)) is not None:
        found.append(type(root).__name__)
    return found


def _wrapped(root: Any) -> Any:
    inner = (getattr(root, name, None) for name in INNER)
    return next((one for one in inner if hasattr(one, "named_parameters") or hasattr(one, "parameters_and_names")), None)
