"""An event: one statistic of one tensor that a rule fired on, as ``anomaly.json`` holds it."""

from __future__ import annotations

import re
from typing import Annotated, Final, NamedTuple

from pydantic import Field

from monitor.coordinator.manifest_format import Natural, StepsRecord, StrictRecord
from monitor.series import NO_MICRO_STEP, Series

MicroStep = Annotated[int, Field(ge=NO_MICRO_STEP)]

_TAG: Final = re.compile(r"(?P<vpp_stage>\d+):(?P<name>.*)/rank(?P<rank>\d+)/(?P<kind>[a-z_]+)", re.DOTALL)
_MESSAGE: Final = re.compile(
    r"Rule (?P<rule>\w+) reports anomaly signal in \('.*', '(?P<op>\w+)'\) at step \d+\."
    r"(?: Value (?P<value>\S+?)(?:, running mean (?P<mean>\S+?))?\.)?\Z",  # to the end: numbers have dots as well
    re.DOTALL,
)


class Signal(NamedTuple):
    """What a rule has seen.

    Attributes:
        rule: Its name.
        op: The statistic that it fired on.
        value: Of that statistic.
        mean: The running mean that the value was compared with; None for a rule that compares with none.
    """

    rule: str
    op: str
    value: float
    mean: float | None = None


class Event(StrictRecord):
    """One entry of ``anomaly.json``. Its fields, and no others, are read by scripts of users.

    Attributes:
        micro_step: ``NO_MICRO_STEP`` (-1) where the row belongs to the step as a whole.
        pp_stage: Index of the rank in its pipeline group; 0 without one.
        vpp_stage: Index of the model chunk on the rank.
        call_id: Place of the row in the rank's execution order of the step.
        tag_name: ``Series.tag``.
        group_mates: Ranks of the pipeline group in the order of its stages; the rank alone without one.
    """

    rank: Natural
    step: Natural
    micro_step: MicroStep
    pp_stage: Natural
    vpp_stage: Natural
    call_id: Natural
    tag_name: str
    message: str
    group_mates: tuple[Natural, ...]

    @property
    def key(self) -> str:
        """Under which the event stands in the file. Further ones of the same tag and step append ``_{op}``."""
        return f"{self.tag_name}_step_{self.step}_call_{self.call_id}"

    @property
    def series(self) -> Series:
        """What the event is about.

        Raises:
            ValueError: the tag is not one.
        """
        found = _TAG.fullmatch(self.tag_name)
        if found is None:
            raise ValueError(f"{self.tag_name!r} is not a tag")
        name = found["name"]
        if self.micro_step != NO_MICRO_STEP:
            name = name.removesuffix(f":{self.micro_step}")
        return Series(found["kind"], int(found["vpp_stage"]), name)

    @property
    def signal(self) -> Signal:
        """What the rule saw, read back from the message.

        Raises:
            ValueError: the message is not one.
        """
        found = _MESSAGE.match(self.message)
        if found is None:
            raise ValueError(f"{self.message!r} is not a message of a rule")
        mean = found["mean"]
        return Signal(found["rule"], found["op"], float(found["value"] or "nan"), None if mean is None else float(mean))


def message(signal: Signal, tag: str, step: int) -> str:
    """One line about what a rule saw, in the form that ``Event.signal`` reads back."""
    mean = "" if signal.mean is None else f", running mean {signal.mean:.6g}"
    return (
        f"Rule {signal.rule} reports anomaly signal in ('{tag}', '{signal.op}') at step {step}. Value {signal.value:.6g}{mean}."
    )


# --- ``judged.json``: what stands beside the events of a rank, so that whoever reads them knows what they are of and what
# is not among them.

EVENTS_FOLDER: Final = "anomaly_detected"
"""In the base directory; in it a directory ``rank{r}`` for each rank that has judged a step."""

JUDGED_LIMIT: Final = 16 * 2**20
"""Bytes."""


class ScanSummary(StrictRecord):
    """What one recording of one rank has judged.

    Attributes:
        directory: Name of the rank's directory, in the base directory, whose manifest is of the same run.
        recording: How many recordings the process had begun before this one.
        host: Where the rank ran.
        events: How many stand in the file.
        not_kept: How many more there were, beyond the bound, by rule.
        steps: ScanSummary.
        rows: How many rows were judged in these steps; None in files of earlier versions.
        trained: The first and the last step of the training that was watched, collected or not; None before the end of the run.
        not_judged: Steps that no rule saw, by reason.
        closed: True once the run has ended and everything was written.
    """

    schema_version: int
    job_id: str
    rank: Natural
    directory: str
    recording: Natural
    host: str
    events: Natural
    not_kept: dict[str, Natural]
    steps: StepsRecord
    rows: Natural | None = None
    trained: tuple[Natural, Natural] | None = None
    not_judged: dict[str, StepsRecord]
    closed: bool


def events_file(recording: int) -> str:
    """``anomaly.json``; of a further recording of the same process ``anomaly-1.json``, ``anomaly-2.json`` …"""
    return f"anomaly-{recording}.json" if recording else "anomaly.json"


def judged_file(recording: int) -> str:
    """The file beside ``events_file(recording)``."""
    return f"judged-{recording}.json" if recording else "judged.json"
