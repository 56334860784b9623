"""What every sink that writes files keeps to, whatever its format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from pyarrow.parquet import read_table
from sink_rows import Measured, Rank, visible

from monitor.sinks.csv import CsvSink, read_csv
from monitor.sinks.hdf5 import Hdf5Sink, read_hdf5
from monitor.sinks.parquet import ParquetSink
from monitor.sinks.protocol import Sink
from monitor.sinks.tensorboard import TensorBoardSink

W = {"grad_reduced": [Measured("w")]}


def steps_of_csv(out: Path) -> list[int]:
    return sorted(step for path in out.glob("grad_reduced_*.csv") for step in read_csv(path)["step"].to_pylist())


def steps_of_hdf5(out: Path) -> list[int]:
    return sorted(step for path in out.glob("metrics_*.h5") for step in read_hdf5(path)["step"].to_pylist())


def steps_of_parquet(out: Path) -> list[int]:
    return sorted(step for path in out.glob("metrics_*.parquet") for step in read_table(path)["step"].to_pylist())


def steps_of_tensorboard(out: Path) -> list[int]:
    """As TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = EventAccumulator(str(out), size_guidance={"scalars": 0, "tensors": 0})
    run.Reload()
    return [one.step for one in run.Scalars("0:w/rank0/grad_reduced_norm")]


class Format(NamedTuple):
    """A sink, the steps of ``w`` that a reader of its files finds, and how the file of the steps from 0 to 4 is called."""

    sink: type
    steps: Callable[[Path], list[int]]
    file: str = ""


RECORDS = {
    "csv": Format(CsvSink, steps_of_csv, "grad_reduced_{}.csv"),
    "hdf5": Format(Hdf5Sink, steps_of_hdf5, "metrics_{}.h5"),
    "parquet": Format(ParquetSink, steps_of_parquet, "metrics_{}.parquet"),
}
"""These have a file for each record of steps, hidden until it is whole."""

FORMATS = {**RECORDS, "tensorboard": Format(TensorBoardSink, steps_of_tensorboard)}


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return request.param


@pytest.fixture(params=RECORDS.values(), ids=RECORDS)
def records(request: pytest.FixtureRequest) -> Format:
    return request.param


def write(sink: Sink, rank: Rank, *steps: int) -> None:
    for step in steps:
        sink.write(rank.step(step, W, ("norm",)))


def only_file(directory: Path) -> Path:
    (name,) = os.listdir(directory)
    return directory / name


def refuse(*_: object) -> None:
    raise PermissionError(1, "no")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_sink_that_wrote_nothing_makes_no_directory(form: Format, rank: Rank, out: Path) -> None:
    sink = form.sink(rank.context)
    sink.flush()
    sink.close()
    assert not out.exists()


def test_a_closed_sink_is_closed_again_without_effect(form: Format, rank: Rank, out: Path) -> None:
    before = open_files()
    sink = form.sink(rank.context)
    write(sink, rank, 0, 1)
    assert open_files() == before + 1
    sink.close()
    sink.close()
    assert (open_files(), len(os.listdir(out))) == (before, 1)


def test_what_a_resumed_run_writes_is_read_with_the_rest(form: Format, rank: Rank, out: Path) -> None:
    for steps in ((0, 1, 2), (3, 4)):
        sink = form.sink(rank.context)
        write(sink, rank, *steps)
        sink.close()
    assert form.steps(out) == [0, 1, 2, 3, 4]


def test_a_step_written_again_while_its_record_is_open_is_there_once(form: Format, rank: Rank, out: Path) -> None:
    sink = form.sink(rank.context)
    write(sink, rank, 0, 1, 2, 1, 2)
    sink.close()
    assert form.steps(out) == [0, 1, 2]


def test_records_are_aligned_wherever_the_run_begins(records: Format, rank: Rank, out: Path) -> None:
    sink = records.sink(rank.context)
    write(sink, rank, 103, 107)
    sink.close()
    assert {records.file.format("100-104"), records.file.format("105-109")} == visible(out) == set(os.listdir(out))


def test_an_open_record_is_hidden(records: Format, rank: Rank, out: Path) -> None:
    write(records.sink(rank.context), rank, 0, 1, 2, 3)
    assert os.listdir(out) == [f".{records.file.format('0-4')}.part"]


def test_a_flush_in_mid_record_shows_it_and_later_steps_join(records: Format, rank: Rank, out: Path) -> None:
    sink = records.sink(rank.context)
    write(sink, rank, 0, 1)
    sink.flush()
    assert records.steps(out) == [0, 1]
    write(sink, rank, 2)
    assert records.steps(out) == [0, 1]
    sink.close()
    assert os.listdir(out) == [records.file.format("0-4")]
    assert records.steps(out) == [0, 1, 2]


class TestFaults:
    """Peers' fault 17: any error of the file system killed the run."""

    def test_a_full_disk_loses_the_step_and_nothing_else(self, form: Format, rank: Rank, out: Path, file_size_limit) -> None:
        sink = form.sink(rank.context)
        write(sink, rank, 0, 1)
        size = only_file(out).stat().st_size
        file_size_limit(size + 5)
        with pytest.raises(OSError, match="large"):
            write(sink, rank, 2)
        assert only_file(out).stat().st_size == size
        file_size_limit(None)
        write(sink, rank, 3, 4)
        sink.close()
        assert form.steps(out) == [0, 1, 3, 4]

    def test_a_disk_full_from_the_start_leaves_no_file(self, form: Format, rank: Rank, out: Path, file_size_limit) -> None:
        sink = form.sink(rank.context)
        file_size_limit(10)
        with pytest.raises(OSError, match="large"):
            write(sink, rank, 0)
        sink.flush()
        assert os.listdir(out) == []
        file_size_limit(None)
        write(sink, rank, 1)
        sink.close()
        assert form.steps(out) == [1]

    def test_a_removed_directory_is_reported_and_made_anew(self, form: Format, rank: Rank, out: Path) -> None:
        sink = form.sink(rank.context)
        write(sink, rank, 0)
        only_file(out).unlink()
        out.rmdir()
        with pytest.raises(FileNotFoundError, match="removed while the monitor wrote to it"):
            write(sink, rank, 1)
        write(sink, rank, 2)
        sink.close()
        assert form.steps(out) == [2]

    def test_a_removed_directory_is_reported_on_close(self, records: Format, rank: Rank, out: Path) -> None:
        before = open_files()
        sink = records.sink(rank.context)
        write(sink, rank, 0)
        only_file(out).unlink()
        out.rmdir()
        with pytest.raises(FileNotFoundError):
            sink.close()
        assert open_files() == before

    def test_a_directory_that_cannot_be_made_yet(self, form: Format, rank: Rank, out: Path) -> None:
        out.write_text("a file in its place")
        sink = form.sink(rank.context)
        with pytest.raises(OSError, match="directory"):
            write(sink, rank, 0)
        out.unlink()
        write(sink, rank, 1)
        sink.close()
        assert form.steps(out) == [1]

    def test_a_directory_without_permission(self, form: Format, ordinary_user: Path) -> None:
        out = ordinary_user / "run"
        out.mkdir(mode=0o500)
        rank = Rank(out)
        sink = form.sink(rank.context)
        with pytest.raises(PermissionError):
            write(sink, rank, 0)
        out.chmod(0o700)
        write(sink, rank, 1, 4)
        sink.close()
        assert form.steps(out) == [1, 4]

    def test_too_many_open_files(self, form: Format, rank: Rank, out: Path) -> None:
        resource = pytest.importorskip("resource")
        sink = form.sink(rank.context)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                write(sink, rank, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        write(sink, rank, 1)
        sink.close()
        assert form.steps(out) == [1]

    def test_a_name_that_cannot_be_given_yet_is_given_later(
        self, records: Format, rank: Rank, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sink = records.sink(rank.context)
        write(sink, rank, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", refuse)
            with pytest.raises(PermissionError):
                sink.flush()
            with pytest.raises(PermissionError):
                write(sink, rank, 1)
        write(sink, rank, 2)
        sink.close()
        assert records.steps(out) == [0, 2]

    def test_a_step_that_cannot_be_written_is_left_out(self, form: Format, rank: Rank, out: Path) -> None:
        sink = form.sink(rank.context)
        write(sink, rank, 0)
        broken = rank.step(1, {"exp_avg": [Measured("w")], **W}, ("norm",))
        broken.kinds["grad_reduced"].series[0] = 99
        with pytest.raises(IndexError):
            sink.write(broken)
        write(sink, rank, 2)
        sink.close()
        assert form.steps(out) == [0, 2]
        assert not any("exp_avg" in name for name in os.listdir(out))
