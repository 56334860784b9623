"""Estimates what a step will cost the job in rows, bytes and files, before the first step is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from monitor.formats import FORMATS, Histogram

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class KindLoad:
    """The load of one kind.

    Attributes:
        series: Number of series that all ranks of the job write: one of each set of replicas, every shard.
        rows: Number of rows that they write in a collected step: series times micro-steps if each has its own row. A mean, if
            not every step has the kind.
        ranks: How many ranks write any.
        histogram: The quantity that each row has a histogram of, if any.
    """

    series: int
    rows: int
    ranks: int
    histogram: Histogram | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a collected step of the whole job; beyond them the monitor warns. None: no limit."""

    rows: float | None = None
    bytes: float | None = None
    files: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of a collected step of the whole job. Files are a mean: one file of ten steps is 0.1 per step."""

    series: int
    rows: int
    bytes: float
    files: float
    ranks: int

    def line(self) -> str:
        """For the start of the log."""
        rows, ranks = _counted(self.rows, "row"), _counted(self.ranks, "rank")
        return (
            f"each collected step of this job will write {rows} of {self.series:,} series on {ranks}: "
            f"about {_bytes(self.bytes)} in {_files(self.files)}"
        )

    def lasting(self, free: int | None, most: int) -> str:
        """How long the disk lasts, in steps, since no step has been timed yet; "" if nothing is known.

        Args:
            free: Bytes that are free on the disk of the output directory; None: not known.
            most: ``max_output_bytes``; 0: no bound.
        """
        if not self.bytes:
            return ""
        said = ""
        if free is not None:
            room = _counted(_rounded(free / self.bytes), "collected step")
            said = f". The disk of the output directory has {_bytes(free)} free, about {room} if all ranks write to it"
        if most:
            begins = _counted(_rounded(most * self.ranks / self.bytes), "collected step")
            said += f". After about {begins} a rank reaches max_output_bytes ({_bytes(most)}), and thins its oldest steps"
        return said

    def exceeded(self, bounds: Bounds) -> tuple[str, ...]:
        """One sentence for each exceeded bound."""
        named = (
            ("rows", self.rows, bounds.rows, _count),
            ("bytes", self.bytes, bounds.bytes, _bytes),
            ("files", self.files, bounds.files, _count),
        )
        return tuple(
            f"{spelled(value)}{'' if name == 'bytes' else f' {name}'} a step for the whole job, more than {spelled(bound)}"
            for name, value, bound, spelled in named
            if bound is not None and value > bound
        )


def estimate(
    loads: Mapping[str, KindLoad],
    formats: Collection[str],
    step_count_per_record: int,
    step_interval: int = 1,
) -> Estimate:
    """Estimate a collected step of the whole job.

    Args:
        loads: By kind.
        formats: Names of the formats written.
        step_count_per_record: Steps, collected or not, whose rows share a file.
        step_interval: Every how many steps one is collected.
    """
    rows = sum(load.rows for load in loads.values())
    ranks = max((load.ranks for load in loads.values()), default=0)
    per_record = sum(_files_per_record(one, loads, ranks) for one in formats)
    return Estimate(
        series=sum(load.series for load in loads.values()),
        rows=rows,
        bytes=rows * sum(FORMATS[one].bytes_per_row for one in formats)
        + sum(load.rows * _bytes_per_histogram(load, formats) for load in loads.values()),
        files=per_record / max(1.0, step_count_per_record / step_interval),
        ranks=ranks,
    )


def _bytes_per_histogram(load: KindLoad, formats: Collection[str]) -> float:
    if load.histogram is None:
        return 0.0
    return sum(FORMATS[one].bytes_per_histogram.get(load.histogram, 0.0) for one in formats)


def _files_per_record(name: str, loads: Mapping[str, KindLoad], ranks: int) -> int:
    if FORMATS[name].files == "kind":
        return sum(load.ranks for load in loads.values() if load.rows)
    return ranks if FORMATS[name].files == "record" else 0


def _rounded(number: float) -> float:
    """A whole number whose first two digits are known."""
    return float(f"{number // 1:.2g}")


def _files(a_step: float) -> str:
    return _counted(a_step, "file") if a_step >= 1 or not a_step else f"1 file every {_counted(1 / a_step, 'step')}"


def _counted(number: float, noun: str) -> str:
    return f"{_count(number)} {noun}" if number == 1 else f"{_count(number)} {noun}s"


def _count(number: float) -> str:
    """The number as text, without decimals from ten on."""
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.2g}"


def _bytes(number: float) -> str:
    unit = 0
    while number >= 1024 and unit + 1 < len(_UNITS):
        number, unit = number / 1024, unit + 1
    return f"{_count(number)} {_UNITS[unit]}"
