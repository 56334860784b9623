"""Rows to write, made from real tensors, for the tests of the sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from monitor.series import NO_MICRO_STEP, Series, SeriesTable
from monitor.sinks.protocol import SinkContext
from monitor.stats.histograms import BINS, UPPER
from monitor.stats.partials import (
    ABSSUM,
    BITS_LOW,
    COLUMNS,
    COUNT,
    EMPTY,
    LEAST,
    M2,
    M3,
    M4,
    MAX,
    MIN,
    NANS,
    NEGINFS,
    POSINFS,
    SMALLS,
    SUM,
    SUMSQ,
    WRITES,
    KindRows,
    Partials,
    TensorLayout,
)
from monitor.stats.table import StepRows

SIX_OPS = ("min", "max", "mean", "norm", "zeros", "nans")


class Measured(NamedTuple):
    """One tensor, measured."""

    name: str
    values: Sequence[float] = (3.0, 4.0)
    micro_step: int = NO_MICRO_STEP
    vpp_stage: int = 0
    shape: tuple[int, ...] | None = None
    calls: int = 0
    numbers: Mapping[int, float] | None = None
    """Of a feature, by column of partials, in place of those of ``values``."""
    magnitudes: bool = False
    """Whether ``values`` are counted by magnitude."""
    histogram: Sequence[int] | None = None
    """What was counted, in place of that."""
    checked: bool = False
    """Whether the words of ``values`` as float32 are summed."""


def features(numbers: Mapping[int, float]) -> list[float]:
    """A row of the table for a feature."""
    row = np.zeros(len(COLUMNS))
    row[WRITES] = 1.0
    row[list(numbers)] = list(numbers.values())
    return row.tolist()


def magnitudes_of(values: Sequence[float]) -> np.ndarray:
    """How many of the finite elements are in each bin."""
    x = np.abs(np.array(values, dtype=np.float64))
    return np.bincount(np.searchsorted(UPPER, x[np.isfinite(x)]), minlength=BINS)


def partials_of(values: Sequence[float]) -> list[float]:
    """A row of the table for a tensor with these elements."""
    x = np.array(values, dtype=np.float64)
    f = x[np.isfinite(x)]
    row = np.array(EMPTY)
    row[WRITES], row[COUNT], row[NANS] = 1.0, len(x), np.isnan(x).sum()
    row[POSINFS], row[NEGINFS], row[SMALLS] = (x == np.inf).sum(), (x == -np.inf).sum(), (np.abs(x) < 1e-8).sum()
    if len(f):
        row[MIN], row[MAX], row[SUM], row[SUMSQ] = f.min(), f.max(), f.sum(), (f * f).sum()
        row[M2] = ((f - f.mean()) ** 2).sum()
        with np.errstate(over="ignore", invalid="ignore"):
            m3, m4 = ((f - f.mean()) ** 3).sum(), ((f - f.mean()) ** 4).sum()
        if f.min() < f.max() and np.isfinite(m4):
            row[M3], row[M4] = m3, m4
        row[ABSSUM], row[LEAST] = np.abs(f).sum(), np.abs(f[f != 0]).min(initial=np.inf)
        row[LEAST] = row[LEAST] if f.any() else 0.0
    return row.tolist()


def table_rows(measured: Sequence[Measured], *, counted: bool) -> Partials:
    """As the pipeline hands them on: of a kind that counts calls each says how many it combines."""
    rows = np.array([partials_of(m.values) if m.numbers is None else features(m.numbers) for m in measured])
    for row, m in zip(rows, measured, strict=True):
        row[BITS_LOW:] = _check_columns(m.values) if m.checked else 0.0
    if counted:
        rows[:, WRITES] = [m.calls for m in measured]
    return Partials(Partials.from_rows(rows).columns, _histograms(measured))


def _check_columns(values: Sequence[float]) -> list[int]:
    words = np.array(values, dtype=np.float32).view(np.uint32).tolist()
    sums = len(words) + sum(words), sum(place * word for place, word in enumerate(words))
    return [half for one in sums for half in (one % 2**32, one // 2**32 % 2**32)]


def _histograms(measured: Sequence[Measured]) -> np.ndarray | None:
    """As the table has them: all of one width, zeros where there is none."""
    if not any(m.magnitudes or m.histogram for m in measured):
        return None
    counts = np.zeros((len(measured), BINS), dtype=np.int64)
    for row, m in zip(counts, measured, strict=True):
        own = magnitudes_of(m.values) if m.magnitudes else np.array(m.histogram or [], dtype=np.int64)
        row[: len(own)] = own
    return counts


class Rank:
    """A rank whose series grow from step to step, and the directory that it writes to."""

    def __init__(self, directory: Path, steps_per_record: int = 5, ndigits: int = 6) -> None:
        self.series = SeriesTable()
        self.context = SinkContext(directory, 0, self.series, ndigits, steps_per_record, eps=1e-8)
        self.layouts: list[TensorLayout] = []

    def step(
        self,
        step: int,
        kinds: Mapping[str, Sequence[Measured]],
        ops: tuple[str, ...] = SIX_OPS,
        micro_step_kinds: frozenset[str] = frozenset({"actv", "actv_grad"}),
        counted_kinds: frozenset[str] = frozenset(),
    ) -> StepRows:
        """What the pipeline hands on for ``step``."""
        rows = {kind: self._rows(kind, measured, counted=kind in counted_kinds) for kind, measured in kinds.items()}
        return StepRows(step, ops, rows, self.layouts, micro_step_kinds=micro_step_kinds, counted_kinds=counted_kinds)

    def _rows(self, kind: str, measured: Sequence[Measured], *, counted: bool) -> KindRows:
        return KindRows(
            np.array([self.series.index_of(Series(kind, m.vpp_stage, m.name)) for m in measured], dtype=np.int64),
            np.array([m.micro_step for m in measured], dtype=np.int64),
            np.arange(len(measured)),
            np.array([self._layout(m) for m in measured], dtype=np.int64),
            table_rows(measured, counted=counted),
        )

    def _layout(self, measured: Measured) -> int:
        shape = (1, len(measured.values)) if measured.shape is None else measured.shape
        layout = TensorLayout(shape, "torch.float32")
        if layout not in self.layouts:
            self.layouts.append(layout)
        return self.layouts.index(layout)


def visible(directory: Path) -> set[str]:
    """The names that a reader sees."""
    return {path.name for path in directory.iterdir() if not path.name.startswith(".")}
