"""Rows with histograms, made from real values, and what TensorBoard's own way of loading files reads of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from sink_rows import Measured, Rank
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from monitor.series import SIGNED_KINDS
from monitor.stats.histograms import UNIT_UPPER, UPPER
from monitor.stats.partials import KindRows
from monitor.stats.table import StepRows

MAGNITUDE_OPS = ("norm", "magnitude_histogram")
ALL = {"tensors": 0}


def counted_step(
    rank: Rank, step: int, kinds: Mapping[str, Sequence[Measured]], ops: tuple[str, ...] = MAGNITUDE_OPS
) -> StepRows:
    """As ``Rank.step``, with the histogram of each tensor's values."""
    rows = rank.step(step, kinds, ops)
    return replace(rows, kinds={kind: _counted(kind, of_kind, kinds[kind]) for kind, of_kind in rows.kinds.items()})


def _counted(kind: str, rows: KindRows, measured: Sequence[Measured]) -> KindRows:
    counts = np.array([histogram_of(kind, one.values) for one in measured])
    return replace(rows, partials=replace(rows.partials, histogram=counts))


def histogram_of(kind: str, values: Sequence[float]) -> np.ndarray:
    """Elements in each bin, by the definition of the bins."""
    x = np.array(values, dtype=np.float64)
    x = x[np.isfinite(x)]
    upper, x = (UNIT_UPPER, x) if kind in SIGNED_KINDS else (UPPER, np.abs(x))
    return np.bincount(np.searchsorted(upper, x, side="left"), minlength=len(upper))


def _tensors(directory: Path, ending: str) -> dict[str, list[tuple[int, np.ndarray]]]:
    run = EventAccumulator(str(directory), size_guidance=ALL)
    run.Reload()
    return {
        tag: [(one.step, make_ndarray(one.tensor_proto)) for one in run.Tensors(tag)]
        for tag in run.Tags()["tensors"]
        if tag.endswith(ending)
        if run.Tensors(tag)
    }


def histograms(directory: Path) -> dict[str, list[tuple[int, list[list[float]]]]]:
    """The buckets that TensorBoard reads, by tag and step."""
    found = _tensors(directory, "histogram")
    return {tag: [(step, buckets.tolist()) for step, buckets in steps] for tag, steps in found.items()}


def heatmaps(directory: Path) -> dict[str, list[tuple[int, Image.Image]]]:
    """The pictures that TensorBoard reads, by tag and step."""
    found = _tensors(directory, "_heatmap")
    return {tag: [(step, _decoded(content)) for step, content in steps] for tag, steps in found.items()}


def _decoded(content: np.ndarray) -> Image.Image:
    width, height, png = content.tolist()
    image = Image.open(BytesIO(png))
    assert image.format == "PNG"
    assert image.size == (int(width), int(height))
    return image
