"""Rows that represent others because the same tensor was caught more than once."""

from __future__ import annotations

import pytest
import torch

from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.recording.recorder import RecordedSeries, Recorder
from monitor.series import Series, SeriesTable
from monitor.stats.partials import MAX
from monitor.stats.table import SealedTable


def largest(recorder: Recorder) -> dict[str, float]:
    """The largest element that each series has recorded in the step."""
    recorder.end_step()
    sealed = SealedTable()
    recorder.seal(sealed)
    rows = sealed.rows().kinds["actv"]
    names = [recorder.table.series[series].name for series in rows.series]
    return dict(zip(names, rows.partials.columns[MAX].tolist(), strict=True))


def test_a_tensor_that_its_own_row_holds_already_leaves_the_rows_that_represent_it() -> None:
    recorder, x = Recorder(TorchTensorReader(SeriesTable(), 1e-8)), torch.full((4,), 3.0)
    first, second = (RecordedSeries(Series("actv", 0, name), (0,)) for name in ("first", "second"))
    recorder.activate(True)
    for watched in (first, second, first):
        recorder.record(watched, x)
    assert largest(recorder) == {"first": 3.0, "second": 3.0}


def test_a_row_whose_source_holds_another_tensor_by_now_is_absent() -> None:
    recorder, x = Recorder(TorchTensorReader(SeriesTable(), 1e-8)), torch.full((4,), 3.0)
    first, second = (RecordedSeries(Series("actv", 0, name), (0,)) for name in ("first", "second"))
    recorder.activate(True)
    recorder.record(first, x)
    recorder.record(second, x)
    recorder.record(first, torch.full((4,), 5.0))
    assert largest(recorder) == {"first": 5.0}


@pytest.mark.parametrize("rows", [slice(None), slice(None, None, 2)], ids=["dense", "with gaps"])
def test_a_tensor_that_was_given_other_data_is_read_again(rows: slice) -> None:
    """``x.data = ...``, as in straight-through quantization, leaves object and version as they are."""
    recorder, x = Recorder(TorchTensorReader(SeriesTable(), 1e-8)), torch.full((4, 3), 3.0)[rows]
    first, second = (RecordedSeries(Series("actv", 0, name), (0,)) for name in ("first", "second"))
    recorder.activate(True)
    recorder.record(first, x)
    x.data = torch.full((4, 3), 5.0)[rows]
    recorder.record(second, x)
    assert largest(recorder) == {"first": 3.0, "second": 5.0}
