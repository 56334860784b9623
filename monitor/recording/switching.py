"""Dynamic monitoring of one recording: at each boundary between two steps, what holds from there on."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from monitor.config import MonitorConfig
from monitor.config.model import CcDistribution
from monitor.coordinator.manifest import MOST_CONFIGURATIONS
from monitor.coordinator.manifest_format import ConfigurationRecord
from monitor.dynamic import FROM_ALERT, RETURN, ConfigJournal, Controller, JobConnection, Switch
from monitor.failures import Failures
from monitor.pipeline.process import PROCESS
from monitor.recording.run import Run
from monitor.recording.step_clock import Schedule

PutInForce = Callable[[MonitorConfig, Schedule, int], None]
"""Between two steps: record what a configuration asks for, in these steps, as if so many of them had been collected."""


class Switched(Protocol):
    """What a configuration is put in force on."""

    def job(self) -> JobConnection:
        """How this rank reaches the others."""

    def put_in_force(self, config: MonitorConfig, schedule: Schedule, collected: int) -> None:
        """See ``PutInForce``. Where it raises, nothing is recorded until the next change."""

    def collected(self) -> int:
        """How many steps of what is in force were to be collected so far."""


class Switching:
    """Asks at each boundary, and does what was agreed on.

    The first boundary is the end of the first step: rank, world and store are known by then. Until then nothing is recorded.

    Args:
        path: Of the configuration file.
        config: What was read there when the program started.

    Attributes:
        config: What is in force, with everything off while monitoring is.
    """

    def __init__(self, path: str, config: MonitorConfig, switched: Switched, failures: Failures) -> None:
        self.config = resting(config)
        self._path, self._first = path, config
        self._switched = switched
        self._failures = failures
        self._journal = _Journal()
        self._control: Controller | None = None
        self._schedule = Schedule.counted_from(0, self.config)
        self._on = self._ended = False
        self._set_aside: tuple[Schedule, int] | None = None
        self._forks = PROCESS.forks
        self.at_boundary: Callable[[int], object] = failures.guarded("switching the configuration", self._boundary)

    def opened(self, run: Run) -> None:
        """From now on there is a run, and a manifest of it."""
        run.tell_of_alerts(self.alert)
        self._journal.stands_in(run.manifest)

    def alert(self) -> None:
        """An alert rule has fired on this rank. Any thread; does not wait."""
        if self._control is not None:
            self._control.alert()

    def close(self) -> None:
        """Any number of times."""
        if self._control is not None and PROCESS.forks == self._forks:
            self._control.close()

    def _boundary(self, step: int) -> None:
        if PROCESS.forks != self._forks:  # where nothing is recorded, and nobody answers
            return
        if self._control is None:
            self._begin(step)
        elif (switch := self._control.begin(step)) is not None:
            self._follow(switch, step)
        elif self._on and self._set_aside is None and self._switched.collected() >= self._schedule.collect_times:
            self._ended = True
            self._control.ended()
            self._put_in_force(self.config.model_copy(update={"dynamic_on": False}), self._schedule, 0)

    def _begin(self, step: int) -> None:
        control = Controller(self._path, self._first, self._switched.job(), self._failures, step, accept_running)
        self._control = control
        weakref.finalize(self, control.retire).atexit = False  # at exit it is closed, within bounds
        control.start(self._journal)
        config = (control.begin(step) or control).config
        self._put_in_force(config, Schedule.counted_from(step, config), 0)

    def _follow(self, switch: Switch[MonitorConfig], step: int) -> None:
        """An alert brings a closer look for some steps, after which what held before goes on where it was."""
        schedule = Schedule.counted_from(switch.from_step, switch.config)
        if switch.origin == FROM_ALERT and not self._ended:
            if self._set_aside is None:
                self._set_aside = self._schedule, self._schedule.collected_before(switch.from_step)
            schedule = _closer(schedule, switch.config)
            self._put_in_force(switch.config, schedule, schedule.collected_before(step))
        elif switch.origin == RETURN and self._set_aside is not None:
            schedule, collected = self._set_aside
            self._set_aside = None
            self._put_in_force(switch.config, schedule, collected)
        elif switch.origin not in (FROM_ALERT, RETURN):
            self._ended, self._set_aside = False, None
            self._put_in_force(switch.config, schedule, schedule.collected_before(step))

    def _put_in_force(self, config: MonitorConfig, schedule: Schedule, collected: int) -> None:
        self._on = config.dynamic_on and config.collect_times > 0
        self.config = config if self._on else resting(config)
        self._schedule = schedule if self._on else replace(schedule, collect_times=0)
        try:
            self._switched.put_in_force(self.config, self._schedule, collected)
        except Exception as error:
            self._failures.report("putting a configuration in force", error, "Nothing is recorded until the next change.")
            self._on, self.config = False, resting(config)


class _Journal:
    """Keeps what is told until there is a manifest: a rank that is not monitored has none, or none yet."""

    def __init__(self) -> None:
        self._kept: deque[ConfigurationRecord] = deque(maxlen=MOST_CONFIGURATIONS)
        self._undecided_since: int | None = None
        self._manifest: ConfigJournal | None = None

    def stands_in(self, manifest: ConfigJournal) -> None:
        """Training thread: hand on what was told, and what will be."""
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
    """Of a closer look: its number of steps bounds it, and not what is left of ``collect_times``."""
    wanted = config.on_alert
    if wanted is None or "collect_times" in wanted.set.model_fields_set:
        return schedule
    return replace(schedule, collect_times=wanted.steps)


def resting(config: MonitorConfig) -> MonitorConfig:
    """``config`` with all off that records something."""
    off = {
        "xy_distribution",
        "wg_distribution",
        "mv_distribution",
        "param_distribution",
        "ur_distribution",
        "mg_direction",
        "recording_l2_features",
        "stack_info",
        "print_struct",
        "replica_check",
    }
    return config.model_copy(update={**dict.fromkeys(off, False), "cc_distribution": CcDistribution(), "collect_times": 0})


def accept_running(config: MonitorConfig) -> None:
    """Whether a configuration may come into force while training runs.

    Raises:
        ValueError: It asks for what only a start can do, or nobody can.
    """
    if config.print_struct or (config.cc_distribution.enable and config.cc_distribution.cc_log_only):
        raise ValueError("print_struct and cc_log_only end a run after its first step: unset DYNAMIC_MONITOR to use them")
