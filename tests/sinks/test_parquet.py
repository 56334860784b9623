"""The ``parquet`` format: what is in a file, for readers of any kind, and files that are damaged or not ours."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars
import pyarrow as pa
import pytest
from pyarrow.parquet import ParquetFile, read_table, write_table
from sink_rows import SIX_OPS, Measured, Rank, magnitudes_of, partials_of
from spool_forms import AGREEING, ATTENTION, COUNTED, MATRIX, SIGNED, SMALL

from monitor.sinks import hdf5, parquet
from monitor.sinks.arrow import HISTOGRAM, SCHEMA, ShardMetadata, partials_of as partials_in
from monitor.sinks.files import ALL_STEPS, StepSpan
from monitor.sinks.parquet import ParquetSink, look, rows_of
from monitor.sinks.spool import NotAShardError
from monitor.stats.histograms import UPPER
from monitor.stats.partials import COLUMNS, COSTLY, PARTIALS, combine

FILE = "metrics_0-9.parquet"
W = {"grad_reduced": [Measured("w")]}
BOTH = {"actv": [Measured("l.output", micro_step=0)], "grad_reduced": [Measured("w"), Measured("b")]}


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "run", steps_per_record=10)


def written(rank: Rank, *steps: dict[str, list[Measured]], ops: tuple[str, ...] = SIX_OPS, sink: type = ParquetSink) -> Path:
    """The file of a record with these rows, a step each."""
    one = sink(rank.context)
    for step, kinds in enumerate(steps):
        one.write(rank.step(step, kinds, ops))
    one.close()
    return rank.context.directory / FILE


class TestContent:
    def test_every_partial_is_as_it_was_to_the_last_bit(self, rank: Rank) -> None:
        values = [[1 / 3, -2e-150, 1e150], [math.nan, math.inf, 1.0, 0.0], [-math.inf], [], [0.1] * 7, [1.0, 2.0, 6.0]]
        table = read_table(written(rank, {"param_origin": [Measured(f"w{i}", v) for i, v in enumerate(values)]}))
        for name in PARTIALS:
            found = table[name].to_pylist() if name in table.column_names else [0.0] * len(values)
            assert [partials_of(v)[COLUMNS.index(name)] for v in values] == found, name

    def test_rows_stand_by_kind_name_step_call_and_micro_step(self, rank: Rank) -> None:
        steps = [{"grad_reduced": [Measured("b"), Measured("a")], "actv": [Measured("l", micro_step=i) for i in (0, 1)]}] * 2
        rows = read_table(written(rank, *steps)).to_pylist()
        found = [(row["kind"], row["name"], row["step"], row["call_id"], row["micro_step"]) for row in rows]
        assert found == [
            *(("actv", "l", step, call, call) for step in (0, 1) for call in (0, 1)),
            *(("grad_reduced", "a", step, 1, None) for step in (0, 1)),
            *(("grad_reduced", "b", step, 0, None) for step in (0, 1)),
        ]

    def test_ops_that_are_no_partials_have_columns_before_the_partials(self, rank: Rank) -> None:
        table = read_table(written(rank, {"grad_reduced": [Measured("w"), Measured("n", [math.nan]), Measured("z", [])]}))
        assert table.column_names == [
            *("kind", "rank", "vpp_stage", "name", "step", "micro_step", "call_id", "shape", "dtype", "calls"),
            *("mean", "norm", "zeros"),
            *(
                name for name in PARTIALS if name not in COSTLY or name in ("m4", "abssum", "least")
            ),  # what is 0 in all rows is left out
        ]
        assert [str(value) for value in table["norm"].to_pylist()] == ["nan", "5.0", "0.0"]
        assert [str(value) for value in table["mean"].to_pylist()] == ["nan", "3.5", "None"]

    def test_ops_that_change_within_a_record_are_those_of_its_last_step_in_all_rows(self, rank: Rank) -> None:
        sink = ParquetSink(rank.context)
        sink.write(rank.step(0, W, ("absmax",)))
        sink.write(rank.step(1, W, ("norm", "infs", "dtype")))
        sink.close()
        table = read_table(rank.context.directory / FILE)
        assert (table["norm"].to_pylist(), table["infs"].to_pylist()) == ([5.0, 5.0], [0, 0])
        assert "absmax" not in table.column_names

    def test_features_have_columns_that_are_null_in_rows_of_other_kinds(self, rank: Rank) -> None:
        path = written(rank, {"attention_hook": [ATTENTION], "linear_hook": [MATRIX], "mg_direction": [AGREEING], **W})
        rows = {row["kind"]: row for row in read_table(path).to_pylist()}
        found = {kind: [row[name] for name in ("entropy", "sr", "mg_direction", "norm")] for kind, row in rows.items()}
        assert found == {
            "attention_hook": [1.5, None, None, None],
            "grad_reduced": [None, None, None, 5.0],
            "linear_hook": [None, 2.5, None, None],
            "mg_direction": [None, None, 0.75, 0.75],
        }

    def test_histograms_are_lists_of_the_bins_that_are_filled(self, rank: Rank) -> None:
        path = written(rank, {"adam_update": [SIGNED], "grad_reduced": [COUNTED, Measured("v")]}, ops=("underflow_fp16",))
        table = read_table(path)
        signed, plain, counted = table[HISTOGRAM].to_pylist()
        assert signed == [{"bin": 1, "elements": 3}, {"bin": 65, "elements": 2}]
        assert plain is None
        expected = magnitudes_of(SMALL)
        assert counted == [{"bin": int(i), "elements": int(expected[i])} for i in np.flatnonzero(expected)]
        assert table["underflow_fp16"].to_pylist() == [None, None, 0.2]
        upper = json.loads(table.schema.metadata[b"monitor"])["upper"]
        assert (upper["magnitudes"], upper["signed"][-2:]) == ([*UPPER[:-1].tolist(), None], [1.0, None])

    def test_a_file_without_histograms_has_no_such_column(self, rank: Rank) -> None:
        assert HISTOGRAM not in read_table(written(rank, W)).column_names

    def test_the_metadata_say_what_the_attributes_of_hdf5_say_and_how_many_ranks_there_are(self, rank: Rank) -> None:
        sink = ParquetSink(replace(rank.context, rank=3, world_size=8))
        for step, status in enumerate(("complete", "skipped", "complete", "incomplete")):
            sink.write(replace(rank.step(step, BOTH), status=status))
        sink.close()
        metadata = ParquetFile(rank.context.directory / FILE).metadata.metadata
        assert json.loads(metadata[b"monitor"]) == {
            "schema_version": 2,
            "rank": 3,
            "eps": 1e-8,
            "ops": list(SIX_OPS),
            "skipped": [1],
            "incomplete": [3],
            "world_size": 8,
        }
        assert read_table(rank.context.directory / FILE)["rank"].to_pylist() == [3] * 12

    def test_a_reader_of_another_library_sees_the_same(self, rank: Rank) -> None:
        path = written(rank, BOTH, {"grad_reduced": [COUNTED]})
        frame = polars.read_parquet(path)
        assert frame.filter(polars.col("name") == "w").select("step", "norm").rows() == [(0, 5.0), (1, math.inf)]
        assert frame["count"].to_list() == read_table(path)["count"].to_pylist()


class TestLayout:
    def test_floats_are_split_into_bytes_and_the_rest_are_dictionaries_all_compressed(self, rank: Rank) -> None:
        group = ParquetFile(written(rank, {"grad_reduced": [COUNTED]})).metadata.row_group(0)
        chunks = [group.column(number) for number in range(group.num_columns)]
        assert {chunk.compression for chunk in chunks} == {"ZSTD"}
        for chunk in chunks:
            split = chunk.physical_type == "DOUBLE"
            assert ("BYTE_STREAM_SPLIT" in chunk.encodings) == split, chunk.path_in_schema
            assert ("RLE_DICTIONARY" in chunk.encodings) != split, chunk.path_in_schema
            assert chunk.has_column_index
            assert chunk.has_offset_index

    def test_row_groups_are_cut_and_hold_no_text_that_they_do_not_use(
        self, rank: Rank, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(parquet, "GROUP_ROWS", 4)
        path = written(rank, *[{"grad_reduced": [Measured(name) for name in ("c", "a", "b")]}] * 4)
        metadata = ParquetFile(path).metadata
        names = [metadata.row_group(number).column(3).statistics for number in range(metadata.num_row_groups)]
        assert [(one.min, one.max) for one in names] == [("a", "a"), ("b", "b"), ("c", "c")]
        assert [len(chunk.dictionary) for chunk in ParquetFile(path).read()["name"].chunks] == [1, 1, 1]

    def test_a_kind_begins_a_row_group_unless_the_one_before_would_be_small(
        self, rank: Rank, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(parquet, "GROUP_ROWS", 4)
        monkeypatch.setattr(parquet, "LEAST_ROWS", 2)
        kinds = {kind: [Measured(f"w{i}") for i in range(rows)] for kind, rows in (("actv", 1), ("exp_avg", 2), ("other", 5))}
        metadata = ParquetFile(written(rank, kinds)).metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        assert [group.num_rows for group in groups] == [3, 4, 1]
        assert [group.column(0).statistics.min for group in groups] == ["actv", "other", "other"]

    def test_rows_of_several_groups_read_as_those_of_hdf5(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parquet, "GROUP_ROWS", 5)
        monkeypatch.setattr(parquet, "AT_ONCE", 2)
        rng = np.random.default_rng(0)
        steps = [
            {
                "grad_reduced": [Measured(f"w{i}", rng.normal(size=3).tolist(), magnitudes=step > 1) for i in range(4)],
                "actv": [Measured("l", [float(step)], micro_step=micro) for micro in range(step + 1)],
            }
            for step in range(4)
        ]
        ours, theirs = (Rank(tmp_path / name, steps_per_record=10) for name in ("parquet", "hdf5"))
        path = written(ours, *steps)
        written(theirs, *steps, sink=hdf5.Hdf5Sink)
        shard = tmp_path / "hdf5" / "metrics_0-9.h5"
        for span, kind in ((ALL_STEPS, None), (StepSpan(1, 2), None), (StepSpan(1, 2), "actv"), (ALL_STEPS, "grad_reduced")):
            found, expected = rows_of(path, span, kind), hdf5.FORMAT.rows(shard, span, kind)
            plain = [name for name in expected.column_names if name in found.column_names]
            assert found.select(plain).to_pylist() == expected.select(plain).to_pylist()
        assert look(path)[1] == hdf5.FORMAT.look(shard)[1] == {"actv": 10, "grad_reduced": 16}


class TestReading:
    def test_partials_that_were_read_combine(self, rank: Rank) -> None:
        parts = partials_in(rows_of(written(rank, {"grad_reduced": [Measured("w", [3.0]), Measured("v", [4.0])]}), ALL_STEPS))
        assert combine(parts.take(slice(0, 1)), parts.take(slice(1, 2)))["sumsq"].tolist() == [25.0]

    def test_the_table_says_what_the_metadata_say_of_its_steps(self, rank: Rank) -> None:
        sink = ParquetSink(rank.context)
        for step, status in enumerate(("skipped", "complete", "skipped")):
            sink.write(replace(rank.step(step, W), status=status))
        sink.close()
        table = rows_of(rank.context.directory / FILE, StepSpan(1, 2))
        assert ShardMetadata(0, 1e-8, SIX_OPS, (2,), ()) == ShardMetadata.unpacked(table.schema.metadata)
        assert SCHEMA.equals(table.schema.remove_metadata())

    def test_steps_that_join_keep_what_is_there(self, rank: Rank) -> None:
        written(rank, {"grad_reduced": [COUNTED], "attention_hook": [ATTENTION]})
        sink = ParquetSink(rank.context)
        sink.write(rank.step(1, {"grad_reduced": [Measured("a")]}))
        sink.close()
        table = read_table(rank.context.directory / FILE)
        assert table["name"].to_pylist() == ["h.0.attn", "a", "w"]
        assert [one is None for one in table[HISTOGRAM].to_pylist()] == [True, True, False]
        assert table["entropy"].to_pylist() == [1.5, None, None]

    @pytest.mark.parametrize("name", ['a,"b"\nc', "", "nan", "ü", "=cmd()", "a" * 5000])
    def test_names_read_as_they_were(self, rank: Rank, name: str) -> None:
        assert rows_of(written(rank, {"other": [Measured(name)]}), ALL_STEPS, "other")["name"].to_pylist() == [name]


class TestColumnsThatFilesRepeat:
    @pytest.mark.parametrize("names", ["ab", "ac", "ba"])
    @pytest.mark.parametrize("kept_bytes", [parquet.KEPT_BYTES, 100])
    def test_rows_are_those_of_their_own_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, kept_bytes: int
    ) -> None:
        """What is kept goes by the bytes of columns: the same names, others of the same length, and another order of calls."""
        monkeypatch.setattr(parquet, "KEPT_BYTES", kept_bytes)
        for directory, called, value in (("one", "ab", 1.0), ("other", names, 2.0)):
            rows = [{"actv": [Measured(name, [value, step, place]) for place, name in enumerate(called)]} for step in range(5)]
            path = written(Rank(tmp_path / directory, steps_per_record=10), *rows)
            for span in (ALL_STEPS, StepSpan(1, 3)):
                found = rows_of(path, span, "actv").select(["name", "step", "call_id", "sum"]).to_pylist()
                assert [
                    {"name": name, "step": step, "call_id": place, "sum": value + step + place}
                    for step in range(5)
                    for place, name in enumerate(called)
                    if span.first <= step <= span.last
                ] == found

    def test_a_partial_that_only_one_file_has_is_read_there(self, tmp_path: Path) -> None:
        for directory, values in (("one", [1.0, 1.0]), ("other", [1.0, 5.0])):
            path = written(Rank(tmp_path / directory, steps_per_record=10), {"actv": [Measured("a", values)]})
            assert ("m4" in read_table(path).column_names) == (directory == "other")
            assert [partials_of(values)[COLUMNS.index("m4")]] == rows_of(path, ALL_STEPS, "actv")["m4"].to_pylist()

    def test_a_damaged_byte_is_noticed_when_the_columns_were_read_from_another_file(self, tmp_path: Path) -> None:
        one, other = (written(Rank(tmp_path / name, steps_per_record=10), *[W] * 3) for name in ("one", "other"))
        rows_of(one, ALL_STEPS, "grad_reduced")
        content = bytearray(other.read_bytes())
        steps = ParquetFile(other).metadata.row_group(0).column(4)
        content[steps.data_page_offset + steps.total_compressed_size // 2] ^= 1
        other.write_bytes(content)
        with pytest.raises(NotAShardError):
            rows_of(other, ALL_STEPS, "grad_reduced")


def without(column: str) -> Callable[[pa.Table], pa.Table]:
    return lambda rows: rows.drop_columns([column])


def with_column(column: str, values: pa.Array) -> Callable[[pa.Table], pa.Table]:
    return lambda rows: rows.set_column(rows.column_names.index(column), column, values)


class TestForeign:
    """A file that is not ours, or is damaged."""

    @pytest.fixture
    def shard(self, rank: Rank) -> Path:
        return written(rank, *[W] * 3)

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            (without("sumsq"), "sumsq"),
            (with_column("max", pa.array(["a", "b", "c"])), "its column max has the type string and not double"),
            (with_column("count", pa.array([0.5] * 3)), "its column count has the type double and not int64"),
            (with_column("step", pa.array([0, None, 2])), "its column step lacks a value"),
            (with_column("name", pa.array(["w"] * 3)), "its column name has the type string and not dictionary"),
            (lambda rows: rows.replace_schema_metadata(None), "monitor"),
            (lambda rows: rows.replace_schema_metadata({"monitor": "{"}), "Expecting property name"),
            (lambda rows: rows.replace_schema_metadata({"monitor": "[" * 100_000}), "recursion"),
            (
                lambda rows: rows.replace_schema_metadata({"monitor": '{"schema_version": 7}'}),
                "its schema version is 7, and this version of the monitor reads 2",
            ),
        ],
    )
    def test_what_no_shard_holds_is_refused_with_what_it_is(
        self, shard: Path, changed: Callable[[pa.Table], pa.Table], said: str
    ) -> None:
        write_table(changed(read_table(shard)), shard)
        with pytest.raises(NotAShardError, match=said):
            rows_of(shard, ALL_STEPS)

    def test_any_changed_byte_of_a_column_is_noticed(self, shard: Path) -> None:
        content = shard.read_bytes()
        chunk = ParquetFile(shard).metadata.row_group(0).column(0)
        for place in range(chunk.dictionary_page_offset, chunk.dictionary_page_offset + chunk.total_compressed_size, 3):
            damaged = bytearray(content)
            damaged[place] ^= 0x5A
            try:
                assert rows_of(bytes(damaged), ALL_STEPS).to_pylist() == rows_of(content, ALL_STEPS).to_pylist(), place
            except NotAShardError:
                continue

    def test_a_truncated_file_is_refused(self, shard: Path) -> None:
        content = shard.read_bytes()
        for length in (0, 4, len(content) // 2, len(content) - 1):
            with pytest.raises(NotAShardError):
                look(content[:length])

    def test_rows_that_take_no_room_are_not_made(self, shard: Path) -> None:
        rows = read_table(shard).take(pa.array(np.zeros(2_000_000, dtype=np.int64)))
        rows = rows.replace_schema_metadata(read_table(shard).schema.metadata)
        write_table(rows, shard, row_group_size=len(rows), max_rows_per_page=len(rows), compression="zstd")
        with pytest.raises(NotAShardError, match="states more rows than it has room for"):
            look(shard)
