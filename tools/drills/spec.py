"""The arguments of a drill's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Job:
    """One rank of a job.

    Attributes:
        begin: The first step that is trained with the monitor. The steps before are trained without, instead of a checkpoint.
        steps: The number of the step after the last one.
        config: The configuration of the monitor; None to train without one.
        output: Where the monitor records.
        told: The file to which the losses are appended.
        control: The file that controls ``disk.c``.
        apart: Whether the ranks share nothing but the store: each trains a model of its own.
        dynamic: Whether the configuration may change while the job runs.
        fault: A name of ``faults.FAULTS``.
        at, until: The steps before which the fault begins and ends.
        seed: For faults that draw.
    """

    output: str
    told: str
    control: str = ""
    framework: str = "torch"
    rank: int = 0
    world: int = 1
    port: int = 0
    compiled: bool = False
    apart: bool = False
    dynamic: bool = False
    begin: int = 0
    steps: int = 40
    config: dict[str, Any] | None = None
    fault: str = "none"
    at: int = 10
    until: int = 25
    seed: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(**json.loads(text))
