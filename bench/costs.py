"""What a trial's clocks and peaks say a monitor costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from models import Workload
from stepping import UNMONITORED
from trials import WARM_UP_ROUNDS, Peaks, Times


@dataclass(frozen=True, slots=True)
class Plain:
    """The unmonitored process.

    Attributes:
        parameters: Of the model.
        torch: The version of its interpreter's.
        step: CPU milliseconds a step, median.
        memory: Its peak, megabytes, as users have it.
    """

    parameters: int
    torch: str
    step: float
    memory: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What one monitor costs in one configuration.

    Attributes:
        rows: Rows written a step.
        cpu: Ratios of CPU time to the unmonitored process, one a round, the flush being part of the last.
        cpu_in_all: CPU time of all rounds over that of the unmonitored process: where rare and dear steps show.
        thread: Ratios of the CPU time of the training thread alone, likewise.
        wall: Ratios of wall time, likewise.
        flush: Wall milliseconds that the wait at the end took.
        added: Megabytes of peak above that of the unmonitored process, what the allocator keeps and wastes among them.
        imports: Megabytes that importing the libraries takes.
        alive: Megabytes beyond the imports that were in use at the peak.
        same_losses: Whether the losses were those of the unmonitored process, bit for bit.
    """

    model: str
    recorded: str
    by: str
    plain: Plain
    rows: float
    cpu: list[float]
    cpu_in_all: float
    thread: list[float]
    wall: list[float]
    flush: float
    added: float
    imports: float
    alive: float
    same_losses: bool


def cost_of(name: str, workload: Workload, recorded: str, times: Times, peaks: Peaks) -> Cost:
    """What the monitor ``name`` cost in a trial."""
    steps_a_turn, base = workload.steps_a_turn, peaks.monitored[UNMONITORED]
    cpu, plain_cpu = _column(times, name, "cpu"), _column(times, UNMONITORED, "cpu")
    ready, last = times.ready[UNMONITORED], times.flush
    return Cost(
        model=workload.name,
        recorded=recorded,
        by=name,
        plain=Plain(
            parameters=ready["parameters"],
            torch=ready["torch"],
            step=1e3 * median(plain_cpu) / steps_a_turn,
            memory=last[UNMONITORED]["peak"] / 1e6,
        ),
        rows=times.rows[name] / (steps_a_turn * (WARM_UP_ROUNDS + len(cpu))),
        cpu=_ratios(cpu, plain_cpu),
        cpu_in_all=sum(cpu) / sum(plain_cpu),
        thread=_ratios(_column(times, name, "thread"), _column(times, UNMONITORED, "thread")),
        wall=_ratios(_column(times, name, "wall"), _column(times, UNMONITORED, "wall")),
        flush=1e3 * last[name]["wall"],
        added=(last[name]["peak"] - last[UNMONITORED]["peak"]) / 1e6,
        imports=(peaks.imports[name] - base) / 1e6,
        alive=(peaks.monitored[name] - peaks.imports[name]) / 1e6,
        same_losses=_column(times, name, "loss") == _column(times, UNMONITORED, "loss"),
    )


def _column(times: Times, name: str, field: str) -> list[float]:
    return [replies[name][field] for replies in times.rounds]


def _ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [this / that for this, that in zip(these, those, strict=True)]
