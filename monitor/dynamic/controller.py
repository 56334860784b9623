"""``Control``: what training asks at every step, and all that stands behind the answer."""

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
from monitor.config.errors import shown
from monitor.coordinator.manifest_format import ConfigurationRecord
from monitor.dynamic.config_file import INTERVAL_S, Watching
from monitor.dynamic.consensus import Agreement
from monitor.dynamic.participant import Agreeing, Alone, AmongOthers, Job
from monitor.dynamic.proposals import FROM_ALERT, FROM_FILE, FROM_START, Course, Fields, Proposal, Switch, Wishes
from monitor.dynamic.step_boundary import Boundary, Horizon, Pace
from monitor.failures import LOGGER, Failures

# --- Two configurations against each other, in a line for people.

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
"""How long the start may wait for the store: as long as the run waits to settle its name."""

WATCHING_RANK: Final = 0


class Journal(Protocol):
    """Where a rank writes down what held when. ``monitor.coordinator.manifest.Manifest`` is one. Any thread; must not wait."""

    def configured(self, record: ConfigurationRecord) -> None:
        """A configuration has come into force."""

    def undecided(self, since: int | None) -> None:
        """From this step on it is not known what the others have decided; None: it is known again."""


class Control:
    """Of one recording on one rank: which configuration holds at which step.

    >>> control = Control(path, load_config(path), Job(rank, world, store, job_id), failures)  # doctest: +SKIP
    >>> control.start(journal)  # doctest: +SKIP
    >>> for step in range(steps):  # doctest: +SKIP
    ...     if (switch := control.begin(step)) is not None:
    ...         use(switch.config)

    Every rank of the job makes one, monitored or not, and all begin their steps in the same order.

    Args:
        path: Of the configuration file.
        config: What this rank has read there.
        first_step: The first that ``begin`` will be called with.
        accept: Whether this rank could use a configuration: raises, with the reason, where it could not. Then no rank switches.
        pace: For tests; by default that of the number of ranks.
        interval_s: How often the file is looked at.
    """

    def __init__(
        self,
        path: str,
        config: MonitorConfig,
        job: Job,
        failures: Failures,
        first_step: int = 0,
        accept: Callable[[MonitorConfig], object] = lambda _: None,
        pace: Pace | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._rank, self._failures = job.rank, failures
        self._config, self._first_step = config, first_step
        self._accept = accept
        self._journal: Journal | None = None
        alone = job.store is None
        pace = pace or (Pace.alone() if alone else Pace.of(job.world, job.asked_per_second))
        self._boundary: Boundary[MonitorConfig] = Boundary(first_step, pace, self._wake)
        self._wishes = Wishes(retry_s=2 * pace.idle)
        horizon = Horizon(pace)
        agreement = Agreement(
            job.rank,
            1 if alone else job.world,
            first_step,
            Proposal(FROM_START, job.rank, _fields(config)),
            Course(_fields(config), self._prepared),
            self._boundary,
            self._wishes,
            horizon,
            self,
        )
        self._alone = alone
        self._agreeing: Agreeing = (
            Alone(agreement) if alone else AmongOthers(agreement, self._boundary, horizon, pace, job, failures)
        )
        watches = job.rank == WATCHING_RANK and (job.world == 1 or not alone)
        if alone and job.world > 1:
            said = f"There is no store through which {job.world} ranks could agree: the configuration stays as it is."
            failures.warn(
                "no store", f"{said} Initialise communication (torch.distributed, or MindSpore's) before set_monitor."
            )
        self._watching = Watching(path, config, self._file_changed, failures, interval_s) if watches else None
        self._pid = os.getpid()
        self._at_exit: Callable[[], Any] | None = None

    @property
    def config(self) -> MonitorConfig:
        """What holds now."""
        return self._config

    def start(self, journal: Journal, timeout_s: float = START_S) -> None:
        """Settle with the others what training begins with, within ``timeout_s``, and begin to watch.

        Where another rank has read another configuration, ``begin`` of the first step says so.
        """
        self._journal = journal
        self._record(Switch(self._first_step, self._config, 0, FROM_START), self._first_step, before=None)
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)  # a thread inside a store while the interpreter goes would abort the process
        if not self._agreeing.start(timeout_s):
            self._boundary.undecided_since = self._first_step
            self.settled()
            said = f"The job's store did not answer within {timeout_s:g} s."
            advice = "This rank begins with the configuration that it has read, and asks on whether it is that of the others."
            self._failures.warn("no agreement at the start", f"{said} {advice}")
        if self._watching is not None:
            self._watching.start()

    def begin(self, step: int) -> Switch[MonitorConfig] | None:
        """Training thread, at every boundary: about to begin ``step``. What holds from here on; None: as before.

        Costs a comparison, unless something is due. Then it may wait, at most ``Pace.bound`` seconds.
        """
        boundary = self._boundary
        boundary.step = step
        return None if step < boundary.gate else self._look(step)

    def alert(self) -> None:
        """An alert rule has fired on this rank: propose what ``on_alert`` asks for, unless that holds or is to come.

        Any thread; does not wait for other ranks.
        """
        wanted = self._config.on_alert
        if wanted is not None and self._config.dynamic_on and not self._boundary.expects(FROM_ALERT):
            fields = wanted.model_dump(mode="json")["set"]
            self._propose(Proposal(FROM_ALERT, self._rank, fields, wanted.steps))

    def ended(self) -> None:
        """The configuration in force has ended by itself, at ``collect_times``: the file is to say so. Does not wait."""
        if self._watching is not None:
            self._watching.switch_off(self._config)

    def close(self) -> None:
        """Stop. Within seconds, whatever the store and the file system do. Any number of times."""
        if self._at_exit is None:
            return
        atexit.unregister(self._at_exit)
        self._at_exit = None
        if os.getpid() != self._pid:  # a forked child has none of the threads
            return
        if self._watching is not None:
            self._watching.stop()
        self._agreeing.stop()

    def retire(self) -> None:
        """Nobody is left who could ask: end soon. Called when the asker is collected, at whatever moment: takes no lock."""
        if self._watching is not None:
            self._watching.retired = True
        self._agreeing.retire()

    def began_otherwise(self) -> None:
        """The agreement's: training begins with what another rank has read. Of two, the file's latest is to hold in the end."""
        if self._watching is not None:
            self._wishes.ask(Proposal(FROM_FILE, self._rank, _fields(self._config)))

    def settled(self) -> None:
        """The agreement's: it is known again what the others have decided, or not known any more."""
        if self._journal is not None:
            self._journal.undecided(self._boundary.undecided_since)

    def denied(self, proposal: Proposal, reason: str) -> None:
        """The agreement's: a wish of this rank came to nothing."""
        why = "not every rank answered in time" if reason == "abort" else reason
        advice = " Change the file again to try once more." if proposal.origin == FROM_FILE else ""
        said = f"The configuration asked for by the {proposal.origin} was not taken over by any rank: {why}.{advice}"
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
        """Once for the job, and wherever a rank was late."""
        if since > switch.from_step:
            said = "[rank %d] learned late of a change: steps %d to %d were recorded as before"
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
        self._wishes.ask(proposal)
        self._agreeing.wake()

    def _wake(self) -> None:
        """Training waits. Alone it does so for who is agreeing at this moment and needs no waking."""
        if not self._alone:
            self._agreeing.wake()


def _close(control: weakref.ref[Control]) -> None:
    if (found := control()) is not None:
        found.close()


def _fields(config: MonitorConfig) -> dict[str, Any]:
    fields: dict[str, Any] = config.model_dump(mode="json")
    return fields
