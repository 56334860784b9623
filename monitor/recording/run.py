"""The output side of one rank's recording: its directory, manifest, sinks, watchers and pipeline, and its end at exit.

It does not depend on a framework, which passes the position of the rank as a ``ProcessTopology``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from monitor.anomalies.bit_checks import BitChecks
from monitor.anomalies.callbacks import AlertQueue
from monitor.anomalies.corruption import CorruptionAlerts
from monitor.anomalies.listeners import Alarm, Alerts, EndOnlyListener, EventFiles
from monitor.anomalies.rules import RULES
from monitor.anomalies.scanner import FindingListener, Scanner
from monitor.config import AUTO, MonitorConfig
from monitor.coordinator.job_store import StoreConnection
from monitor.coordinator.manifest import Manifest
from monitor.coordinator.manifest_format import RecordedModel
from monitor.coordinator.output import IdentityStore, JobIdentity, agree, prepare, rotate_stale_output
from monitor.coordinator.rank_facts import RankFacts
from monitor.coordinator.resume import RestartedRun, resolve_rank_directory
from monitor.coordinator.thinning import DiskBound, ThinningRule
from monitor.failures import Failures
from monitor.pipeline.delivery import Watcher
from monitor.pipeline.pipeline import Pipeline, PipelineLimits
from monitor.pipeline.process import PROCESS
from monitor.series import SeriesTable
from monitor.sinks import make_sink
from monitor.sinks.protocol import Sink, SinkContext
from monitor.stats.table import SealedTable

LEFT_BY_EARLIER_RUNS: Final = ("anomaly_detected", "module_struct")


@dataclass(frozen=True, slots=True)
class ProcessTopology:
    """The position of a process in its job.

    Attributes:
        groups: Ranks of the groups that this rank belongs to, by role (``dp``, ``tp``, ``pp``).
        store: The process group's store, through which ranks agree on one name; None for a single process.
        chunks: Number of model chunks that this rank trains: its virtual pipeline stages.
    """

    rank: int = 0
    world_size: int = 1
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    store: IdentityStore | None = None
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class RecordingSpec:
    """What is recorded, of which model, and below which directory.

    Attributes:
        config: The configuration read at the start of the program.
        config_path: Its file; "" if there is none.
        base: The directory of all ranks and runs.
        recorded: Identifies the model on all ranks, which agree on a name of the run by it.
        start_step: Number of the first step.
    """

    config: MonitorConfig
    config_path: str
    base: Path
    recorded: RecordedModel
    failures: Failures
    start_step: int = 0


class Run:
    """The state of a recording that outlives a step.

    Attributes:
        directory: The rank's directory.
        base: The directory of all ranks and runs.
        resumes_after: The last step that earlier runs wrote to ``directory``; -1 if there is none.
        alerts: What the rules found, for the training program's own code.
    """

    def __init__(
        self,
        spec: RecordingSpec,
        place: ProcessTopology,
        beside: Run | None,
        series: SeriesTable,
        versions: Mapping[str, str],
        listening: Mapping[str, Watcher] = MappingProxyType({}),
    ) -> None:
        """Agree with the other ranks on the name of the run, and prepare its directory.

        Args:
            beside: Another open run of this process, if any. Its files must not be treated as those of an earlier run.
            listening: Additional watchers of each step's rows, by the name for failure messages.

        Raises:
            OutputError: The output directory cannot be created or written.
        """
        config, recorded, failures = spec.config, spec.recorded, spec.failures
        self._failures = failures
        self.identity = identity_of(place, recorded.key, failures)
        self.base = prepare(spec.base)
        for name in LEFT_BY_EARLIER_RUNS:
            rotate_stale_output(self.base, name, (self.identity if beside is None else beside.identity).of_launch())
        mine = resolve_rank_directory(
            self.base,
            place.rank,
            self.identity.timestamp,
            recorded.ordinal,
            config.append_output,
            config.formats,
            failures,
            RestartedRun(recorded, place.world_size, place.groups, spec.start_step),
        )
        self.directory = mine.directory
        self.resumes_after = mine.earlier.timeline.newest
        self._listener: weakref.WeakMethod[Callable[[], object]] | None = None
        self._config, self._series = config, series
        self._sinks: dict[str, tuple[SinkContext, Sink]] = {}
        self._listening = dict(listening)
        self.alerts = AlertQueue(place.rank, series)
        self._scanner: Scanner | None = None
        self._events: EventFiles | None = None
        self._trained: tuple[int, int] | None = None
        self._facts = facts = RankFacts(
            self.identity,
            place.rank,
            place.world_size,
            place.groups,
            versions,
            _as_dict(config),
            spec.config_path,
            config.formats,
            place.chunks,
            recorded.ordinal,
            recorded,
        )
        self.manifest = Manifest(self.directory, facts, series, failures, mine.earlier, mine.lock)
        self.manifest.bound = DiskBound(self.directory, failures, config.max_output_bytes, _thinning(config))
        self._corruption = CorruptionAlerts(place.rank, self.manifest, weakref.WeakMethod(self._alerted))
        self._bit_checks = BitChecks(place.rank, series, self._corruption, failures, config.module_ranks)
        if config.append_output == AUTO:  # a restart finds the directory by its manifest, however early this run is killed
            failures.guarded("saving the first manifest", self.manifest.save)()
        self.pipeline: Pipeline[SealedTable] = Pipeline(
            self._sinks_for(config),
            self.manifest,
            failures,
            SealedTable,
            PipelineLimits(
                queue_bytes=config.queue_bytes,
                queue_wait_seconds=config.queue_wait_seconds,
                close_seconds=config.close_seconds,
                signal_seconds=config.signal_seconds,
            ),
            watchers=self._watchers_for(config),
        )

    def notify_of_alerts(self, listener: Callable[[], object]) -> None:
        """Call a method, as long as its object lives, when bits are wrong, or a rule has fired and ``on_alert`` is configured.

        Args:
            listener: Called on any thread of the monitor; must not block.
        """
        self._listener = weakref.WeakMethod(listener)  # queued steps hold the run, which must not keep a model alive

    def compare_copies(self, job: StoreConnection) -> None:
        """Compare the bits of copies with other ranks while training runs, where replicas are checked."""
        self._bit_checks.compare_with(job)

    def use(self, config: MonitorConfig) -> None:
        """Use the sinks and watchers of ``config`` from the next step on. Does not block."""
        if config.collect_times:
            self.manifest.also_in(config.formats)
        # Not on the writer thread: loading a library there while the process exits can crash it.
        sinks = self._sinks_for(config)
        self._bit_checks.use(config.module_ranks)
        if self.manifest.bound is not None:
            self.manifest.bound.use(config.max_output_bytes, _thinning(config))
        PROCESS.end_first()
        self.pipeline.rearrange(partial(self._arranged, config, sinks))

    def _arranged(self, config: MonitorConfig, sinks: Mapping[str, Sink]) -> tuple[Mapping[str, Sink], Mapping[str, Watcher]]:
        return sinks, self._watchers_for(config)

    def listen(self, name: str, watcher: Watcher) -> None:
        """Add a watcher of the rows, from the next step on. Does not block."""
        self._listening[name] = watcher
        sinks = {format_name: sink for format_name, (_, sink) in self._sinks.items()}
        self.pipeline.rearrange(partial(self._arranged, self._config, sinks))

    def _sinks_for(self, config: MonitorConfig) -> dict[str, Sink]:
        """The sinks of ``config``. Existing sinks are kept if their context is unchanged."""
        self._sinks = {name: self._sink(name, config) for name in config.formats}
        return {name: sink for name, (_, sink) in self._sinks.items()}

    def _sink(self, name: str, config: MonitorConfig) -> tuple[SinkContext, Sink]:
        steps = config.steps_per_record(name)
        rank, world_size = self._facts.rank, self._facts.world_size
        context = SinkContext(self.directory, rank, self._series, config.ndigits, steps, config.eps, world_size)
        known = self._sinks.get(name)
        return known if known is not None and known[0] == context else (context, make_sink(name, context))

    def _watchers_for(self, config: MonitorConfig) -> dict[str, Watcher]:
        checking = {"the check of bits": self._bit_checks} if config.checks_replicas else {}
        return {**checking, **self._alerting(config), **self._listening}  # what is checked becomes events of the alert rules

    def _alerting(self, config: MonitorConfig) -> dict[str, Watcher]:
        """The alert rules, if there are any. Alerts precede files, so that a hanging disk delays no alert."""
        if not config.alert.rules:
            self._scanner = None
            ended = () if self._events is None else (EndOnlyListener(self._events),)
            return {"the event files": Scanner((), self._series, ended)} if ended else {}
        if self._scanner is None or (config.alert, config.on_alert) != (self._config.alert, self._config.on_alert):
            self._scanner = self._scanner_for(config)
        self._config = config
        return {"the alert rules": self._scanner}

    def _scanner_for(self, config: MonitorConfig) -> Scanner:
        rules = [RULES[rule.rule_name](**rule.args.model_dump(exclude_none=True)) for rule in config.alert.rules]
        if config.alert.dump and self._events is None:
            self._events = EventFiles(self.base, self.directory.name, self._facts, self._series, self._failures)
            self._events.trained = self._trained  # after the assignment above: training may end on its thread meanwhile
        files = self._corruption.events = self._events if config.alert.dump else None
        shown = Alerts(self._facts.rank, self._series, files.folder if files else None)
        listeners: list[FindingListener] = [shown, Alarm(weakref.WeakMethod(self.manifest.alert)), self.alerts]
        if config.on_alert is not None:
            listeners.append(Alarm(weakref.WeakMethod(self._on_alert)))  # the writer thread must not keep the run
        return Scanner(rules, self._series, [*listeners, files] if files else listeners)

    def trained(self, first: int, last: int) -> None:
        """Set the first and last watched step, collected or not, when training has ended. Safe on any thread."""
        self._trained = first, last
        if self._events is not None:
            self._events.trained = self._trained

    def _on_alert(self, _step: int) -> None:
        self._alerted()

    def _alerted(self) -> None:
        if self._listener is not None and (tell := self._listener()) is not None:
            tell()

    def close(self) -> bool:
        """Write queued steps within ``close_seconds``. Whether all were written. May be called repeatedly."""
        complete = self.pipeline.close()
        self._bit_checks.stop()
        return complete


def identity_of(place: ProcessTopology, name: str, failures: Failures) -> JobIdentity:
    """The identity of the job. Without a store to reach other ranks it is this rank's own, marked as not agreed.

    Args:
        name: Name of the recording, the same on all of its ranks.
    """
    identity = agree(place.store, name, failures)
    return replace(identity, agreed=False) if place.store is None and place.world_size > 1 else identity


def _thinning(config: MonitorConfig) -> ThinningRule:
    return ThinningRule(max(map(config.steps_per_record, config.formats)), config.step_interval)


def _as_dict(config: MonitorConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


class RunEnded(SystemExit):
    """The monitor ends the run on every rank: ``print_struct`` or ``cc_log_only`` is done.

    Raised from ``optimizer.step()`` after all files are complete. As a ``SystemExit`` with status 0 it passes through
    ``except Exception`` and ends the process without a traceback.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


# --- The end of a process that still records: first submit the steps in progress, then close all pipelines in parallel.


class OpenRecording(Protocol):
    """The recording of one model, which is closed when the process ends."""

    @property
    def run(self) -> Run | None:
        """The run; None before the first record, and in a forked child, where the run belongs to the parent."""

    @property
    def watched(self) -> frozenset[int]:
        """The ids of the parameters that it watches."""

    def detach(self) -> None:
        """Remove every hook, and submit the step in progress to the pipeline. Raises only an error of training, afterwards."""

    def close(self) -> None:
        """Detach and write queued steps. May be called repeatedly. Raises only an error of training, afterwards."""


class OpenRecordings:
    """The open recordings of this process.

    Held weakly: a model may be freed without closing its recording.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[OpenRecording] = weakref.WeakSet()
        self._at_end: Finalize | None = None

    def add(self, recording: OpenRecording) -> None:
        """Close ``recording`` when the process ends, unless it was closed before."""
        self._open.add(recording)
        # Before the pipelines are closed, which must receive the steps in progress.
        PROCESS.at_end(self.close_all)
        # A child that multiprocessing forked skips those handlers at exit, and loses the finalizers of its parent.
        if self._at_end is None or not self._at_end.still_active():
            self._at_end = Finalize(None, self.close_all, exitpriority=0)

    def discard(self, recording: OpenRecording) -> None:
        """Remove a recording that was closed."""
        self._open.discard(recording)

    def runs(self) -> list[Run]:
        """The runs that this process is recording."""
        return [run for recording in list(self._open) if (run := recording.run) is not None]

    def twin_of(self, recording: OpenRecording) -> Run | None:
        """The run of another recording of the same parameters, if there is one."""
        mine = recording.watched
        others = (one for one in list(self._open) if one is not recording and mine and one.watched == mine)
        return next((run for one in others if (run := one.run) is not None), None)

    def close_all(self) -> None:
        """Close every recording of this process, in parallel, so that timeouts do not add up."""
        mine = [recording for recording in list(self._open) if recording.run is not None]
        with ExitStack() as last_to_first:  # all of it happens, whatever raises an error of training
            for recording in mine:
                last_to_first.callback(recording.close)
            if mine:
                last_to_first.callback(PROCESS.close_all)
            for recording in mine:
                last_to_first.callback(recording.detach)


OPEN: Final = OpenRecordings()
"""The open recordings of this process; one per process, because exit handlers run once."""
