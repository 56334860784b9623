from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from evidence import examples
from hypothesis import given, settings, strategies as st
from sink_rows import SIX_OPS, Measured, Rank, partials_of, visible

import monitor.sinks
from monitor.series import Series
from monitor.sinks import hdf5
from monitor.sinks.arrow import SCHEMA, Measurements, ShardMetadata, partials_of as partials_in
from monitor.sinks.files import RecoveredFiles, StepSpan
from monitor.sinks.hdf5 import Hdf5Sink, NotAShardError, held, read_hdf5, recover
from monitor.stats.partials import COLUMNS, PARTIALS, combine

W = {"grad_reduced": [Measured("w")]}
BOTH = {"actv": [Measured("l.output", micro_step=0)], "grad_reduced": [Measured("w")]}
ROOT = Path(monitor.sinks.__file__).parents[2]


def write(sink: Hdf5Sink, rank: Rank, *steps: int, kinds: dict = W) -> None:
    for step in steps:
        sink.write(rank.step(step, kinds))


def steps_in(path: Path) -> list[int]:
    return read_hdf5(path)["step"].to_pylist()


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "run")


@pytest.fixture
def out(rank: Rank) -> Path:
    return rank.context.directory


class TestFiles:
    def test_a_file_holds_a_record_of_all_kinds(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, *range(10), kinds=BOTH)
        assert {"metrics_0-4.h5", "metrics_5-9.h5"} == visible(out) == set(os.listdir(out))
        table = read_hdf5(out / "metrics_5-9.h5")
        assert table["kind"].to_pylist() == ["actv"] * 5 + ["grad_reduced"] * 5
        assert table["step"].to_pylist() == [5, 6, 7, 8, 9] * 2

    def test_a_step_beyond_the_record_completes_it(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 3, 6)
        assert {"metrics_0-4.h5"} == visible(out)

    def test_closing_shows_everything_and_leaves_no_hidden_file(self, rank: Rank, out: Path) -> None:
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 0, 1, kinds=BOTH)
        sink.close()
        assert os.listdir(out) == ["metrics_0-4.h5"]

    def test_a_sink_that_wrote_nothing_makes_no_directory(self, rank: Rank, out: Path) -> None:
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 0, kinds={})
        sink.flush()
        sink.close()
        assert not out.exists()

    def test_one_file_is_open_at_most(self, rank: Rank) -> None:
        before = len(os.listdir("/proc/self/fd"))
        sink = Hdf5Sink(rank.context)
        for steps in (range(1), range(1, 13)):
            write(sink, rank, *steps, kinds=BOTH)
            assert before + 1 == len(os.listdir("/proc/self/fd"))
        sink.close()
        assert before == len(os.listdir("/proc/self/fd"))

    def test_series_that_come_late_in_the_record_are_numbered_after_the_others(self, rank: Rank, out: Path) -> None:
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 0)
        write(sink, rank, 1, kinds={"grad_reduced": [Measured("new"), Measured("w")]})
        sink.close()
        with h5py.File(out / "metrics_0-4.h5") as file:
            assert file["grad_reduced/series"].asstr()[...].tolist() == ["w", "new"]
            assert file["grad_reduced/series_id"][...].tolist() == [0, 1, 0]


class TestContent:
    def test_every_partial_reads_as_it_was_to_the_last_bit(self, rank: Rank, out: Path) -> None:
        values = [[1 / 3, -2e-150, 1e150], [math.nan, math.inf, 1.0, 0.0], [-math.inf], [], [0.1] * 7]
        measured = [Measured(f"w{i}", v) for i, v in enumerate(values)]
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 0, kinds={"param_origin": measured})
        sink.close()
        table = read_hdf5(out / "metrics_0-4.h5")
        for name in PARTIALS:
            expected = [partials_of(v)[COLUMNS.index(name)] for v in values]
            assert expected == table[name].to_pylist(), name

    def test_higher_moments_have_datasets_only_where_they_were_measured_and_read_as_zeros_elsewhere(
        self, rank: Rank, out: Path
    ) -> None:
        sink = Hdf5Sink(rank.context)
        equal, different = [Measured("w", [2.0, 2.0])], [Measured("w", [1.0, 2.0, 6.0])]
        write(sink, rank, 0, kinds={"param_origin": equal, "exp_avg": equal})
        write(sink, rank, 1, kinds={"param_origin": different, "exp_avg": equal})
        sink.close()
        with h5py.File(out / "metrics_0-4.h5") as file:
            assert [name in file[kind] for kind in ("param_origin", "exp_avg") for name in ("m3", "m4")] == [
                True,
                True,
                False,
                False,
            ]
        table = read_hdf5(out / "metrics_0-4.h5")
        found = {(row["kind"], row["step"]): row["m4"] for row in table.to_pylist()}
        assert found == {("param_origin", 0): 0.0, ("param_origin", 1): 98.0, ("exp_avg", 0): 0.0, ("exp_avg", 1): 0.0}

    def test_the_columns_have_the_types_of_what_they_hold(self, rank: Rank, out: Path) -> None:
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 0, kinds={"actv": [Measured("in", micro_step=0), Measured("out", vpp_stage=2, shape=(2, 3))]})
        sink.close()
        table = read_hdf5(out / "metrics_0-4.h5")
        assert SCHEMA.equals(table.schema.remove_metadata())
        first, second = table.to_pylist()
        assert (first["kind"], first["vpp_stage"], first["name"], first["micro_step"]) == ("actv", 0, "in", 0)
        assert (second["vpp_stage"], second["micro_step"], second["call_id"]) == (2, None, 1)
        assert (second["shape"], second["dtype"]) == ("[2, 3]", "torch.float32")

    def test_ops_are_derived_whether_configured_or_not(self, rank: Rank, out: Path) -> None:
        measured = [Measured("w"), Measured("n", [math.nan, 1.0]), Measured("e", [])]
        sink = Hdf5Sink(rank.context)
        sink.write(rank.step(0, {"grad_reduced": measured}, ("max",)))
        sink.close()
        table = read_hdf5(out / "metrics_0-4.h5", ops=("norm", "mean", "nans", "shape"))
        assert table.column_names == [
            "kind",
            "vpp_stage",
            "name",
            "step",
            "micro_step",
            "call_id",
            "calls",
            "norm",
            "mean",
            "nans",
            "shape",
        ]
        norm, mean = table["norm"].to_pylist(), table["mean"].to_pylist()
        assert (norm[0], norm[2], mean[0], mean[2]) == (5.0, 0.0, 3.5, None)
        assert math.isnan(norm[1])
        assert math.isnan(mean[1])
        assert table["nans"].to_pylist() == [0, 1, 0]
        assert table["shape"].to_pylist() == ["[1, 2]", "[1, 2]", "[1, 0]"]

    def test_an_op_that_does_not_exist_is_named(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 4)
        with pytest.raises(ValueError, match="op 'medain' does not exist"):
            read_hdf5(out / "metrics_0-4.h5", ops=("medain",))

    def test_partials_that_were_read_combine(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 0, 4, kinds={"grad_reduced": [Measured("w", [3.0]), Measured("v", [4.0])]})
        parts = partials_in(read_hdf5(out / "metrics_0-4.h5", steps=(4, 4)))
        whole = combine(parts.take(slice(0, 1)), parts.take(slice(1, 2)))
        assert whole["sumsq"].tolist() == [25.0]

    def test_kinds_and_steps_are_chosen(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, *range(5), kinds=BOTH)
        table = read_hdf5(out / "metrics_0-4.h5", kinds=["actv", "exp_avg"], steps=(1, 3))
        assert table["kind"].to_pylist() == ["actv"] * 3
        assert table["step"].to_pylist() == [1, 2, 3]
        assert len(read_hdf5(out / "metrics_0-4.h5", kinds=[])) == 0

    def test_names_read_as_they_were(self, rank: Rank, out: Path) -> None:
        names = ['a,"b"\nc', "", "nan", "ü", "=cmd()", "a" * 1000]
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 0, kinds={"other": [Measured(name) for name in names]})
        sink.close()
        assert names == read_hdf5(out / "metrics_0-4.h5")["name"].to_pylist()

    def test_half_a_surrogate_pair_in_a_name_is_escaped(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 4, kinds={"other": [Measured("a\ud800")]})
        assert read_hdf5(out / "metrics_0-4.h5")["name"].to_pylist() == ["a\\ud800"]

    def test_two_chunks_with_one_name_are_two_series(self, rank: Rank, out: Path) -> None:
        write(
            Hdf5Sink(rank.context), rank, 4, kinds={"grad_reduced": [Measured("w", [1.0]), Measured("w", [2.0], vpp_stage=1)]}
        )
        rows = read_hdf5(out / "metrics_0-4.h5").to_pylist()
        assert [(row["name"], row["vpp_stage"], row["max"]) for row in rows] == [("w", 0, 1.0), ("w", 1, 2.0)]

    def test_plain_h5py_reads_columns_and_what_is_to_be_known(self, rank: Rank, out: Path) -> None:
        sink = Hdf5Sink(rank.context)
        for step, status in enumerate(("complete", "skipped", "complete", "incomplete")):
            sink.write(replace(rank.step(step, BOTH), status=status))
        sink.close()
        with h5py.File(out / "metrics_0-4.h5") as file:
            assert sorted(file) == ["actv", "grad_reduced"]
            group = file["grad_reduced"]
            assert np.sqrt(group["sumsq"][...]).tolist() == [5.0] * 4
            assert group["micro_step"][...].tolist() == [-1] * 4
            assert {name for name in group if name not in PARTIALS} == {
                *("series", "series_id", "vpp_stage", "step", "micro_step", "call_id", "shape", "shape_id", "dtype", "dtype_id")
            }
            assert {(dataset.shuffle, dataset.compression) for dataset in group.values()} == {(True, "lzf")}
            found = {name: np.asarray(value).tolist() for name, value in file.attrs.items()}
        assert found == {
            "schema_version": 2,
            "rank": 0,
            "eps": 1e-8,
            "ops": list(SIX_OPS),
            "skipped": [1],
            "incomplete": [3],
        }

    def test_the_table_says_what_the_attributes_say_of_its_steps(self, rank: Rank, out: Path) -> None:
        sink = Hdf5Sink(rank.context)
        for step, status in enumerate(("skipped", "complete", "skipped")):
            sink.write(replace(rank.step(step, W), status=status))
        sink.close()
        table = read_hdf5(out / "metrics_0-4.h5", steps=(1, 2))
        assert ShardMetadata(0, 1e-8, SIX_OPS, (2,), ()) == ShardMetadata.unpacked(table.schema.metadata)

    def test_rows_beyond_a_chunk_are_all_there_in_order(self, tmp_path: Path) -> None:
        rank = Rank(tmp_path, steps_per_record=3)
        sink = Hdf5Sink(rank.context)
        rows = 30_000
        for step in range(3):
            measured = rank.step(step, {"actv": [Measured("l.output", [float(step)], micro_step=0)]})
            kind = measured.kinds["actv"]
            again = np.zeros(rows, dtype=np.int64)
            many = replace(
                kind,
                series=kind.series[again],
                micro_step=np.arange(rows),
                call_id=np.arange(rows),
                layout=kind.layout[again],
                partials=kind.partials.take(again),
            )
            sink.write(replace(measured, kinds={"actv": many}))
        table = read_hdf5(tmp_path / "metrics_0-2.h5")
        assert np.repeat([0.0, 1.0, 2.0], rows).tolist() == table["max"].to_pylist()
        assert list(range(rows)) * 3 == table["micro_step"].to_pylist()
        with h5py.File(tmp_path / "metrics_0-2.h5") as file:
            assert file["actv/max"][89_999] == 2.0


class TestUnion:
    def test_a_resumed_run_joins_the_record_of_the_earlier_process_with_its_own_numbers(self, rank: Rank, out: Path) -> None:
        first = Hdf5Sink(rank.context)
        first.write(replace(rank.step(0, {"other": [Measured("a"), Measured("b")]}), status="skipped"))
        write(first, rank, 1, kinds={"other": [Measured("b")]})
        first.close()
        resumed = Rank(out)
        resumed.series.index_of(Series("other", 0, "c"))
        second = Hdf5Sink(resumed.context)
        write(second, resumed, 2, kinds={"other": [Measured("c"), Measured("b")], "actv": [Measured("d", micro_step=1)]})
        second.close()
        table = read_hdf5(out / "metrics_0-4.h5")
        assert table["name"].to_pylist() == ["d", "a", "b", "b", "c", "b"]
        assert table["step"].to_pylist() == [2, 0, 0, 1, 2, 2]
        assert ShardMetadata.unpacked(table.schema.metadata).skipped == (0,)

    def test_a_step_written_again_replaces_its_rows_and_the_later_ones(self, rank: Rank, out: Path) -> None:
        first = Hdf5Sink(rank.context)
        for step in range(5):
            first.write(replace(rank.step(step, {"other": [Measured("w", [1.0])]}), status="skipped"))
        again = Hdf5Sink(rank.context)
        write(again, rank, 2, 3, kinds={"other": [Measured("w", [9.0])]})
        again.close()
        table = read_hdf5(out / "metrics_0-4.h5")
        assert table["step"].to_pylist() == [0, 1, 2, 3]
        assert table["max"].to_pylist() == [1.0, 1.0, 9.0, 9.0]
        assert ShardMetadata.unpacked(table.schema.metadata).skipped == (0, 1)

    def test_a_kind_that_is_not_written_again_goes_too(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, *range(5), kinds=BOTH)
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 3)
        sink.close()
        table = read_hdf5(out / "metrics_0-4.h5")
        assert list(zip(table["kind"].to_pylist(), table["step"].to_pylist(), strict=True)) == [
            *(("actv", step) for step in range(3)),
            *(("grad_reduced", step) for step in range(4)),
        ]

    @pytest.mark.parametrize("content", [b"", b"notes\n", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" * 200], ids=len)
    def test_a_file_that_is_not_ours_is_never_replaced(self, rank: Rank, out: Path, content: bytes, capfd) -> None:
        out.mkdir()
        (out / "metrics_0-4.h5").write_bytes(content)
        (out / "metrics_2-4.h5").write_bytes(content)
        write(Hdf5Sink(rank.context), rank, 2, 4)
        assert content == (out / "metrics_0-4.h5").read_bytes() == (out / "metrics_2-4.h5").read_bytes()
        assert steps_in(out / "metrics_2-4.2.h5") == [2, 4]
        assert capfd.readouterr() == ("", "")

    def test_a_directory_in_the_way_is_gone_around(self, rank: Rank, out: Path) -> None:
        (out / "metrics_0-4.h5").mkdir(parents=True)
        write(Hdf5Sink(rank.context), rank, 2, 4)
        assert steps_in(out / "metrics_2-4.h5") == [2, 4]

    def test_rows_counted_with_another_eps_have_a_file_of_their_own(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, *range(5))
        other = Hdf5Sink(replace(rank.context, eps=1e-6))
        write(other, rank, 3)
        other.close()
        assert {name: steps_in(out / name) for name in visible(out)} == {"metrics_0-4.h5": [0, 1, 2], "metrics_3-3.h5": [3]}

    def test_a_record_of_another_length_gives_up_what_is_written_again(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, *range(5))
        shorter = Rank(out, steps_per_record=2)
        write(Hdf5Sink(shorter.context), shorter, 2, 3)
        assert {name: steps_in(out / name) for name in visible(out)} == {"metrics_0-4.h5": [0, 1, 4], "metrics_2-3.h5": [2, 3]}


class TestCut:
    """A record of very many rows, which no memory is to hold."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hdf5, "MOST_BYTES", 6000)
        monkeypatch.setattr(hdf5, "FULL", 1)

    def test_it_becomes_several_shards_called_after_their_steps(self, tmp_path: Path) -> None:
        rank = Rank(tmp_path, steps_per_record=10)
        write(Hdf5Sink(rank.context), rank, *range(10))
        found = {name: steps_in(tmp_path / name) for name in visible(tmp_path)}
        assert len(found) > 2
        assert {f"metrics_{steps[0]}-{steps[-1]}.h5" for steps in found.values()} == set(found)
        assert list(range(10)) == sorted(itertools.chain(*found.values()))

    def test_a_step_written_again_takes_out_the_shards_behind_it(self, tmp_path: Path) -> None:
        rank = Rank(tmp_path, steps_per_record=10)
        write(Hdf5Sink(rank.context), rank, *range(10))
        again = Hdf5Sink(rank.context)
        write(again, rank, 1, kinds={"grad_reduced": [Measured("w", [9.0])]})
        again.close()
        tables = [read_hdf5(tmp_path / name) for name in visible(tmp_path)]
        found = [(row["step"], row["max"]) for table in tables for row in table.to_pylist()]
        assert sorted(found) == [(0, 4.0), (1, 9.0)]


EPS = (1e-8, 1e-6)
events = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 8), st.sampled_from(EPS)),
        st.tuples(st.sampled_from(["flush", "restart", "die"])),
    ),
    max_size=20,
)


@settings(max_examples=examples(25, 100), deadline=None)
@given(events, st.sampled_from([1, 3, 5]), st.sampled_from([1, 1 << 26]))
def test_whatever_happens_the_files_hold_each_step_once(happened: list[tuple], steps_per_record: int, most: int) -> None:
    """Flushes, restarts, kills, steps that run back and thresholds that change, in any order, whether cut or not."""
    expected: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdf5, "MOST_BYTES", most)
        patch.setattr(hdf5, "FULL", most)
        rank = Rank(Path(directory), steps_per_record)
        sinks = {eps: Hdf5Sink(replace(rank.context, eps=eps)) for eps in EPS}
        at_work = sinks[EPS[0]]
        for number, (event, *arguments) in enumerate(happened):
            if event == "write":
                step, eps = arguments
                if sinks[eps] is not at_work:
                    at_work.close()
                    at_work = sinks[eps] = Hdf5Sink(replace(rank.context, eps=eps))
                at_work.write(rank.step(step, {"other": [Measured("w", [number])]}))
                end = step - step % steps_per_record + steps_per_record
                expected = {s: v for s, v in expected.items() if not step <= s < end} | {step: (float(number), eps)}
            elif event == "flush":
                at_work.flush()
            else:
                at_work.close() if event == "restart" else abandon(at_work)
                recover(Path(directory), -1, 0, 0)
                sinks = {eps: Hdf5Sink(replace(rank.context, eps=eps)) for eps in EPS}
                at_work = sinks[EPS[0]]
        at_work.close()
        assert expected == found_in(Path(directory))
        assert set(expected) == held(Path(directory), StepSpan(0, 8))


def abandon(sink: Hdf5Sink) -> None:
    """As a kill does: what is written is written, and its files are no longer open."""
    part = sink._shards._part
    if part is not None:
        os.close(part.file._open_file())


def found_in(directory: Path) -> dict[int, tuple[float, float]]:
    """``max`` and eps of every step in the directory; a step that stands twice fails."""
    found: dict[int, tuple[float, float]] = {}
    for name in os.listdir(directory):
        table = read_hdf5(directory / name)
        eps = ShardMetadata.unpacked(table.schema.metadata).eps
        for row in table.to_pylist():
            assert row["step"] not in found
            found[row["step"]] = row["max"], eps
    return found


class TestLeftBehind:
    """What a killed process had in the making."""

    def test_its_steps_become_visible_and_can_be_gone_on_with(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 0, 1, 2)
        assert recover(out, -1, 0, 0) == RecoveredFiles({StepSpan(0, 4)}, set(), [])
        assert steps_in(out / "metrics_0-4.h5") == [0, 1, 2]
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 2, kinds={"grad_reduced": [Measured("w", [9.0])]})
        sink.close()
        assert os.listdir(out) == ["metrics_0-4.h5"]
        assert read_hdf5(out / "metrics_0-4.h5")["max"].to_pylist() == [4.0, 4.0, 9.0]

    def test_files_that_have_changed_since_are_reported_and_no_others(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 4, 9, 14, 15)
        for number, name in enumerate(("metrics_0-4.h5", "metrics_5-9.h5", "metrics_10-14.h5")):
            os.utime(out / name, ns=(number, number))
        assert recover(out, 9, 2, 0).ranges == {StepSpan(10, 14), StepSpan(15, 19)}
        assert held(out, StepSpan(10, 19)) == {14, 15}

    def test_a_step_that_is_not_whole_is_left_out(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 0, 1)
        part = out / ".metrics_0-4.h5.part"
        with part.open("r+b") as file:
            file.truncate(part.stat().st_size - 1)
        recover(out, -1, 0, 0)
        write(Hdf5Sink(rank.context), rank, 3, 4)
        assert steps_in(out / "metrics_0-4.h5") == [0, 3, 4]

    def test_what_was_to_be_written_again_stays_where_nothing_was(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, *range(5))
        write(Hdf5Sink(rank.context), rank, 3, kinds={"grad_reduced": [Measured("w", [9.0])]})
        part = out / ".metrics_0-4.h5.part"
        with part.open("r+b") as file:
            file.truncate(part.stat().st_size - 1)
        recover(out, -1, 0, 0)
        assert {name: steps_in(out / name) for name in os.listdir(out)} == {"metrics_0-4.h5": [0, 1, 2, 3, 4]}

    def test_rows_with_another_eps_between_those_of_the_part_stay(self, rank: Rank, out: Path) -> None:
        for step, eps in ((0, 1e-8), (1, 1e-6)):
            sink = Hdf5Sink(replace(rank.context, eps=eps))
            write(sink, rank, step)
            sink.close()
        write(Hdf5Sink(rank.context), rank, 2)
        recover(out, -1, 0, 0)
        assert {step: eps for step, (_, eps) in found_in(out).items()} == {0: 1e-8, 1: 1e-6, 2: 1e-8}

    @pytest.mark.parametrize("content", [b"", b"\0" * 1000], ids=len)
    def test_a_part_that_holds_nothing_goes(self, out: Path, content: bytes) -> None:
        out.mkdir()
        (out / ".metrics_0-4.h5.part").write_bytes(content)
        assert recover(out, -1, 0, 0) == RecoveredFiles({StepSpan(0, 4)}, set(), [])
        assert os.listdir(out) == []

    def test_a_damaged_shard_is_set_aside(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 4)
        content = (out / "metrics_0-4.h5").read_bytes()[:3000]
        (out / "metrics_0-4.h5").unlink()
        (out / ".metrics_0-4.h5.part").write_bytes(content)
        assert recover(out, -1, 0, 0).aside == [out / "metrics_0-4.h5.damaged"]
        assert (out / "metrics_0-4.h5.damaged").read_bytes() == content

    def test_a_draft_goes(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 4)
        (out / ".metrics_0-4.h5.part.draft").write_bytes(b"half")
        recover(out, -1, 0, 0)
        assert os.listdir(out) == ["metrics_0-4.h5"]

    def test_a_shard_that_only_lacked_its_name_gets_it(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, 4)
        os.replace(out / "metrics_0-4.h5", out / ".metrics_0-4.h5.part")
        recover(out, -1, 0, 0)
        assert {name: steps_in(out / name) for name in os.listdir(out)} == {"metrics_0-4.h5": [4]}


class TestFaults:
    def test_a_disk_too_full_for_the_shard_keeps_the_steps_until_there_is_room(
        self, rank: Rank, out: Path, file_size_limit
    ) -> None:
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 0)
        file_size_limit((out / ".metrics_0-4.h5.part").stat().st_size)
        with pytest.raises(OSError, match="large"):
            sink.flush()
        with pytest.raises(OSError, match="large"):
            write(sink, rank, 1)
        assert os.listdir(out) == [".metrics_0-4.h5.part"]
        file_size_limit(None)
        write(sink, rank, 2)
        sink.close()
        assert steps_in(out / "metrics_0-4.h5") == [0, 2]

    def test_what_is_to_be_written_again_stays_until_it_is(self, rank: Rank, out: Path, file_size_limit) -> None:
        write(Hdf5Sink(rank.context), rank, *range(5))
        sink = Hdf5Sink(rank.context)
        file_size_limit(10)
        with pytest.raises(OSError, match="large"):
            write(sink, rank, 2)
        file_size_limit(None)
        sink.close()
        assert steps_in(out / "metrics_0-4.h5") == [0, 1, 2, 3, 4]

    def test_what_no_shard_can_be_made_of_does_not_keep_the_next_ones_from_being_written(
        self, rank: Rank, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sink = Hdf5Sink(rank.context)
        write(sink, rank, 0)
        with monkeypatch.context() as patch:
            patch.setattr(h5py.File, "in_memory", fail)
            with pytest.raises(OSError, match="its steps could not be written as HDF5 and are lost: RuntimeError"):
                sink.flush()
        write(sink, rank, 1, 4)
        assert steps_in(out / "metrics_0-4.h5") == [1, 4]


def refuse(*_: object) -> None:
    raise PermissionError(1, "no")


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("no")


ENDLESS = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from sink_rows import Measured, Rank
from monitor.sinks.hdf5 import Hdf5Sink
rank = Rank(Path({out!r}), steps_per_record=3)
sink = Hdf5Sink(rank.context)
for step in itertools.count():
    sink.write(rank.step(step, {{kind: [Measured(f"w{{i}}") for i in range(200)] for kind in ("actv", "other")}}))
"""


def test_a_killed_process_leaves_whole_shards_and_loses_nothing_once_they_are_put_in_order(tmp_path: Path) -> None:
    for attempt in range(3):
        out = tmp_path / f"run{attempt}"
        program = ENDLESS.format(tests=str(Path(__file__).parent), out=str(out))
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        wait_for(lambda out=out, files=4 + attempt: out.exists() and len(visible(out)) >= files)
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps = [step for name in visible(out) for step in steps_in(out / name)]
        assert sorted(list(range(max(steps) + 1)) * 400) == sorted(steps)
        recover(out, -1, 0, 0)
        again = [step for name in os.listdir(out) for step in steps_in(out / name)]
        assert sorted(list(range(max(again) + 1)) * 400) == sorted(again)
        assert len(steps) <= len(again)


def wait_for(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


FORKING = """
import os, sys, threading
from pathlib import Path
import h5py
sys.path.insert(0, {tests!r})
from sink_rows import Measured, Rank
from monitor.sinks.hdf5 import Hdf5Sink
out = Path({out!r})
rank = Rank(out, steps_per_record=2)
rows = [rank.step(step, {{"actv": [Measured(f"w{{i}}") for i in range(300)]}}) for step in range(400)]
sink = Hdf5Sink(rank.context)
def work():
    for step in rows:
        sink.write(step)
        if done:
            break
    sink.close()
done = []
writer = threading.Thread(target=work)
writer.start()
for number in range(20):
    child = os.fork()
    if not child:
        with h5py.File(out.with_name(f"child{{number}}.h5"), "w") as file:
            file["x"] = [number]
        sys.exit(0) if number % 2 else os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, number
done.append(True)
writer.join()
"""


def test_children_forked_meanwhile_use_h5py_themselves_and_leave_the_shards_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = FORKING.format(tests=str(Path(__file__).parent), out=str(out))
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True, timeout=600)
    assert len(list(tmp_path.glob("child*.h5"))) == 20
    steps = [step for name in os.listdir(out) for step in steps_in(out / name)]
    assert sorted(list(range(max(steps) + 1)) * 300) == sorted(steps)


class TestForeign:
    """An HDF5 file that is not ours, or is damaged."""

    @pytest.fixture
    def shard(self, rank: Rank, out: Path) -> Path:
        write(Hdf5Sink(rank.context), rank, *range(5), kinds=BOTH)
        return out / "metrics_0-4.h5"

    def test_something_else_is_refused_with_what_is_missing(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["weights"] = np.zeros(3)
        with pytest.raises(NotAShardError, match="schema_version"):
            read_hdf5(tmp_path / "x.h5")

    @pytest.mark.parametrize("version", [1, 7])
    def test_another_schema_is_refused_with_both_versions(self, shard: Path, version: int) -> None:
        with h5py.File(shard, "r+") as file:
            file.attrs["schema_version"] = version
        with pytest.raises(NotAShardError, match=f"its schema version is {version}, and this version of the monitor reads 2"):
            read_hdf5(shard)

    def test_what_is_no_hdf5_is_an_os_error(self, tmp_path: Path) -> None:
        (tmp_path / "x.h5").write_text("step\n")
        with pytest.raises(OSError, match="signature"):
            read_hdf5(tmp_path / "x.h5")

    @pytest.mark.parametrize("column", ["step", "series_id", "sumsq", "series"])
    def test_a_column_that_is_missing(self, shard: Path, column: str) -> None:
        with h5py.File(shard, "r+") as file:
            del file["actv"][column]
        with pytest.raises(NotAShardError, match=column):
            read_hdf5(shard)

    @pytest.mark.parametrize(
        ("column", "content", "said"),
        [
            ("max", np.zeros(3), "actv/max has 3 rows and not 5"),
            ("max", np.zeros((5, 2)), "not a plain column"),
            ("max", np.array([b"a"] * 5), "Cannot cast"),
            ("count", np.full(5, 0.5), "Cannot cast"),
            ("step", np.array([0, 2, 1, 3, 4]), "not in order"),
            ("series_id", np.full(5, 9), "a dictionary index is out of range"),
            ("series_id", np.full(5, -1), "a dictionary index is out of range"),
            ("series", np.zeros(1), "string"),
        ],
    )
    def test_a_column_that_is_something_else(self, shard: Path, column: str, content: np.ndarray, said: str) -> None:
        with h5py.File(shard, "r+") as file:
            del file["actv"][column]
            file["actv"][column] = content
        with pytest.raises(NotAShardError, match=said):
            read_hdf5(shard)

    def test_links_that_lead_out_of_the_file_are_not_followed(self, shard: Path, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "secret.h5", "w") as file:
            file["x"] = np.zeros(5)
        with h5py.File(shard, "r+") as file:
            del file["actv/max"]
            file["actv/max"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "x")
        with pytest.raises(NotAShardError, match="no Dataset max"):
            read_hdf5(shard)

    def test_columns_stored_outside_the_file_are_not_read(self, shard: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(b"12345678" * 5)
        with h5py.File(shard, "r+") as file:
            del file["actv/max"]
            file["actv"].create_dataset("max", (5,), "f8", external=[(str(tmp_path / "secret"), 0, 40)])
        with pytest.raises(NotAShardError, match="not a plain column"):
            read_hdf5(shard)

    def test_rows_that_were_never_written_are_not_made_up(self, shard: Path) -> None:
        with h5py.File(shard, "r+") as file:
            del file["actv/step"]
            file["actv"].create_dataset("step", (10**12,), "i8", chunks=(1000,))
        with pytest.raises(NotAShardError, match="more rows than were written"):
            read_hdf5(shard)

    def test_a_truncated_shard_is_an_error(self, shard: Path) -> None:
        content = shard.read_bytes()
        shard.write_bytes(content[: len(content) // 2])
        with pytest.raises((OSError, NotAShardError)):
            read_hdf5(shard)


def test_a_table_is_made_of_what_a_step_holds(rank: Rank) -> None:
    rows = rank.step(7, BOTH)
    batch = Measurements(rank.series).of(rows)
    assert isinstance(batch, pa.RecordBatch)
    assert SCHEMA.equals(batch.schema)
    assert batch["name"].to_pylist() == ["l.output", "w"]
    assert batch["micro_step"].to_pylist() == [0, None]
