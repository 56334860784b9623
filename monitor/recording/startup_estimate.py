"""Logs at start-up how much the job writes per collected step, and warnings about missing data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from monitor.config import MonitorConfig
from monitor.coordinator.estimate import Bounds, KindLoad, estimate
from monitor.failures import LOGGER
from monitor.formats import Histogram
from monitor.recording.attachment_spec import AttachmentSpec
from monitor.recording.backend import RecordingBackend
from monitor.recording.features.watchers import modules_by_hook
from monitor.recording.missing import gaps_of, nothing_matches, records_rows
from monitor.recording.model_names import ModelNames
from monitor.recording.parameter_series import NamedParameter
from monitor.selection import ModuleSelection
from monitor.series import KIND_TABLE, MICRO_STEP_KINDS, REPLICA_KIND, Kind, Ranks, Series, SeriesTable
from monitor.stats.histograms import MAGNITUDES
from monitor.stats.ops import has_op

OF_PARAMETERS: Final = tuple(kind for kind in KIND_TABLE if kind.of == "parameter" and kind.estimated)


def announce(
    watch: AttachmentSpec, names: ModelNames, config: MonitorConfig, series: SeriesTable, backend: RecordingBackend
) -> None:
    """Log the estimated size of a step and what will be missing, once per job; as a warning above the configured bounds.

    The estimate assumes one input and one output tensor per module, since the true number shows only in the first call. It
    assumes a gradient and moments for each parameter that is not frozen, and the same series on every other rank.

    Args:
        series: The series of this rank after attaching, with their placements.
    """
    monitored = frozenset(
        rank for rank in range(watch.ownership.world_size) if not config.module_ranks or rank in config.module_ranks
    )
    if not monitored or watch.ownership.rank != min(monitored):
        return
    gaps = list(gaps_of(config, series, monitored))
    reckoned = estimate(
        _Job(monitored, list(names.parameters()), series, backend).loads(names, config, watch.grad_acc_steps),
        config.formats,
        config.steps_per_record(config.formats[0]),
        config.step_interval,
    )
    bounds = Bounds(config.warn_rows_per_step, config.warn_bytes_per_step, config.warn_files_per_step)
    line = f"{reckoned.line()}{', plus communication' if config.cc_distribution.enable else ''}"
    if not reckoned.rows and names.selection.unmatched and records_rows(config):
        gaps.append(nothing_matches(config))
    for gap in gaps:
        LOGGER.warning("%s", gap)
    if not reckoned.rows and not config.cc_distribution.enable:
        return
    exceeded = reckoned.exceeded(bounds)
    if exceeded:
        advice = "Reduce targets, increase step_interval, or increase step_count_per_record."
        LOGGER.warning("%s: %s. %s", line, "; ".join(exceeded), advice)
    else:
        LOGGER.info("%s", line)


class _Job:
    """Estimates what all monitored ranks write, from this rank's series."""

    def __init__(
        self, monitored: frozenset[int], parameters: Sequence[NamedParameter], series: SeriesTable, backend: RecordingBackend
    ) -> None:
        self._backend = backend
        self._monitored = monitored
        self._parameters = parameters
        self._series = series
        self._writers = cache(self._writing)

    def loads(self, names: ModelNames, config: MonitorConfig, micro_steps: int) -> dict[str, KindLoad]:
        each = micro_steps if config.micro_steps == "each" else 1
        loads = {
            kind.name: self._of_parameters(kind, config, micro_steps) for kind in OF_PARAMETERS if getattr(config, kind.field)
        }
        if config.checks_replicas:
            kept = sum(self._kept(kind) for kind in OF_PARAMETERS if kind.name in loads and not kind.columns)
            loads[REPLICA_KIND] = KindLoad(kept, kept, len(self._monitored))
        if config.xy_distribution:
            called = [module for module in names.modules() if not isinstance(module.module, self._backend.modules.never_called)]
            wanted = [module.wanted for module in called if module.wanted is not None]
            loads["actv"] = self._of_modules(sum(map(_forward, wanted)), each)
            loads["actv_grad"] = self._of_modules(sum(map(_backward, wanted)), each)
        for hook, found in modules_by_hook(names, config, self._backend.features).items():
            loads[hook] = self._of_modules(len(found.modules), each if hook in MICRO_STEP_KINDS else 1)
        if config.counts_magnitudes:
            loads |= {kind: replace(load, histogram="magnitudes") for kind, load in loads.items() if has_op(MAGNITUDES, kind)}
        return loads

    def _of_modules(self, series: int, rows_each: int) -> KindLoad:
        ranks = len(self._monitored)
        return KindLoad(series * ranks, series * rows_each * ranks, ranks)

    def _of_parameters(self, kind: Kind, config: MonitorConfig, micro_steps: int) -> KindLoad:
        writers = self._writers_of(kind)
        series = round(sum(writers))
        rows_each = micro_steps if kind.name == "grad_unreduced" and config.monitor_mbs_grad else 1
        histogram: Histogram | None = "signed" if kind.signed else None
        return KindLoad(series, series * rows_each, round(max(writers, default=0)), histogram)

    def _kept(self, kind: Kind) -> int:
        """The number of replicas of a kind of which ranks record only the norm."""
        return round(sum(len(self._monitored) - one for one in self._writers_of(kind)))

    def _writers_of(self, kind: Kind) -> list[float]:
        """The number of ranks that write the kind, for each parameter that has it."""
        there = [one for one in self._parameters if kind.of_frozen or one.tensor.requires_grad]
        return [self._writers(self._series.placement(Series(kind.name, one.chunk, one.name)).replicas) for one in there]

    def _writing(self, replicas: Ranks) -> float:
        """The number of ranks that write a series with these replicas: one rank per set of replicas."""
        return len(self._monitored) / max(1, len(self._monitored & set(replicas)))


def _forward(wanted: ModuleSelection) -> int:
    return wanted.input.wanted + wanted.output.wanted


def _backward(wanted: ModuleSelection) -> int:
    return wanted.input_grad.wanted + wanted.output_grad.wanted
