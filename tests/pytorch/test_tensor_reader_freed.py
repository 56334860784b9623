"""Tensors whose storage was freed, as FSDP frees parameters that are gathered and Megatron outputs that it no longer needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from monitor.pytorch.compiled.operators import NO_VALUE
from monitor.pytorch.dump.backend import TorchReader
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.recording.recorder import Due, RecordedSeries, Recorder
from monitor.series import Series, SeriesTable
from monitor.stats.host.array_kernel import VARIABLE
from monitor.stats.partials import KindRows
from monitor.stats.table import SealedTable

Record = Callable[[Recorder, RecordedSeries, Tensor], None]


def all_at_once(recorder: Recorder, watched: RecordedSeries, x: Tensor) -> None:
    def failed(_: RecordedSeries, error: Exception) -> None:
        raise error

    recorder.record_all([(watched, x)], failed)


WAYS: dict[str, Record] = {
    "one": lambda recorder, watched, x: recorder.record(watched, x, 0),
    "of compiled code": lambda recorder, watched, x: recorder.reader.record_value(
        watched, x, 0, NO_VALUE, torch.tensor(0), Due(True)
    ),
    "all at once": all_at_once,
}


@pytest.mark.parametrize("record", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [10, 5000])
def test_what_was_freed_has_no_row_and_what_is_there_has_one(record: Record, dtype: torch.dtype, size: int) -> None:
    recorder = Recorder(TorchTensorReader(SeriesTable(), 1e-8))
    there, gone = torch.ones(size, dtype=dtype), torch.ones(size, dtype=dtype)[1:]
    gone.untyped_storage().resize_(0)
    recorder.activate(True)
    record(recorder, RecordedSeries(Series("actv", 0, "gone"), (0,)), gone)
    record(recorder, RecordedSeries(Series("actv", 0, "there"), (0,)), there)
    recorder.end_step()
    sealed = SealedTable()
    recorder.seal(sealed)
    rows = sealed.rows().kinds["actv"]
    assert [recorder.table.series[series].name for series in rows.series] == ["there"]


class Shapeless(torch.Tensor):
    """A tensor whose shape cannot be read."""

    @property
    def shape(self) -> Any:
        raise RuntimeError("it has no shape")


@pytest.mark.parametrize("native", ["1", "0"])
def test_what_has_no_layout_has_no_row_and_leaves_others_theirs(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, native)
    recorder = Recorder(TorchTensorReader(SeriesTable(), 1e-8))
    shapeless = torch.ones(3).as_subclass(Shapeless)
    watched = {name: RecordedSeries(Series("actv", 0, name), (0,)) for name in ("before", "shapeless", "after")}
    missing: list[str] = []
    recorder.activate(True)
    recorder.record_all(
        [(watched["before"], torch.ones(5)), (watched["shapeless"], shapeless), (watched["after"], torch.ones(7))],
        lambda one, _: missing.append(one.series.name),
    )
    with pytest.raises(RuntimeError):
        recorder.record(watched["shapeless"], shapeless, 0)
    recorder.end_step()
    sealed = SealedTable()
    recorder.seal(sealed)
    rows = sealed.rows()
    found = {recorder.table.series[row].name: rows.layouts[layout].shape for row, layout in _layouts(rows.kinds["actv"])}
    assert (found, missing) == ({"before": (5,), "after": (7,)}, ["shapeless"])


def _layouts(rows: KindRows) -> list[tuple[int, int]]:
    return list(zip(rows.series.tolist(), rows.layout.tolist(), strict=True))


@pytest.mark.parametrize("checksums", [False, True])
def test_a_dump_describes_what_was_freed_and_reads_nothing(checksums: bool) -> None:
    gone = torch.ones(10)
    gone.untyped_storage().resize_(0)
    leaf = TorchReader(checksums=checksums).leaf(gone, None)
    assert leaf.reading is None


@pytest.mark.parametrize("record", WAYS.values(), ids=WAYS)
def test_a_class_whose_tensors_nothing_can_read_is_named_once(record: Record, caplog: pytest.LogCaptureFixture) -> None:
    recorder, x = Recorder(TorchTensorReader(SeriesTable(), 1e-8)), TwoTensor(torch.ones(4), torch.ones(4))
    recorder.activate(True)
    for name in ("a", "b"):
        record(recorder, RecordedSeries(Series("actv", 0, name), (0,)), x)
    recorder.end_step()
    sealed = SealedTable()
    recorder.seal(sealed)
    assert sealed.rows().kinds == {}
    assert [one.message for one in caplog.records] == [
        "Tensors of these classes have no rows, since only the class knows where their elements are: TwoTensor."
    ]
