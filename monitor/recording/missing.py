"""Warns about configured data that is not recorded: kinds without rows, and configurations that record less than expected."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.series import KIND_TABLE, SeriesTable
from monitor.stats.features import own_columns
from monitor.stats.table import StepRows


@dataclass(frozen=True, slots=True)
class ExpectedKinds:
    """Kinds that a field requests: one of them must have a row after ``after`` complete steps.

    Attributes:
        why_none: A likely reason why they have none.
    """

    field: str
    kinds: tuple[str, ...]
    after: int
    why_none: str = ""


def _expected() -> Iterator[ExpectedKinds]:
    """What each field requests. Which moments there are depends on the optimizer."""
    warned = (kind for kind in KIND_TABLE if kind.warned)
    for _, found in groupby(warned, key=lambda kind: kind.group if kind.group == "moment" else kind.name):
        kinds = tuple(found)
        yield ExpectedKinds(kinds[0].field, tuple(kind.name for kind in kinds), kinds[0].after, kinds[0].why_none)


EXPECTED: Final = tuple(_expected())


class MissingKinds:
    """Checks the first collected steps for kinds without rows (``Watcher``)."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._expected: Sequence[ExpectedKinds] = ()
        self._steps = self._first = 0

    def expect(self, kinds: Collection[str], first: int) -> None:
        """From step ``first`` on: warn if one of ``kinds``, which this rank should record, has no rows."""
        self._steps, self._first = 0, first
        found = [replace(one, kinds=tuple(kind for kind in one.kinds if kind in kinds)) for one in EXPECTED]
        self._expected = [one for one in found if one.kinds]

    def look(self, rows: StepRows) -> None:
        """Check the rows of a step. Skipped and incomplete steps are ignored."""
        if not self._expected or rows.status != "complete" or rows.step < self._first:
            return  # steps of the previous configuration may still be in the queue
        self._steps += 1
        missing = [one for one in self._expected if not any(kind in rows.kinds for kind in one.kinds)]
        for one in missing:
            if self._steps >= one.after and not self._has_failed(one):
                self._failures.warn(f"nothing of {one.kinds[0]}", _message(one, rows.step))
        self._expected = [one for one in missing if self._steps < one.after]

    def _has_failed(self, one: ExpectedKinds) -> bool:
        """Whether reading a kind has failed. Such a failure was reported before."""
        return any(kind in said for said in self._failures.counts for kind in one.kinds)

    def dropped(self, step: int, reason: str) -> None:
        """Ignore a step that was dropped."""

    def save(self) -> None:
        """Nothing to save."""

    def close(self) -> None:
        """Nothing to close."""


def _message(one: ExpectedKinds, step: int) -> str:
    kinds = ", ".join(one.kinds)
    steps = f"step {step} has" if one.after == 1 else f"the steps up to {step} have"
    return (
        f"{one.field} is on, and {steps} no row of {kinds}. {one.why_none}The notes in manifest.json give the reason, if it is "
        "known. docs/formats.md describes when a kind is measured."
    )


# --- Configurations that record less than they seem to.

SWITCHES: Final = (
    'Set "wg_distribution": true for weight gradients, "param_distribution" for weights, "mv_distribution" for optimizer '
    'moments or "xy_distribution" for activations.'
)


def gaps_of(config: MonitorConfig, series: SeriesTable, monitored: Collection[int]) -> Iterator[str]:
    """Warnings, each with the field to change.

    Args:
        series: The series of this rank, after attaching.
        monitored: All monitored ranks.
    """
    if (nothing := records_nothing(config)) is not None:
        yield f"This configuration records nothing: {nothing}{_rules_in_vain(config)}"
    elif config.alert.rules and not _records_tensors(config) and not _ends_after_first_step(config):
        yield f"The alert rules have nothing to judge: this configuration records no tensors. {SWITCHES}"
    left = _left_to_others(series, monitored) if config.alert.rules and not config.checks_replicas else 0
    if left:
        yield (
            f"replica_check is false: {left:,} series are measured on one rank for all ranks that hold the tensor. The alert "
            "rules do not check the replicas of the other ranks: a NaN in one of them is reported late, and for another "
            "tensor. Remove replica_check from the configuration to check all replicas."
        )


def nothing_matches(config: MonitorConfig) -> str:
    """The warning for targets that match nothing, so that the enabled kinds have no rows."""
    return (
        "This configuration records nothing on this rank: no target matches a parameter or module of the enabled kinds. "
        f'Set "print_struct": true to write all names to module_struct.json.{_rules_in_vain(config)}'
    )


def records_rows(config: MonitorConfig) -> bool:
    """Whether tensors or features have rows if targets match. False with communication, which has no targets."""
    communicates = config.cc_distribution.enable or config.stack_info
    return not communicates and not _ends_after_first_step(config) and records_nothing(config) is None


def _rules_in_vain(config: MonitorConfig) -> str:
    return " The alert rules have nothing to judge." if config.alert.rules else ""


def records_nothing(config: MonitorConfig) -> str | None:
    """Why no row will be recorded, and what to change; None if there may be rows."""
    if not config.collect_times:
        return "collect_times is 0. Set it to the number of steps to collect."
    features = any(getattr(config, kind.field) for kind in KIND_TABLE if kind.columns)
    if features or config.stack_info or _records_tensors(config) or _ends_after_first_step(config):
        return None
    if config.xy_distribution:
        return "forward_only and backward_only are both true. Set one of them to false."
    return f"no kind of tensor is switched on. {SWITCHES}"


def _records_tensors(config: MonitorConfig) -> bool:
    """Whether there are rows that alert rules check. Features are not: they are no statistics of a tensor."""
    activations = config.xy_distribution and not (config.forward_only and config.backward_only)
    statistics = {kind.field for kind in KIND_TABLE if kind.field and not kind.columns} - {"xy_distribution"}
    return activations or any(getattr(config, field) for field in statistics) or config.cc_distribution.enable


def _ends_after_first_step(config: MonitorConfig) -> bool:
    return config.print_struct or (config.cc_distribution.enable and config.cc_distribution.cc_log_only)


def _left_to_others(series: SeriesTable, monitored: Collection[int]) -> int:
    """The number of series of this rank that have replicas on other monitored ranks."""
    held = (placement.replicas for one, placement in series.placements.items() if not own_columns(one.kind))
    return sum(len(set(replicas) & set(monitored)) > 1 for replicas in held)
