"""The rows of one step as columns, kind by kind, in the order of measurement: the data that the pipeline delivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from monitor.series import DIRECTION_KIND, REPLICA_KIND, SIGNED_KINDS, shown_kind
from monitor.stats.features import COLUMNS_OF, as_scalar
from monitor.stats.histograms import HISTOGRAM_OPS
from monitor.stats.ops import CALLS
from monitor.stats.partials import Partials

Status = Literal["complete", "skipped", "incomplete"]
"""``skipped``: the optimizer's step was skipped (overflow). ``incomplete``: the run ended in the middle of the step."""


REPLICA_OPS: Final = ("norm",)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape and dtype of a tensor as measured, for the ops ``shape`` and ``dtype`` and for the manifest."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class KindRows:
    """The rows of one kind. All columns are aligned and in call order.

    Attributes:
        series: Index of each row's series in the rank's ``SeriesTable``.
        micro_step: Micro-step of each row, ``NO_MICRO_STEP`` where the row belongs to the whole step.
        call_id: Position in the rank's execution order of the step.
        layout: Index of each row's ``TensorLayout`` in ``StepRows.layouts``.
        partials: The measured partials.
    """

    series: NDArray[np.int64]
    micro_step: NDArray[np.int64]
    call_id: NDArray[np.int64]
    layout: NDArray[np.int64]
    partials: Partials

    def __len__(self) -> int:
        return len(self.series)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Everything that a rank measured in one step.

    Attributes:
        step: The step's number.
        ops: The statistics that were configured when the step was sealed.
        kinds: Rows by kind; a kind without rows is absent.
        layouts: The rank's layouts so far, append-only and shared between steps.
    """

    step: int
    ops: tuple[str, ...]
    kinds: Mapping[str, KindRows]
    layouts: list[TensorLayout]
    status: Status = "complete"
    micro_step_kinds: frozenset[str] = field(default_factory=frozenset)
    """Kinds whose rows have a micro-step. The configuration decides this, not the rows that happen to be there."""
    counted_kinds: frozenset[str] = field(default_factory=frozenset)
    """Kinds whose rows state how many calls they combine, also by configuration."""

    def ops_of(self, kind: str) -> tuple[str, ...]:
        """The statistics to write for a kind. Replicas always have the norm only, because they are compared by it."""
        if kind == REPLICA_KIND:
            return REPLICA_OPS
        if kind in COLUMNS_OF:
            return tuple(COLUMNS_OF[kind])
        if kind in SIGNED_KINDS:
            return tuple(op for op in self.ops if op not in HISTOGRAM_OPS)  # their histograms are of signed numbers
        return (*self.ops, CALLS) if shown_kind(kind) in self.counted_kinds else self.ops

    def read(self, kind: str) -> KindRows:
        """The rows of a kind in the form from which its ops are derived."""
        rows = self.kinds[kind]
        return replace(rows, partials=as_scalar(rows.partials)) if kind == DIRECTION_KIND else rows

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.kinds.values())
