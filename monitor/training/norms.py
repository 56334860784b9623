"""Norms of a step, read from rows that the tensor monitor has recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Final, Protocol

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.selection import without_module
from monitor.series import NO_MICRO_STEP, Placement, Series, SeriesTable
from monitor.stats.ops import derive, total_norm
from monitor.stats.partials import KindRows
from monitor.stats.table import StepRows
from monitor.training.config import TrainingConfig
from monitor.training.step import StepNorms

LOCAL: Final = "grad_unreduced"
REDUCED: Final = "grad_reduced"
FIRST, SECOND = "exp_avg", "exp_avg_sq"
WEIGHT: Final = "param_updated"

NOT_ALL_PARAMETERS: Final = (
    "grad-norm and weight_norm are not shown: the optimizers that were passed do not step all parameters."
)
NOT_WHOLE: Final = "weight_norm is not shown: this rank has only parts of the weights."


def unscaled(norms: StepNorms, loss_scale: float | None, gradient_scale: float | None) -> StepNorms:
    """Divide norms by the scales that the training loop reports.

    Args:
        loss_scale: The factor on the loss. Ignored if the recording knows it and has divided by it already.
        gradient_scale: The factor on the gradients that the optimizer was given.
    """
    local = (loss_scale if norms.loss_scale is None else None) or 1.0
    return replace(
        norms,
        local={name: norm / local for name, norm in norms.local.items()},
        device_local=None if norms.device_local is None else norms.device_local / local,
        gradient=None if norms.gradient is None else norms.gradient / (gradient_scale or 1.0),
    )


class NormReceiver(Protocol):
    """Receives the norms of a step, from any thread."""

    def norms(self, step: int, norms: StepNorms | None) -> None: ...

    def no_more_norms(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GradNormSource:
    """Where the norm of the whole gradient comes from.

    Attributes:
        gradients_are_global: Whether the user states that every rank's optimizer is given the whole gradient. Otherwise the
            placement of each gradient must show it.
        grad_norm_is_told: Whether the loop sets ``grad_norm``, so that gradients need not be read.
    """

    gradients_are_global: bool = False
    grad_norm_is_told: bool = False


class NormReader:
    """Listens to a recording: reads the norms of each step from its rows, on the recording's own writer thread.

    Args:
        world: The number of ranks of the job.
        of_all: Returns whether the rows of a step cover all trained parameters.
    """

    def __init__(
        self,
        series: SeriesTable,
        world: int,
        receiver: NormReceiver,
        failures: Failures,
        source: GradNormSource,
        of_all: Callable[[], bool] = lambda: True,
    ) -> None:
        self._series = series
        self._world = world
        self._receiver = receiver
        self._failures = failures
        self._source = source
        self._of_all = of_all

    def look(self, rows: StepRows) -> None:
        """Read the norms of a step."""
        self._receiver.norms(rows.step, self._norms(rows))

    def dropped(self, step: int, reason: str) -> None:
        """The step is lost."""
        del reason
        self._receiver.norms(step, None)

    def save(self) -> None:
        """Nothing to save: the reader has no state."""

    def close(self) -> None:
        """The recording has ended."""
        self._receiver.no_more_norms()

    def _norms(self, rows: StepRows) -> StepNorms:
        known = self._loss_scale(rows)
        scale = 1.0 if known is None else known
        local = self._whole_steps(rows, LOCAL)
        weights, reduced = self._whole_steps(rows, WEIGHT), self._whole_steps(rows, REDUCED)
        here, whole = self._is_here(reduced, local, rows), self._is_whole()
        return StepNorms(
            rows.step,
            self._by_name(local, scale),
            _total(local, scale),
            self._by_name(self._whole_steps(rows, FIRST)),
            self._by_name(self._whole_steps(rows, SECOND)),
            self._weight(weights),
            _total(reduced) if here and whole and not self._source.grad_norm_is_told else None,
            here,
            known,
            rows.status == "skipped",
        )

    def _is_whole(self) -> bool:
        if not (whole := self._of_all()):
            self._failures.warn("norms of some parameters", NOT_ALL_PARAMETERS)
        return whole

    def _is_here(self, reduced: KindRows | None, local: KindRows | None, rows: StepRows) -> bool:
        """Whether this rank has the whole gradient. True for a step without gradients too, so that it causes no warning."""
        if reduced is None:
            return local is None or rows.status == "skipped"
        return self._source.gradients_are_global or all(map(self._everywhere, self._places(reduced)))

    def _whole_steps(self, rows: StepRows, kind: str) -> KindRows | None:
        """The rows of a kind, if they are of the whole step: gradients of single micro-batches do not give the step's norm."""
        found = rows.kinds.get(kind)
        return found if found is not None and len(found) and (found.micro_step == NO_MICRO_STEP).all() else None

    def _loss_scale(self, rows: StepRows) -> float | None:
        """The loss scale that the recording knows; None if it knows none."""
        other = rows.kinds.get("other")
        names = [] if other is None else [self._series[index].name for index in other.series.tolist()]
        if other is None or "loss_scale" not in names:
            return None
        values, _ = derive("max", other.partials)
        return float(values[names.index("loss_scale")])

    def _by_name(self, rows: KindRows | None, scale: float = 1.0) -> dict[str, float]:
        if rows is None:
            return {}
        values, valid = derive("norm", rows.partials)
        several = len({self._series[index].vpp_stage for index in rows.series.tolist()}) > 1
        named = zip(rows.series.tolist(), (values / scale).tolist(), valid.tolist(), strict=True)
        return {_name(self._series[index], several): value for index, value, there in named if there}

    def _weight(self, rows: KindRows | None) -> float | None:
        if rows is None or not self._of_all():
            return None
        if all(map(_whole, self._places(rows))):
            return _total(rows)
        self._failures.warn("no weight_norm", NOT_WHOLE)
        return None

    def _places(self, rows: KindRows) -> list[Placement]:
        return [self._series.placement(self._series[index]) for index in rows.series.tolist()]

    def _everywhere(self, placement: Placement) -> bool:
        """Whether every rank of the job holds the same tensor."""
        alike = {*placement.replicas, *placement.unclaimed}
        return _whole(placement) and not placement.assumed and (self._world == 1 or len(alike) == self._world)


def _whole(placement: Placement) -> bool:
    return placement.shard is None and not placement.partial


def _name(series: Series, several_chunks: bool) -> str:
    name = without_module(series.name)
    return f"{series.vpp_stage}:{name}" if several_chunks else name


def _total(rows: KindRows | None, scale: float = 1.0) -> float | None:
    """The norm of all rows as one vector."""
    if rows is None:
        return None
    return total_norm(rows.partials) / scale


# --- The configuration that makes the tensor monitor record the norms that training metrics need.


def norms_of_state(config: TrainingConfig) -> bool:
    """Whether ``monitor_config`` asks for norms."""
    wanted = ("local_norm_format", "device_local_norm_format", "optimizer_state_format", "weight_state_format")
    return any(map(config.wants, wanted))


def recorded(config: TrainingConfig, *, grad_norm_is_told: bool) -> MonitorConfig | None:
    """The tensor monitor's configuration; None if no norm is wanted, and always while ``monitor_on`` is false.

    Args:
        grad_norm_is_told: Whether the loop sets ``grad_norm``.
    """
    run, state = config.callbacks.MFLossMonitor, config.monitor_config
    local = bool(config.wants("local_norm_format") or config.wants("device_local_norm_format"))
    moments, weights = bool(config.wants("optimizer_state_format")), bool(config.wants("weight_state_format"))
    grad_norm = state.monitor_on and run is not None and not grad_norm_is_told
    if not (local or moments or weights or grad_norm):
        return None
    intervals = [state.step_interval] if local or moments or weights else []
    intervals += [run.per_print_times] if run is not None and grad_norm else []
    every = gcd(*intervals)
    return MonitorConfig(
        format=("hdf5",),
        ops=("norm",),
        run_numbers=False,
        wg_distribution=local or grad_norm,
        mv_distribution=moments,
        param_distribution=weights,
        # Shown steps are counted from 1, recorded steps from 0.
        start_step=every - 1,
        step_interval=every,
    )
