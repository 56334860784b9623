"""The specification of an attachment, and the context that its collectors share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monitor.config import MonitorConfig
from monitor.coordinator.ownership import Ownership
from monitor.failures import Failures
from monitor.recording.backend import FrameworkAdapter, RecordingBackend
from monitor.recording.parameter_series import NamedParameter, ParameterSeries
from monitor.recording.recorder import Recorder
from monitor.recording.run import Run
from monitor.recording.step_clock import Clock
from monitor.series import LOCAL, NO_MICRO_STEP, REPLICA_KIND, Placement, Series, ranks_of
from monitor.stats.features import own_columns


@dataclass(frozen=True, slots=True)
class AttachmentSpec:
    """The model to record and how to record it.

    Attributes:
        chunks: The model's chunks, one for each virtual pipeline stage.
        framework: Reads gradients, weights and moments.
        ops: Returns the statistics to write; called for every step, since they may change.
    """

    chunks: Sequence[Any]
    framework: FrameworkAdapter
    grad_acc_steps: int
    config: MonitorConfig
    ownership: Ownership
    ops: Callable[[], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Host:
    """What a recording provides to each of its attachments.

    Attributes:
        run: Returns the run, which the first call creates.
    """

    recorder: Recorder
    run: Callable[[], Run]
    failures: Failures
    backend: RecordingBackend


def _no_gradients(_parameter: NamedParameter, _gradient: Any) -> bool:
    """Without a collector of gradients every gradient counts as reduced."""
    return True


@dataclass(frozen=True, slots=True)
class Attached:
    """The context that the collectors of one attachment share.

    Attributes:
        parameters: The selected parameters, in the order of the framework.
        note: Adds a note to the manifest, from a key and a text.
        is_reduced: Whether a gradient is known to contain every rank's part when the optimizer's step begins.
        kinds: The kinds that this rank records for at least one parameter.
    """

    watch: AttachmentSpec
    parameters: Sequence[NamedParameter]
    recorder: Recorder
    clock: Clock
    failures: Failures
    backend: RecordingBackend
    note: Callable[[str, str], None]
    is_reduced: Callable[[NamedParameter, Any], bool] = _no_gradients
    kinds: set[str] = field(default_factory=set)

    @property
    def config(self) -> MonitorConfig:
        return self.watch.config

    @property
    def framework(self) -> Any:
        """The ``Framework``. A collector of one framework calls further methods of it."""
        return self.watch.framework

    def series(self, kind: str, micro_steps: tuple[int, ...] = (NO_MICRO_STEP,)) -> ParameterSeries:
        """The series of one kind."""
        found = ParameterSeries(kind, self, micro_steps)
        self.kinds.update([kind] if found.is_recorded else [])
        return found

    def series_of(self, kind: str, parameter: NamedParameter, seen: Any = None) -> Series | None:
        """The series of a kind of a parameter on this rank, with its placement; None for a replica that another rank writes.

        With replica checks, such a replica has a series of its norm, except for features, which have no norm.

        Args:
            seen: A tensor that knows its placement, for a parameter that does not show the placement.
        """
        ownership, placement = self.watch.ownership, self._placement(kind, parameter, seen)
        if ownership.writes(placement):
            series = Series(kind, parameter.chunk, parameter.name)
        elif self.config.checks_replicas and ownership.monitored and not own_columns(kind):
            series = Series(REPLICA_KIND, parameter.chunk, f"{kind}/{parameter.name}")
        else:
            return None
        self.recorder.table.series.place(series, placement)
        return series

    def _placement(self, kind: str, parameter: NamedParameter, seen: Any) -> Placement:
        """The placement, as far as it is known. A parameter of unknown placement is written by every rank."""
        find = self.failures.guarded("placing a parameter", self.watch.framework.placement, of=parameter.name)
        split = bool(getattr(parameter.tensor, "tensor_model_parallel", False))
        known = (None if seen is None else self.backend.tensors.placement_of(seen)) or find(kind, parameter) or LOCAL
        known = self._term(kind, parameter, known)
        placed = self.watch.ownership.placed(kind, known, tensor_parallel=split)
        if split:
            return placed
        complete = self.failures.guarded("placing a parameter", self.watch.framework.completed, of=parameter.name)
        completed = complete(kind, parameter, placed) or placed
        return self.watch.ownership.assumed(kind, completed) if known == LOCAL else completed

    def _term(self, kind: str, parameter: NamedParameter, known: Placement) -> Placement:
        """Mark a gradient under sequence parallelism as a term of a sum, which the tensor-parallel ranks form later."""
        ranks = ranks_of(self.watch.ownership.tp_group or ())
        marked = kind == "grad_unreduced" and bool(getattr(parameter.tensor, "sequence_parallel", False))
        return replace(known, partial=True, differing=ranks) if marked and len(ranks) > 1 else known
