"""The specification of an attachment: model, framework adapter and configuration, and the series this rank records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monitor.config import MonitorConfig
from monitor.coordinator.ownership import Ownership
from monitor.failures import Failures
from monitor.recording.backend import Framework, RecordingBackend
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.recorder import Recorder
from monitor.series import LOCAL, REPLICA_KIND, Placement, Series, ranks_of
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
    framework: Framework
    grad_acc_steps: int
    config: MonitorConfig
    ownership: Ownership
    ops: Callable[[], tuple[str, ...]]


# --- The series of parameters that this rank records.


class OwnedSeries:
    """Returns the series of a kind and a parameter, and sets its placement (``SeriesOf``)."""

    def __init__(self, watch: AttachmentSpec, recorder: Recorder, failures: Failures, backend: RecordingBackend) -> None:
        self._watch = watch
        self._recorder = recorder
        self._failures = failures
        self._backend = backend

    def __call__(self, kind: str, parameter: NamedParameter, seen: Any = None) -> Series | None:
        """The series; None for a replica that another rank writes. With replica checks, such a replica has a series of its
        norm, except for features, which have no norm.
        """
        ownership, placement = self._watch.ownership, self._placement(kind, parameter, seen)
        if ownership.writes(placement):
            series = Series(kind, parameter.chunk, parameter.name)
        elif self._watch.config.checks_replicas and ownership.monitored and not own_columns(kind):
            series = Series(REPLICA_KIND, parameter.chunk, f"{kind}/{parameter.name}")
        else:
            return None
        self._recorder.table.series.place(series, placement)
        return series

    def _placement(self, kind: str, parameter: NamedParameter, seen: Any) -> Placement:
        """The placement, as far as it is known. A parameter of unknown placement is written by every rank."""
        find = self._failures.guarded("placing a parameter", self._watch.framework.placement, of=parameter.name)
        split = bool(getattr(parameter.tensor, "tensor_model_parallel", False))
        known = (None if seen is None else self._backend.tensors.placement_of(seen)) or find(kind, parameter) or LOCAL
        known = self._term(kind, parameter, known)
        placed = self._watch.ownership.placed(kind, known, tensor_parallel=split)
        if split:
            return placed
        complete = self._failures.guarded("placing a parameter", self._watch.framework.completed, of=parameter.name)
        completed = complete(kind, parameter, placed) or placed
        return self._watch.ownership.assumed(kind, completed) if known == LOCAL else completed

    def _term(self, kind: str, parameter: NamedParameter, known: Placement) -> Placement:
        """Mark a gradient under sequence parallelism as a term of a sum, which the tensor-parallel ranks form later."""
        ranks = ranks_of(self._watch.ownership.tp_group or ())
        marked = kind == "grad_unreduced" and bool(getattr(parameter.tensor, "sequence_parallel", False))
        return replace(known, partial=True, differing=ranks) if marked and len(ranks) > 1 else known
