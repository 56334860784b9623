"""``Controller``: tells training at each step which configuration is in force. It owns the file watch and the consensus."""

from __future__ import annotations

import atexit
import json
import os
import weakref
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any, Final, Protocol

from monitor.config import MonitorConfig
from monitor.config.jsonc import shown
from monitor.coordinator.manifest_format import ConfigurationRecord
from monitor.dynamic.config_file import ConfigWatcher
from monitor.dynamic.consensus import ConsensusProtocol, JobConnection, Participant, SingleProcess, StoreParticipant
from monitor.dynamic.proposals import FROM_ALERT, FROM_FILE, FROM_START, ConfigTimeline, Fields, Proposal, ProposalQueue, Switch
from monitor.dynamic.step_boundary import StepBoundary
from monitor.failures import LOGGER, Failures

# --- The difference between two configurations, in one line for people.

MOST_CHARACTERS: Final = 500
NOTHING: Final = "no field differs"


def digest_of(config: MonitorConfig) -> str:
    """Sixteen hexadecimal characters, the same for equal configurations on every rank."""
    return sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:16]


def summary(before: MonitorConfig, after: MonitorConfig) -> str:
    """The fields that differ: ``dynamic_on: false -> true, collect_times: 5 -> 10``."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    named = [
        f"{name}: {shown(old.get(name))} -> {shown(new.get(name))}" for name in {**old, **new} if old.get(name) != new.get(name)
    ]
    said = ", ".join(named) or NOTHING
    return said if len(said) <= MOST_CHARACTERS else said[: MOST_CHARACTERS - 4] + " ..."


START_S: Final = 30.0
"""Timeout for the store at the start: as long as the run waits to agree on its name."""

WATCHING_RANK: Final = 0


class ConfigJournal(Protocol):
    """Records which configuration was in force when, as ``monitor.coordinator.manifest.Manifest`` does.

    Called from any thread; must not wait.
    """

    def configured(self, record: ConfigurationRecord) -> None:
        """A configuration has come into force."""

    def undecided(self, since: int | None) -> None:
        """From this step on, this rank does not know the decision of the others; None: it knows again."""


class Controller:
    """Decides which configuration is in force at which step, for one recording on one rank.

    >>> control = Controller(path, load_config(path), JobConnection(rank, world, store, job_id), failures)  # doctest: +SKIP
    >>> control.start(journal)  # doctest: +SKIP
    >>> for step in range(steps):  # doctest: +SKIP
    ...     if (switch := control.begin(step)) is not None:
    ...         use(switch.config)

    Every rank of the job makes one, monitored or not, and all begin their steps in the same order.

    Args:
        path: Path of the configuration file.
        config: The configuration that this rank has read there.
        first_step: The first step that ``begin`` will be called with.
        accept: Raises, with the reason, if this rank cannot use a configuration. Then no rank switches.
    """

    def __init__(
        self,
        path: str,
        config: MonitorConfig,
        job: JobConnection,
        failures: Failures,
        first_step: int = 0,
        accept: Callable[[MonitorConfig], object] = lambda _: None,
    ) -> None:
        self._rank, self._failures = job.rank, failures
        self._config, self._accept = config, accept
        self._journal: ConfigJournal | None = None
        alone = job.store is None
        pace, fields = job.pace, _fields(config)
        self._boundary: StepBoundary[MonitorConfig] = StepBoundary(first_step, pace, self._wake)
        self._queue = ProposalQueue(retry_s=2 * pace.idle)
        start, course = Proposal(FROM_START, job.rank, fields), ConfigTimeline(fields, self._prepared)
        agreement = ConsensusProtocol(1 if alone else job.world, start, course, self._boundary, self._queue, self)
        self._alone = alone
        self._participant: Participant = (
            SingleProcess(agreement) if alone else StoreParticipant(agreement, self._boundary, job, failures)
        )
        watches = job.rank == WATCHING_RANK and (job.world == 1 or not alone)
        if alone and job.world > 1:
            said = f"There is no store through which {job.world} ranks can agree: the configuration will not change."
            failures.warn(
                "no store", f"{said} Initialise communication (torch.distributed, or MindSpore's) before set_monitor."
            )
        self._watching = ConfigWatcher(path, config, self._file_changed, failures, pace.file) if watches else None
        self._pid = os.getpid()
        self._at_exit: Callable[[], Any] | None = None

    @property
    def config(self) -> MonitorConfig:
        """The configuration in force."""
        return self._config

    def start(self, journal: ConfigJournal, timeout_s: float = START_S) -> None:
        """Agree with the others on what training begins with, within ``timeout_s``, and begin to watch the file.

        If the ranks agreed on another configuration than this rank's, ``begin`` of the first step returns it.
        """
        self._journal = journal
        self._record(Switch(self._boundary.first_step, self._config, 0, FROM_START), self._boundary.first_step, before=None)
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)  # a thread inside a store call at interpreter exit would abort the process
        if not self._participant.start(timeout_s):
            self._boundary.undecided_since = self._boundary.first_step
            self.settled()
            said = f"The job's store did not answer within {timeout_s:g} s."
            advice = "This rank begins with its own configuration, and keeps asking for that of the other ranks."
            self._failures.warn("no agreement at the start", f"{said} {advice}")
        if self._watching is not None:
            self._watching.start()

    def begin(self, step: int) -> Switch[MonitorConfig] | None:
        """Training thread, before every ``step``: the switch that comes into force; None: no change.

        Costs one comparison, unless something is due. Then it may wait, at most ``PollingIntervals.bound`` seconds.
        """
        boundary = self._boundary
        boundary.step = step
        return None if step < boundary.gate else self._look(step)

    def alert(self) -> None:
        """An alert rule fired on this rank: propose the fields of ``on_alert``, unless they are in force or coming.

        Any thread; does not wait for other ranks.
        """
        wanted = self._config.on_alert
        if wanted is not None and self._config.dynamic_on and not self._boundary.expects(FROM_ALERT):
            self._propose(Proposal(FROM_ALERT, self._rank, self._config.changes_on_alert(), wanted.steps))

    def ended(self) -> None:
        """The configuration in force ended by itself, at ``collect_times``: write that to the file. Does not wait."""
        if self._watching is not None:
            self._watching.switch_off(self._config)

    def close(self) -> None:
        """Stop within seconds, even if the store or the file system hangs. May be called any number of times."""
        if self._at_exit is None:
            return
        atexit.unregister(self._at_exit)
        self._at_exit = None
        if os.getpid() != self._pid:  # a forked child has none of the threads
            return
        if self._watching is not None:
            self._watching.stop()
        self._participant.stop()

    def retire(self) -> None:
        """End soon, because the caller was garbage-collected. That can happen at any moment, so this takes no lock."""
        if self._watching is not None:
            self._watching.retired = True
        self._participant.retire()

    def started_differently(self) -> None:
        """See ``ConsensusListener``. The watching rank then proposes its own configuration, which is the file's latest."""
        if self._watching is not None:
            self._queue.ask(Proposal(FROM_FILE, self._rank, _fields(self._config)))

    def settled(self) -> None:
        """See ``ConsensusListener``. Also called when the wait for a decision timed out."""
        if self._journal is not None:
            self._journal.undecided(self._boundary.undecided_since)

    def rejected(self, proposal: Proposal, reason: str) -> None:
        """See ``ConsensusListener``."""
        why = "not every rank answered in time" if reason == "abort" else reason
        advice = " Change the file again to try once more." if proposal.origin == FROM_FILE else ""
        said = f"No rank adopted the configuration that the {proposal.origin} asked for: {why}.{advice}"
        self._failures.warn(f"no agreement on a {proposal.origin}'s configuration", said)

    def _look(self, step: int) -> Switch[MonitorConfig] | None:
        unknown_before = self._boundary.undecided_since
        switches = self._boundary.begin(step)
        if self._boundary.undecided_since != unknown_before:
            self.settled()
        for switch in switches:
            before, self._config = self._config, switch.config
            self._record(switch, step, before)
            self._say(switch, step, before)
        return switches[-1] if switches else None

    def _say(self, switch: Switch[MonitorConfig], since: int, before: MonitorConfig) -> None:
        """Log a switch: once for the job, and on each rank that was late."""
        if since > switch.from_step:
            said = "[rank %d] adopted a change late: steps %d to %d were recorded with the configuration before"
            LOGGER.warning(said, self._rank, switch.from_step, since - 1)
        if self._rank == WATCHING_RANK:
            changed = summary(before, switch.config)
            if changed == NOTHING and switch.config.dynamic_on:
                LOGGER.info("[rank %d] monitoring starts again at step %d", self._rank, since)
            else:
                LOGGER.info("[rank %d] from step %d on: %s", self._rank, since, changed)

    def _record(self, switch: Switch[MonitorConfig], since: int, before: MonitorConfig | None) -> None:
        if self._journal is not None:
            self._journal.configured(
                ConfigurationRecord(
                    number=switch.number,
                    origin=switch.origin,
                    from_step=switch.from_step,
                    since=since,
                    on=switch.config.dynamic_on,
                    digest=digest_of(switch.config),
                    changed="" if before is None else summary(before, switch.config),
                )
            )

    def _prepared(self, fields: Fields) -> MonitorConfig:
        config = MonitorConfig.model_validate(dict(fields))
        self._accept(config)
        return config

    def _file_changed(self, config: MonitorConfig) -> None:
        self._propose(Proposal(FROM_FILE, self._rank, _fields(config)))

    def _propose(self, proposal: Proposal) -> None:
        self._queue.ask(proposal)
        self._participant.wake()

    def _wake(self) -> None:
        """Training waits. In a single process the thread that agrees needs no waking."""
        if not self._alone:
            self._participant.wake()


def _close(control: weakref.ref[Controller]) -> None:
    if (found := control()) is not None:
        found.close()


def _fields(config: MonitorConfig) -> dict[str, Any]:
    fields: dict[str, Any] = config.model_dump(mode="json")
    return fields
