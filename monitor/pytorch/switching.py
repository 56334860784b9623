"""Dynamic monitoring of one recording: at each boundary between two steps, what holds from there on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from monitor.config import MonitorConfig
from monitor.config.model import CcDistribution
from monitor.dynamic import FROM_ALERT, FROM_FILE, Control, Job, Journal, Switch
from monitor.failures import Failures
from monitor.pipeline.process import PROCESS
from monitor.ranks.records import ConfigurationRecord


class Switched(Protocol):
    """What a configuration is put in force on. May raise: then nothing is recorded until the next change."""

    def job(self) -> Job:
        """How this rank reaches the others."""

    def journal(self) -> Journal | None:
        """Where it is written down what held when; None on a rank that has no directory."""

    def put_in_force(self, config: MonitorConfig, collected: int) -> None:
        """Record what ``config`` asks for, from the step to come on, as if so many steps of it had been collected."""

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
        self._control: Control | None = None
        self._on = self._ended = False
        self._collected_before = 0
        self._forks = PROCESS.forks
        self.at_boundary: Callable[[int], object] = failures.guarded("switching the configuration", self._boundary)

    def alert(self) -> None:
        """An alert rule has fired on this rank. Any thread; does not wait."""
        if self._control is not None:
            self._control.alert()

    def close(self) -> None:
        """Any number of times."""
        if self._control is not None and PROCESS.forks == self._forks:
            self._control.close()

    def _boundary(self, step: int) -> None:
        if self._control is None:
            if PROCESS.forks != self._forks:
                return
            self._control = self._started(step)
            self._put_in_force((self._control.begin(step) or self._control).config)
        elif (switch := self._control.begin(step)) is not None:
            self._follow(switch)
        elif self._on and self._switched.collected() >= self.config.collect_times:
            self._ended = True
            self._control.ended()
            self._put_in_force(self.config.model_copy(update={"dynamic_on": False}))

    def _follow(self, switch: Switch[MonitorConfig]) -> None:
        """An alert brings a closer look for some steps, after which what held before goes on where it was."""
        if switch.origin == FROM_FILE:
            self._ended, self._collected_before = False, 0
            self._put_in_force(switch.config)
        elif not self._ended:
            if switch.origin == FROM_ALERT:
                self._collected_before = self._switched.collected()
            self._put_in_force(switch.config, 0 if switch.origin == FROM_ALERT else self._collected_before)

    def _started(self, step: int) -> Control:
        control = Control(self._path, self._first, self._switched.job(), self._failures, step, accept_running)
        control.start(self._switched.journal() or _Nowhere())
        return control

    def _put_in_force(self, config: MonitorConfig, collected: int = 0) -> None:
        self._on = config.dynamic_on and config.collect_times > 0
        self.config = config if self._on else resting(config)
        try:
            self._switched.put_in_force(self.config, collected)
        except Exception as error:
            self._failures.report("putting a configuration in force", error, "Nothing is recorded until the next change.")
            self._on, self.config = False, resting(config)
            self._switched.put_in_force(self.config, 0)


class _Nowhere:
    """The journal of a rank that has none."""

    def configured(self, record: ConfigurationRecord) -> None: ...

    def undecided(self, since: int | None) -> None: ...


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
        ValueError: It asks for what only a start can do.
    """
    if config.print_struct or (config.cc_distribution.enable and config.cc_distribution.cc_log_only):
        raise ValueError("print_struct and cc_log_only end a run after its first step: unset DYNAMIC_MONITOR to use them")
