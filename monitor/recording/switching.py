"""Dynamic monitoring of one recording: applies the agreed configuration at each boundary between two steps."""

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

ApplyConfig = Callable[[MonitorConfig, Schedule, int], None]
"""Applies a configuration and a schedule between two steps, as if the given number of steps had been collected."""


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
    """Check that a configuration may be applied while training runs.

    Raises:
        ValueError: It has a field that is only allowed at the start, or not with dynamic monitoring.
    """
    if config.print_struct or (config.cc_distribution.enable and config.cc_distribution.cc_log_only):
        raise ValueError("print_struct and cc_log_only end a run after its first step: unset DYNAMIC_MONITOR to use them")
