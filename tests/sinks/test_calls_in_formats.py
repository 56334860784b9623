"""How many calls a row combines is in every format that has rows of calls, and in no kind that counts none."""

from __future__ import annotations

from pathlib import Path

import h5py
import pyarrow as pa
import pytest
from sink_rows import Measured, Rank
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monitor.sinks import hdf5_write
from monitor.sinks.arrow import Measurements, ShardMetadata, partials_of
from monitor.sinks.csv import CsvSink, read_csv
from monitor.sinks.hdf5 import Hdf5Sink, NotAShardError, read_hdf5, recover
from monitor.sinks.spool import SpoolBlock
from monitor.sinks.tensorboard import TensorBoardSink
from monitor.stats.table import StepRows

CALLS = [Measured("all_reduce.post_0", calls=4), Measured("loss_scale", [65536.0]), Measured("send.pre_0", calls=1)]
BOTH = {"grad_reduced": [Measured("w")], "other": CALLS}
COUNTED = frozenset({"other"})
OF_THE_ROWS = [4, None, 1]
SHARD = "metrics_0-4.h5"


def counted(rank: Rank, step: int = 0) -> StepRows:
    return rank.step(step, BOTH, ("norm", "nans"), counted_kinds=COUNTED)


def uncounted(rank: Rank, step: int = 0) -> StepRows:
    return rank.step(step, BOTH, ("norm", "nans"))


def write(rank: Rank, *steps: StepRows) -> None:
    sink = Hdf5Sink(rank.context)
    for rows in steps:
        sink.write(rows)
    sink.close()


def calls_in(path: Path, kind: str = "other") -> list[int | None]:
    return read_hdf5(path, kinds=[kind])["calls"].to_pylist()


def leave_unfinished(rank: Rank, *steps: StepRows) -> Path:
    """As a process that was killed, and whose rows said nothing of calls, leaves them."""
    made = Measurements(rank.series)
    blocks = [SpoolBlock(made.of(rows).drop_columns(["calls"]), ShardMetadata(0, 1e-8).of(rows)) for rows in steps]
    rank.context.directory.mkdir()
    path = rank.context.directory / f".{SHARD}.part"
    path.write_bytes(b"".join(block.packed() for block in blocks))
    return path


def test_csv_has_a_column_that_is_empty_where_a_row_is_not_of_calls(rank: Rank, out: Path) -> None:
    sink = CsvSink(rank.context)
    sink.write(counted(rank))
    sink.close()
    assert (out / "other_0-4.csv").read_text().splitlines()[0] == "vpp_stage,name,step,norm,nans,calls"
    assert read_csv(out / "other_0-4.csv")["calls"].to_pylist() == OF_THE_ROWS
    assert "calls" not in (out / "grad_reduced_0-4.csv").read_text()


def test_tensorboard_has_a_curve_of_each_row_of_calls(rank: Rank, out: Path) -> None:
    sink = TensorBoardSink(rank.context)
    sink.write(counted(rank))
    sink.close()
    run = EventAccumulator(str(out), size_guidance={"scalars": 0, "tensors": 0})
    run.Reload()
    found = {tag: [one.value for one in run.Scalars(tag)] for tag in run.Tags()["scalars"] if tag.endswith("_calls")}
    assert found == {"0:all_reduce.post_0/rank0/other_calls": [4.0], "0:send.pre_0/rank0/other_calls": [1.0]}


def test_hdf5_has_a_dataset_where_minus_one_means_a_row_that_is_not_of_calls(rank: Rank, out: Path) -> None:
    write(rank, counted(rank))
    with h5py.File(out / SHARD) as file:
        assert file["other/calls"][...].tolist() == [4, -1, 1]
        assert (file["other/calls"].dtype, file["other/calls"].compression) == ("int64", "lzf")
        assert "calls" not in file["grad_reduced"]


def test_the_reader_of_hdf5_gives_null_for_every_row_that_is_not_of_calls(rank: Rank, out: Path) -> None:
    write(rank, counted(rank), counted(rank, 1))
    assert calls_in(out / SHARD) == OF_THE_ROWS * 2
    assert calls_in(out / SHARD, "grad_reduced") == [None, None]


@pytest.mark.parametrize(
    ("ops", "columns"), [(["norm"], ["call_id", "calls", "norm"]), (["norm", "calls"], ["call_id", "calls", "norm"])]
)
def test_calls_stand_beside_ops_whether_asked_for_or_not(rank: Rank, out: Path, ops: list[str], columns: list[str]) -> None:
    write(rank, counted(rank))
    table = read_hdf5(out / SHARD, kinds=["other"], ops=ops)
    assert table.column_names[-3:] == columns
    assert table["calls"].to_pylist() == OF_THE_ROWS


def test_a_shard_without_rows_of_calls_has_no_such_dataset(rank: Rank, out: Path) -> None:
    write(rank, rank.step(0, {"other": [Measured("loss_scale")]}, counted_kinds=COUNTED))
    with h5py.File(out / SHARD) as file:
        assert "calls" not in file["other"]


def test_micro_steps_that_a_row_combines_are_not_calls(rank: Rank) -> None:
    rows = rank.step(0, {"actv": [Measured("a")], "other": CALLS}, counted_kinds=COUNTED)
    rows.kinds["actv"].partials["writes"][:] = 8.0
    assert Measurements(rank.series).of(rows)["calls"].to_pylist() == [None, *OF_THE_ROWS]


def test_calls_do_not_change_the_partials_that_a_reader_combines(rank: Rank, out: Path) -> None:
    write(rank, counted(rank))
    assert partials_of(read_hdf5(out / SHARD, kinds=["other"]))["writes"].tolist() == [1.0] * 3


def test_a_shard_that_was_written_before_calls_were_counted_reads_without_them(rank: Rank, out: Path) -> None:
    write(rank, counted(rank))
    with h5py.File(out / SHARD, "r+") as file:
        del file["other/calls"]
    assert calls_in(out / SHARD) == [None] * 3
    assert read_hdf5(out / SHARD, kinds=["other"])["count"].to_pylist() == [2, 1, 2]


def test_a_record_that_began_before_calls_were_counted_is_continued(rank: Rank, out: Path) -> None:
    write(rank, uncounted(rank))
    write(rank, counted(rank, 1))
    assert calls_in(out / SHARD) == [None] * 3 + OF_THE_ROWS


def test_a_record_continues_when_calls_are_counted_no_longer(rank: Rank, out: Path) -> None:
    write(rank, counted(rank))
    write(rank, uncounted(rank, 1))
    assert calls_in(out / SHARD) == OF_THE_ROWS + [None] * 3


@pytest.mark.parametrize("before", range(5))
def test_rows_of_calls_may_begin_in_any_chunk_of_a_record(
    rank: Rank, out: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(hdf5_write, "CHUNK_ROWS", 4)
    write(rank, *(uncounted(rank, step) for step in range(before)), *(counted(rank, step) for step in range(before, 5)))
    assert calls_in(out / SHARD) == [None] * 3 * before + OF_THE_ROWS * (5 - before)


def test_what_a_killed_process_left_from_before_calls_were_counted_is_recovered(rank: Rank, out: Path) -> None:
    leave_unfinished(rank, uncounted(rank), uncounted(rank, 1))
    recover(out, -1, 0, 0)
    assert calls_in(out / SHARD) == [None] * 6


def test_what_a_killed_process_left_from_before_is_compared_with_what_is_visible(rank: Rank, out: Path) -> None:
    part = leave_unfinished(rank, uncounted(rank), uncounted(rank, 1))
    content = part.read_bytes()
    recover(out, -1, 0, 0)
    part.write_bytes(content)
    recover(out, -1, 0, 0)
    assert sorted(path.name for path in out.iterdir()) == [SHARD]
    assert calls_in(out / SHARD) == [None] * 6


def too_short(file: h5py.File) -> None:
    file["other/calls"] = [4]


def not_whole(file: h5py.File) -> None:
    file["other/calls"] = [0.5, 1.0, 2.0]


def a_group(file: h5py.File) -> None:
    file.create_group("other/calls")


def elsewhere(file: h5py.File) -> None:
    file["other/calls"] = h5py.SoftLink("/other/step")


@pytest.mark.parametrize("made", [too_short, not_whole, a_group, elsewhere])
def test_a_column_of_calls_that_cannot_be_one_is_an_error(rank: Rank, out: Path, made) -> None:
    write(rank, counted(rank))
    with h5py.File(out / SHARD, "r+") as file:
        del file["other/calls"]
        made(file)
    with pytest.raises(NotAShardError):
        read_hdf5(out / SHARD)
    assert isinstance(read_hdf5(out / SHARD, kinds=["grad_reduced"]), pa.Table)
