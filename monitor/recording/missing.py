"""Warns of what the configuration asks for and never comes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.series import MOMENT_KINDS, SeriesTable
from monitor.stats.features import own_columns
from monitor.stats.rows import StepRows

FIELDS: Final = (
    ("xy_distribution", ("actv",)),
    ("xy_distribution", ("actv_grad",)),
    ("wg_distribution", ("grad_unreduced",)),
    ("wg_distribution", ("grad_reduced",)),
    ("param_distribution", ("param_origin",)),
    ("mv_distribution", MOMENT_KINDS),
    ("update_ratio", ("update_ratio",)),
)
"""Fields of the configuration, each with kinds of which at least one has rows where it works."""


@dataclass(frozen=True, slots=True)
class ExpectedKinds:
    """Kinds that a field asks for.

    Attributes:
        after: Complete steps after which one of them has to have come: the first step of a fresh optimizer has no moments.
    """

    field: str
    kinds: tuple[str, ...]
    after: int


class MissingKinds:
    """Looks at the first steps that are collected (``Watcher``)."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._expected: Sequence[ExpectedKinds] = ()
        self._steps = self._first = 0

    def expect(self, kinds: Collection[str], first: int) -> None:
        """From step ``first`` on: warn if one of ``kinds``, which this rank is to record, does not come."""
        found = [(field, tuple(one for one in of if one in kinds)) for field, of in FIELDS]
        self._steps, self._first = 0, first
        self._expected = [ExpectedKinds(field, of, 2 if of[0] in MOMENT_KINDS else 1) for field, of in found if of]

    def look(self, rows: StepRows) -> None:
        """Look at a step. One that was skipped, or cut short, says nothing."""
        if not self._expected or rows.status != "complete" or rows.step < self._first:
            return  # earlier steps may still be on their way when another configuration holds
        self._steps += 1
        missing = [one for one in self._expected if not any(kind in rows.kinds for kind in one.kinds)]
        for one in missing:
            if self._steps >= one.after and not self._has_failed(one):
                self._failures.warn(f"nothing of {one.kinds[0]}", _message(one, rows.step))
        self._expected = [one for one in missing if self._steps < one.after]

    def _has_failed(self, one: ExpectedKinds) -> bool:
        """Whether reading a kind has failed, which was said then."""
        return any(kind in said for said in self._failures.counts for kind in one.kinds)

    def dropped(self, step: int, reason: str) -> None:
        """The step is lost, and says nothing."""

    def save(self) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        """Nothing is kept here."""


def _message(one: ExpectedKinds, step: int) -> str:
    kinds = ", ".join(one.kinds)
    moments = "An optimizer without momentum keeps no moments. " if one.kinds[0] in MOMENT_KINDS else ""
    steps = f"step {step} has" if one.after == 1 else f"the steps up to {step} have"
    return (
        f"{one.field} is on, and {steps} no row of {kinds}. {moments}The notes in manifest.json say why where that is known; "
        "docs/formats.md says when a kind is measured."
    )


# --- What a configuration leaves out although it looks as if something was watched.

SWITCHES: Final = (
    'Set "wg_distribution": true for weight gradients, "param_distribution" for weights, "mv_distribution" for optimizer '
    'moments or "xy_distribution" for activations.'
)


def gaps_of(config: MonitorConfig, series: SeriesTable, monitored: Collection[int]) -> Iterator[str]:
    """Warnings, each with the field to change.

    Args:
        series: Of a rank that is attached.
        monitored: All ranks that are.
    """
    if (nothing := records_nothing(config)) is not None:
        yield f"This configuration records nothing: {nothing}{_rules_in_vain(config)}"
    elif config.alert.rules and not _records_tensors(config) and not _ends_after_first_step(config):
        yield f"The alert rules have nothing to judge: this configuration records no tensors. {SWITCHES}"
    left = _left_to_others(series, monitored) if config.alert.rules and not config.checks_replicas else 0
    if left:
        yield (
            f"replica_check is false: {left:,} series are measured on one rank for all ranks that hold the tensor. The alert "
            "rules do not judge the replicas of the other ranks: a NaN in one of them is reported late and in another place. "
            "Remove replica_check from the configuration to have all replicas judged."
        )


def nothing_matches(config: MonitorConfig) -> str:
    """The warning where no target matches, so that no row comes of the kinds that are switched on."""
    return (
        "This configuration records nothing on this rank: no target matches a parameter or module of the kinds that are "
        f'switched on. "print_struct": true writes the names.{_rules_in_vain(config)}'
    )


def records_rows(config: MonitorConfig) -> bool:
    """Whether there are rows of tensors or features, if targets match. What ranks communicate has no targets."""
    communicates = config.cc_distribution.enable or config.stack_info
    return not communicates and not _ends_after_first_step(config) and records_nothing(config) is None


def _rules_in_vain(config: MonitorConfig) -> str:
    return " The alert rules have nothing to judge." if config.alert.rules else ""


def records_nothing(config: MonitorConfig) -> str | None:
    """Why no row will be recorded, and what to change; None if there may be some."""
    if not config.collect_times:
        return "collect_times is 0. Set it to the number of steps to collect."
    features = config.update_ratio or config.mg_direction or config.recording_l2_features
    if features or config.stack_info or _records_tensors(config) or _ends_after_first_step(config):
        return None
    if config.xy_distribution:
        return "forward_only and backward_only are both true. Set one of them to false."
    return f"no kind of tensor is switched on. {SWITCHES}"


def _records_tensors(config: MonitorConfig) -> bool:
    """Whether there are rows that alert rules judge: those of features are no statistics of a tensor."""
    activations = config.xy_distribution and not (config.forward_only and config.backward_only)
    of_parameters = (config.wg_distribution, config.param_distribution, config.mv_distribution, config.ur_distribution)
    return activations or any(of_parameters) or config.cc_distribution.enable


def _ends_after_first_step(config: MonitorConfig) -> bool:
    return config.print_struct or (config.cc_distribution.enable and config.cc_distribution.cc_log_only)


def _left_to_others(series: SeriesTable, monitored: Collection[int]) -> int:
    """How many series of this rank other monitored ranks hold replicas of."""
    held = (placement.replicas for one, placement in series.placements.items() if not own_columns(one.kind))
    return sum(len(set(replicas) & set(monitored)) > 1 for replicas in held)
