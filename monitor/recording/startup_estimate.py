"""Logs at start-up how much the job writes per collected step, and warnings about missing data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from shutil import disk_usage
from typing import Final

from monitor.anomalies.rules import BOUNDS, AnomalyBounds
from monitor.config import MonitorConfig
from monitor.coordinator.estimate import Bounds, KindLoad, estimate
from monitor.failures import LOGGER, Failures
from monitor.formats import Histogram
from monitor.recording.attached_model import AttachmentSpec, ModelNames, NamedParameter
from monitor.recording.backend import RecordingBackend
from monitor.recording.features.watchers import modules_by_hook, series_of
from monitor.selection import ModuleSelection
from monitor.series import KIND_TABLE, MICRO_STEP_KINDS, REPLICA_KIND, RUN_KIND, Kind, Ranks, Series, SeriesTable
from monitor.stats.features import own_columns
from monitor.stats.histograms import MAGNITUDES
from monitor.stats.ops import has_op
from monitor.stats.partials import NANS, NEGINFS, POSINFS, SUMSQ
from monitor.stats.table import StepRows
from monitor.terminal import counted

# --- Warns about configured data that is not recorded: kinds without rows, and configurations that record less than
# expected.


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


BEFORE, AFTER = "grad_unreduced", "grad_reduced"
UNSEEN: Final = (
    "In step {step}, {of} with a row of grad_reduced have none of grad_unreduced, such as {name}. Backward did not call their "
    "hooks, or it ran before the step began. torch.autograd.grad calls no hooks, and neither does a pipeline's dw_builder."
)


class _LooksOnly:
    """What a ``Watcher`` need not do that only looks at rows."""

    def dropped(self, step: int, reason: str) -> None:
        """Ignore a step that was dropped."""

    def save(self) -> None:
        """Nothing to save."""

    def close(self) -> None:
        """Nothing to close."""


class MissingKinds(_LooksOnly):
    """Checks the first collected steps for kinds without rows (``Watcher``).

    Args:
        notes: Returns the notes of the manifest, which may say why a kind has none. The writer thread must not keep the model.
    """

    def __init__(self, failures: Failures, notes: weakref.WeakMethod[Callable[[], Mapping[str, object]]]) -> None:
        self._failures, self._notes = failures, notes
        self._expected: Sequence[ExpectedKinds] = ()
        self._steps: dict[str, int] = {}
        self._first = 0
        self._start = 0
        self._periods: Mapping[str, int] = {}

    def expect(self, kinds: Collection[str], first: int, start: int, periods: Mapping[str, int]) -> None:
        """From step ``first`` on: warn if one of ``kinds``, which this rank should record, has no rows.

        Args:
            start: First step of the schedule.
            periods: From one step to the next that has the kinds of a field, by field.
        """
        self._steps.clear()
        self._first, self._start, self._periods = first, start, periods
        found = [replace(one, kinds=tuple(kind for kind in one.kinds if kind in kinds)) for one in EXPECTED]
        self._expected = [one for one in found if one.kinds]

    def look(self, rows: StepRows) -> None:
        """Check the rows of a step. Skipped and incomplete steps are ignored."""
        if not self._expected or rows.status != "complete" or rows.step < self._first:
            return  # steps of the previous configuration may still be in the queue
        for one in self._expected:
            has = (rows.step - self._start) % self._periods.get(one.field, 1) == 0
            self._steps[one.kinds[0]] = self._steps.get(one.kinds[0], 0) + has
        missing = [one for one in self._expected if not any(kind in rows.kinds for kind in one.kinds)]
        late = [one for one in missing if self._steps[one.kinds[0]] >= one.after]
        for one in late:
            if not self._has_failed(one):
                self._failures.nothing_of(one.kinds[0], _message(one, rows.step, self._noted(one)))
        self._expected = [one for one in missing if one not in late]

    def _noted(self, one: ExpectedKinds) -> str:
        notes = {} if (known := self._notes()) is None else known()
        return "; ".join(said for kind in one.kinds if isinstance(said := notes.get(kind), str))

    def _has_failed(self, one: ExpectedKinds) -> bool:
        """Whether reading a kind has failed. Such a failure was reported before."""
        return any(kind in said for said in self._failures.counts for kind in one.kinds)


def _message(one: ExpectedKinds, step: int, noted: str) -> str:
    kinds = ", ".join(one.kinds)
    steps = f"step {step} has" if one.after == 1 else f"the steps up to {step} have"
    likely = f"{one.why_none}The notes in manifest.json give the reason, if it is known."
    why = f"manifest.json notes: {noted}." if noted else likely
    return f"{one.field} is on, and {steps} no row of {kinds}. {why} docs/formats.md describes when a kind is measured."


class PartlyUnseenGradients(_LooksOnly):
    """Checks the first step with both kinds of gradients for parameters with ``grad_reduced`` alone (``Watcher``).

    These prove no backward of this rank: zeros, which may be left from an earlier step, and gradients of parameters that other
    ranks hold, too, which may be theirs.
    """

    def __init__(self, failures: Failures, series: SeriesTable) -> None:
        self._failures, self._series = failures, series
        self._has_looked = False

    def look(self, rows: StepRows) -> None:
        """Check the rows of a step. Skipped and incomplete steps are ignored."""
        if self._has_looked or rows.status != "complete" or not rows.kinds.keys() >= {BEFORE, AFTER}:
            return
        self._has_looked = True
        unreduced, reduced = rows.kinds[BEFORE], rows.kinds[AFTER]
        seen = {replace(self._series[one], kind=AFTER) for one in unreduced.series.tolist()}
        proven = (reduced.partials.columns[[SUMSQ, NANS, POSINFS, NEGINFS]] > 0).any(axis=0)
        received = [self._series[one] for one in reduced.series[proven].tolist()]
        unseen = [one.name for one in received if one not in seen and one not in self._series.placements]
        if unseen and not any(BEFORE in said for said in self._failures.messages.values()):
            of = f"{len(unseen)} of {counted(len(received), 'parameter')}"
            self._failures.nothing_of(f"some {BEFORE}", UNSEEN.format(step=rows.step, of=of, name=unseen[0]))


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
    elif config.alert.rules and not _judges(config) and not _ends_after_first_step(config):
        yield f"The alert rules have nothing to judge: this configuration records no tensors. {SWITCHES}"
    left = _left_to_others(series, monitored) if config.alert.rules and not config.checks_replicas else 0
    if left:
        are = counted(left, "series is", "series are")
        yield (
            f"replica_check is false: {are} measured on one rank for all ranks that hold the tensor. The alert "
            "rules do not check the replicas of the other ranks: a NaN in one of them is reported late, and for another "
            "tensor. Remove replica_check from the configuration to check all replicas."
        )
    if config.replica_check and not records_nothing(config):
        yield from _unchecked(config)


def _unchecked(config: MonitorConfig) -> Iterator[str]:
    """What an explicit ``replica_check`` does not check."""
    if not (config.param_distribution or config.wg_distribution or config.mv_distribution):
        yield (
            "replica_check has nothing to compare. It compares weights, reduced gradients and moments, and this configuration "
            'records none of these. Set "param_distribution", "wg_distribution" or "mv_distribution": true.'
        )
    elif not config.param_distribution:
        yield 'replica_check does not see a wrong weight, because no weights are recorded. Set "param_distribution": true.'
    fields = {"param_distribution": config.param_distribution, "mv_distribution": config.checks_moments_between_steps}
    rarely = {f"intervals.{field}": getattr(config.intervals, field) for field, checked in fields.items() if checked}
    for named, interval in ({"step_interval": config.step_interval} | rarely if rarely else {}).items():
        if interval > 1:
            yield (
                f"replica_check does not see what changes between two steps, because {named} is {interval}. Set it to 1, or "
                "leave it out."
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
    if config.stack_info or config.run_numbers or records_measurements(config) or _ends_after_first_step(config):
        return None
    if config.xy_distribution:
        return "forward_only and backward_only are both true. Set one of them to false."
    return f"no kind of tensor is switched on. {SWITCHES}"


def records_measurements(config: MonitorConfig) -> bool:
    """Whether there may be rows of tensors or features."""
    features = any(getattr(config, kind.field) for kind in KIND_TABLE if kind.columns and kind.name != RUN_KIND)
    return not _ends_after_first_step(config) and (features or _records_tensors(config))


def records_run_numbers(config: MonitorConfig) -> bool:
    """Whether the run's numbers, such as learning rates, are asked for, or come with other rows."""
    return config.run_numbers or (config.run_numbers is None and records_measurements(config))


def _judges(config: MonitorConfig) -> bool:
    """Whether there may be rows that an alert rule judges. Only ``AnomalyBounds`` judges features."""
    bounded = {kind.field for kind in KIND_TABLE if kind.field and kind.columns and BOUNDS[kind.name]}
    by_bounds = any(rule.rule_name == AnomalyBounds.name for rule in config.alert.rules)
    return _records_tensors(config) or (by_bounds and any(getattr(config, field) for field in bounded))


def _records_tensors(config: MonitorConfig) -> bool:
    """Whether there are rows of tensors. Features are not: they are no statistics of a tensor."""
    activations = config.xy_distribution and not (config.forward_only and config.backward_only)
    statistics = {kind.field for kind in KIND_TABLE if kind.field and not kind.columns} - {"xy_distribution"}
    return activations or any(getattr(config, field) for field in statistics) or config.cc_distribution.enable


def _ends_after_first_step(config: MonitorConfig) -> bool:
    return config.print_struct or (config.cc_distribution.enable and config.cc_distribution.cc_log_only)


def _left_to_others(series: SeriesTable, monitored: Collection[int]) -> int:
    """The number of series of this rank that have replicas on other monitored ranks."""
    held = (placement.replicas for one, placement in series.placements.items() if not own_columns(one.kind))
    return sum(len(set(replicas) & set(monitored)) > 1 for replicas in held)


_FIELDS: Final = {kind.name: kind.field for kind in KIND_TABLE}
OF_PARAMETERS: Final = tuple(kind for kind in KIND_TABLE if kind.of == "parameter" and kind.estimated)


def announce(watch: AttachmentSpec, names: ModelNames, base: Path, series: SeriesTable, backend: RecordingBackend) -> None:
    """Log the estimated size of a step and what will be missing, once per job; as a warning above the configured bounds.

    The estimate assumes one input and one output tensor per module, since the true number shows only in the first call. It
    assumes a gradient and moments for each parameter that is not frozen, and the same series on every other rank.

    Args:
        base: The output directory.
        series: The series of this rank after attaching, with their placements.
    """
    config = watch.config
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
    exceeded, lasting = reckoned.exceeded(bounds), reckoned.lasting(_free_bytes(base), config.max_output_bytes)
    if exceeded:
        advice = "Reduce targets, increase step_interval, or increase step_count_per_record."
        LOGGER.warning("%s: %s. %s%s", line, "; ".join(exceeded), advice.rstrip("."), lasting)
    else:
        LOGGER.info("%s%s", line, lasting)


def _free_bytes(directory: Path) -> int | None:
    """Free bytes of the disk that ``directory`` is on; None if the system does not say."""
    try:
        return disk_usage(directory).free
    except OSError:
        return None


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
        without = {"grad_unreduced"} if config.wg_reduced_only else ()
        kinds = [kind for kind in OF_PARAMETERS if getattr(config, kind.field) and kind.name not in without]
        loads = {kind.name: self._of_parameters(kind, config, micro_steps) for kind in kinds}
        if config.checks_replicas:
            kept = sum(self._kept(kind) for kind in OF_PARAMETERS if kind.name in loads and not kind.columns)
            loads[REPLICA_KIND] = KindLoad(kept, kept, len(self._monitored))
        if config.xy_distribution:
            called = [module for module in names.modules() if not self._backend.modules.never_called(module.module)]
            wanted = [module.wanted for module in called if module.wanted is not None]
            loads["actv"] = self._of_modules(sum(map(_forward, wanted)), each)
            loads["actv_grad"] = self._of_modules(sum(map(_backward, wanted)), each)
        for hook, found in modules_by_hook(names, config, self._backend.features).items():
            series = series_of(hook, found, self._backend.features)
            loads[hook] = self._of_modules(series, each if hook in MICRO_STEP_KINDS else 1)
        if config.counts_magnitudes:
            loads |= {kind: replace(load, histogram="magnitudes") for kind, load in loads.items() if has_op(MAGNITUDES, kind)}
        return {kind: _thinned(load, getattr(config.intervals, _FIELDS.get(kind, ""), 1)) for kind, load in loads.items()}

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


def _thinned(load: KindLoad, interval: int) -> KindLoad:
    """The mean load of a collected step, if only every ``interval``-th has the kind."""
    return replace(load, rows=-(-load.rows // interval))


def _forward(wanted: ModuleSelection) -> int:
    return wanted.input.wanted + wanted.output.wanted


def _backward(wanted: ModuleSelection) -> int:
    return wanted.input_grad.wanted + wanted.output_grad.wanted
