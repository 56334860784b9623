"""The schemas of ``anomaly.json`` (events: one statistic of one tensor that a rule fired on) and ``judged.json``."""

from __future__ import annotations

import math
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
    """The statistic that a rule fired on.

    Attributes:
        rule: Name of the rule.
        op: Name of the statistic.
        value: Value of the statistic; NaN if it has none.
        mean: The running mean that the value was compared with; None for a rule that compares with none.
    """

    rule: str
    op: str
    value: float
    mean: float | None = None


class Event(StrictRecord):
    """One entry of ``anomaly.json``. Scripts of users read these fields.

    Attributes:
        micro_step: ``NO_MICRO_STEP`` (-1) if the row belongs to the step as a whole.
        pp_stage: Index of the rank in its pipeline group; 0 without one.
        vpp_stage: Index of the model chunk on the rank.
        call_id: Position of the row in the rank's execution order of the step.
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
        """The event's key in the file. Further events of the same tag and step append ``_{op}``."""
        return f"{self.tag_name}_step_{self.step}_call_{self.call_id}"

    @property
    def series(self) -> Series:
        """The series of the event.

        Raises:
            ValueError: ``tag_name`` is not a tag.
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
        """The signal, parsed from the message.

        Raises:
            ValueError: ``message`` is not a message of a rule.
        """
        found = _MESSAGE.match(self.message)
        if found is None:
            raise ValueError(f"{self.message!r} is not a message of a rule")
        mean = found["mean"]
        return Signal(found["rule"], found["op"], float(found["value"] or "nan"), None if mean is None else float(mean))


def message(signal: Signal, tag: str, step: int) -> str:
    """One line about a signal, in the form that ``Event.signal`` parses."""
    mean = "" if signal.mean is None else f", running mean {signal.mean:.6g}"
    value = "" if math.isnan(signal.value) else f" Value {signal.value:.6g}{mean}."
    return f"Rule {signal.rule} reports anomaly signal in ('{tag}', '{signal.op}') at step {step}.{value}"


# --- ``judged.json``: a summary of what was judged, so that readers can tell "no event" from "not judged".

EVENTS_FOLDER: Final = "anomaly_detected"
"""In the base directory; in it a directory ``rank{r}`` for each rank that has judged a step."""

JUDGED_LIMIT: Final = 16 * 2**20
"""Largest size of ``judged.json``, in bytes."""


class ScanSummary(StrictRecord):
    """Summary of the steps and rows that one recording of one rank has judged.

    Attributes:
        directory: Name of the rank's directory in the base directory; its manifest is of the same run.
        recording: How many recordings the process had begun before this one.
        host: Host of the rank.
        events: Number of events in the file.
        not_kept: Number of further events beyond the bound, by rule.
        steps: The judged steps.
        rows: Number of rows judged in these steps; None in files of earlier versions.
        trained: The first and the last step of the watched training, collected or not; None before the end of the run.
        not_judged: Steps that no rule saw, by reason.
        kinds: Every kind with judged rows, and the steps that had some. Empty in files of earlier versions.
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
    kinds: dict[str, StepsRecord] = Field(default_factory=dict)
    closed: bool

    def has(self, kind: str, step: int) -> bool:
        """Whether rows of a kind were judged in a judged step, as far as it is known."""
        return not self.kinds or (kind in self.kinds and self.kinds[kind].holds(step))

    @property
    def has_few(self) -> bool:
        """Whether some kinds were judged in some of the steps only."""
        return any(one.count != self.steps.count for one in self.kinds.values())


def events_file(recording: int) -> str:
    """``anomaly.json``; ``anomaly-1.json``, ``anomaly-2.json`` … for further recordings of the process."""
    return f"anomaly-{recording}.json" if recording else "anomaly.json"


def judged_file(recording: int) -> str:
    """The file beside ``events_file(recording)``."""
    return f"judged-{recording}.json" if recording else "judged.json"
