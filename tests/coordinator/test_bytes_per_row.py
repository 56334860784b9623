"""What the estimate reckons a row with is what the sinks write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from monitor.formats import FORMATS
from monitor.series import NO_MICRO_STEP, Series, SeriesTable
from monitor.sinks import make_sink
from monitor.sinks.protocol import SinkContext
from monitor.stats.partials import COLUMNS, KindRows, Partials, TensorLayout
from monitor.stats.table import StepRows

OPS = ("min", "max", "mean", "norm", "zeros", "nans")
SERIES, STEPS = 1000, 20


def measured(rng: np.random.Generator) -> KindRows:
    """Gradients of tensors of 4096 elements, extremes in single precision."""
    scale = 10 ** rng.uniform(-12, 0, SERIES)
    extremes = np.float32(np.stack([-scale, scale]) * rng.uniform(0.5, 1, (2, SERIES)))
    sums = np.stack([scale * rng.normal(0, 20, SERIES), *(scale**2 * 400 * rng.uniform(0.8, 1, (2, SERIES)))])
    counts = np.zeros((5, SERIES))
    counts[0], counts[4] = 4096, np.where(rng.random(SERIES) < 0.3, rng.integers(0, 4096, SERIES), 0)
    measured_columns = np.concatenate([np.ones((1, SERIES)), counts, extremes, sums])
    columns = np.zeros((len(COLUMNS), SERIES))
    columns[: len(measured_columns)] = measured_columns
    index = np.arange(SERIES)
    return KindRows(index, np.full(SERIES, NO_MICRO_STEP), index, np.zeros(SERIES, dtype=np.int64), Partials(columns))


@pytest.mark.parametrize("name", ["csv", "hdf5", "parquet", "tensorboard"])
def test_a_row_takes_as_many_bytes_as_it_is_reckoned_with(tmp_path: Path, name: str) -> None:
    names = (f"module.model.layers.{i // 10}.self_attn.q_proj.{i % 10}.weight" for i in range(SERIES))
    series = SeriesTable(Series("grad_reduced", 0, one) for one in names)
    sink = make_sink(name, SinkContext(tmp_path, 0, series, 6, STEPS, 1e-8))
    rng, layouts = np.random.default_rng(0), [TensorLayout((4096,), "torch.float32")]
    for step in range(STEPS):
        sink.write(StepRows(step, OPS, {"grad_reduced": measured(rng)}, layouts))
    sink.close()
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size / (SERIES * STEPS) == pytest.approx(FORMATS[name].bytes_per_row, rel=0.1)
