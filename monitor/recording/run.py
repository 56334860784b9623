"""One rank's recording, put together: its directory, its manifest, its sinks and the pipeline that leads to them.

Framework-free: what a framework knows of the rank comes in as a ``Place``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from monitor.anomalies.alerts import Alarm, Alerts
from monitor.anomalies.event_files import EventFiles, OnlyEnd
from monitor.anomalies.rules import RULES
from monitor.anomalies.scanner import Listener, Scanner
from monitor.config import MonitorConfig
from monitor.coordinator.identity import JobIdentity, Store, agree
from monitor.coordinator.manifest import Manifest, RankFacts
from monitor.coordinator.manifest_format import Watched
from monitor.coordinator.output import prepare, set_aside
from monitor.coordinator.rank_directory import home
from monitor.failures import Failures
from monitor.pipeline.pipeline import Pipeline
from monitor.pipeline.process import PROCESS
from monitor.pipeline.protocols import Watcher
from monitor.series import SeriesTable
from monitor.sinks import make_sink
from monitor.sinks.protocol import Sink, SinkContext
from monitor.stats.table import SealedTable

LEFT_BY_EARLIER_RUNS: Final = ("anomaly_detected", "module_struct")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in its job a process stands.

    Attributes:
        groups: Ranks of the groups that this rank belongs to, by role (``dp``, ``tp``, ``pp``).
        store: The process group's store, through which ranks agree on one name; None for a process on its own.
        chunks: How many parts of the model this rank trains: its virtual pipeline stages.
    """

    rank: int = 0
    world_size: int = 1
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    store: Store | None = None
    chunks: int = 1


class Run:
    """Everything of a recording that outlives a step.

    Attributes:
        directory: The rank's directory.
        base: The directory of all ranks and runs.
        resumes_after: The last step that earlier runs have written to ``directory``; -1 if there is none.
    """

    def __init__(
        self,
        config: MonitorConfig,
        config_path: str,
        base: Path,
        place: Place,
        ordinal: int,
        beside: Run | None,
        series: SeriesTable,
        versions: Mapping[str, str],
        failures: Failures,
        listening: Mapping[str, Watcher] = MappingProxyType({}),
        watched: Watched | None = None,
    ) -> None:
        """Settle the name of the run with the other ranks and prepare its directory.

        Args:
            base: The directory of all ranks and runs.
            ordinal: How many recordings this process has begun before.
            beside: The run that this process is recording already, if any: what it has written is not an earlier run's.
            listening: Look at the rows of each step as well, by what a failure in them is called.
            watched: What ranks that watch the same have in common, who then agree on a name; None: they go by ``ordinal``.

        Raises:
            OutputError: The output directory cannot be made or written.
        """
        self.identity = identity_of(place, ordinal if watched is None else watched.key, failures)
        self.base = prepare(base)
        for name in LEFT_BY_EARLIER_RUNS:
            set_aside(self.base, name, (self.identity if beside is None else beside.identity).of_launch())
        span, formats = config.append_output, config.formats
        mine = home(self.base, place.rank, self.identity.timestamp, ordinal, span, formats, failures, watched)
        self.directory = mine.directory
        self.resumes_after = mine.earlier.timeline.newest
        self._listener: weakref.WeakMethod[Callable[[], object]] | None = None
        self._config, self._series = config, series
        self._sinks: dict[str, tuple[SinkContext, Sink]] = {}
        self._listening = dict(listening)
        self._scanner: Scanner | None = None
        self._events: EventFiles | None = None
        self._facts = facts = RankFacts(
            self.identity,
            place.rank,
            place.world_size,
            place.groups,
            versions,
            _as_dict(config),
            config_path,
            config.formats,
            place.chunks,
            ordinal,
            watched,
        )
        self.manifest = Manifest(self.directory, facts, series, failures, mine.earlier, mine.claim)
        self.pipeline: Pipeline[SealedTable] = Pipeline(
            self._sinks_for(config),
            self.manifest,
            failures,
            SealedTable,
            queue_bytes=config.queue_bytes,
            queue_wait_seconds=config.queue_wait_seconds,
            close_seconds=config.close_seconds,
            signal_seconds=config.signal_seconds,
            watchers=self._watchers_for(config),
        )

    def tell_of_alerts(self, listener: Callable[[], object]) -> None:
        """Call a method, for as long as its object lives, when an alert rule has fired and the configuration says what then.

        Args:
            listener: Called on the writer thread; must not wait.
        """
        self._listener = weakref.WeakMethod(listener)  # what is queued holds the run, and would hold a model with it

    def use(self, config: MonitorConfig) -> None:
        """From the next step on write and watch what ``config`` asks for. Does not wait."""
        if config.collect_times:
            self.manifest.also_in(config.formats)
        # Here and not on the writer thread: a process that ends while a library is loaded there ends before it, and badly.
        sinks = self._sinks_for(config)
        PROCESS.end_first()
        self.pipeline.rearrange(partial(self._arranged, config, sinks))

    def _arranged(self, config: MonitorConfig, sinks: Mapping[str, Sink]) -> tuple[Mapping[str, Sink], Mapping[str, Watcher]]:
        return sinks, self._watchers_for(config)

    def listen(self, name: str, watcher: Watcher) -> None:
        """From the next step on have another one look at the rows. Does not wait."""
        self._listening[name] = watcher
        sinks = {format_name: sink for format_name, (_, sink) in self._sinks.items()}
        self.pipeline.rearrange(partial(self._arranged, self._config, sinks))

    def _sinks_for(self, config: MonitorConfig) -> dict[str, Sink]:
        """Those that there are already go on, unless they were made for something else."""
        self._sinks = {name: self._sink(name, config) for name in config.formats}
        return {name: sink for name, (_, sink) in self._sinks.items()}

    def _sink(self, name: str, config: MonitorConfig) -> tuple[SinkContext, Sink]:
        steps = config.steps_per_record(name)
        context = SinkContext(self.directory, self._facts.rank, self._series, config.ndigits, steps, config.eps)
        known = self._sinks.get(name)
        return known if known is not None and known[0] == context else (context, make_sink(name, context))

    def _watchers_for(self, config: MonitorConfig) -> dict[str, Watcher]:
        return {**self._alerting(config), **self._listening}

    def _alerting(self, config: MonitorConfig) -> dict[str, Watcher]:
        """The alert rules, if there are any. Alerts come before files: a disk that hangs keeps none from being said."""
        if not config.alert.rules:
            self._scanner = None
            return {"the event files": Scanner((), (OnlyEnd(self._events),))} if self._events is not None else {}
        if self._scanner is None or (config.alert, config.on_alert) != (self._config.alert, self._config.on_alert):
            self._scanner = self._scanner_for(config)
        self._config = config
        return {"the alert rules": self._scanner}

    def _scanner_for(self, config: MonitorConfig) -> Scanner:
        rules = [RULES[rule.rule_name](**rule.args.model_dump()) for rule in config.alert.rules]
        if config.alert.dump and self._events is None:
            self._events = EventFiles(self.base, self.directory.name, self._facts, self._series)
        files = self._events if config.alert.dump else None
        listeners: list[Listener] = [Alerts(self._facts.rank, self._series, files.folder if files else None)]
        if config.on_alert is not None:
            listeners.append(Alarm(weakref.WeakMethod(self._alerted)))  # the writer thread must not keep the run
        return Scanner(rules, [*listeners, files] if files else listeners)

    def trained(self, first: int, last: int) -> None:
        """Training has ended: these were the steps that were watched, collected or not. Any thread."""
        if self._events is not None:
            self._events.trained = first, last

    def _alerted(self) -> None:
        if self._listener is not None and (tell := self._listener()) is not None:
            tell()

    def close(self) -> bool:
        """Write what is queued, within ``close_seconds``; whether everything was written. Any number of times."""
        return self.pipeline.close()


def identity_of(place: Place, name: str | int, failures: Failures) -> JobIdentity:
    """The job's; this rank's own, and marked so, where there are others that cannot be asked.

    Args:
        name: Of the recording, the same on all ranks that it is of.
    """
    identity = agree(place.store, name, failures)
    return replace(identity, agreed=False) if place.store is None and place.world_size > 1 else identity


def _as_dict(config: MonitorConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


# --- The end of a process that still records: steps in progress are handed on first, then everything is closed side by
# side.


class Recording(Protocol):
    """What a framework's room keeps of one model and its run."""

    @property
    def run(self) -> Run | None:
        """None before the first record, and in a process forked since: there it is another's."""

    def detach(self) -> None:
        """Take every hook away; the step in progress goes to the pipeline. Must not raise."""

    def close(self) -> None:
        """Detach and write what is left. Any number of times. Must not raise."""


class OpenRecordings:
    """The recordings of this process that have begun and were not closed.

    Held weakly: a model may be let go of without closing its recording.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[Recording] = weakref.WeakSet()
        self._at_end: Finalize | None = None

    def add(self, recording: Recording) -> None:
        """Close ``recording`` when the process ends, if nobody has by then."""
        self._open.add(recording)
        # Ahead of the pipelines, which are still to get the steps in progress.
        PROCESS.at_end(self.close_all)
        # A process that multiprocessing forked ends without those, and has forgotten what its parent registered here.
        if self._at_end is None or not self._at_end.still_active():
            self._at_end = Finalize(None, self.close_all, exitpriority=0)

    def discard(self, recording: Recording) -> None:
        """It was closed."""
        self._open.discard(recording)

    def runs(self) -> list[Run]:
        """The runs that this process is recording."""
        return [run for recording in list(self._open) if (run := recording.run) is not None]

    def close_all(self) -> None:
        """Close every recording of this process; those that hang take their time side by side."""
        mine = [recording for recording in list(self._open) if recording.run is not None]
        for recording in mine:
            recording.detach()
        if mine:
            PROCESS.close_all()
        for recording in mine:
            recording.close()


OPEN: Final = OpenRecordings()
"""Of this process, whose end comes once."""
