"""What a configuration leaves out although it looks as if something was watched."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from monitor.config import MonitorConfig
from monitor.series import SeriesTable
from monitor.stats.features import own_columns

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
