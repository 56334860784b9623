from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from evidence import examples
from sink_rows import SIX_OPS, Measured, Rank, partials_of
from spool_forms import BOTH, W, write

import monitor.sinks
from monitor.sinks.arrow import SCHEMA, Measurements, ShardMetadata, partials_of as partials_in
from monitor.sinks.hdf5 import Hdf5Sink, NotAShardError, read_hdf5
from monitor.sinks.hdf5_write import image
from monitor.sinks.spool import SpoolBlock
from monitor.stats.partials import COLUMNS, PARTIALS, combine

ROOT = Path(monitor.sinks.__file__).parents[2]


def steps_in(path: Path) -> list[int]:
    return read_hdf5(path)["step"].to_pylist()


class TestFiles:
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


FORKING = """
import os, sys, threading
from pathlib import Path
import h5py
sys.path.insert(0, {tests!r})
from sink_rows import Measured, Rank
from monitor.sinks.hdf5 import Hdf5Sink
out = Path({out!r})
rank = Rank(out, steps_per_record=2)
rows = [rank.step(step, {{"actv": [Measured(f"w{{i}}") for i in range(300)]}}) for step in range({steps})]
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
for number in range({children}):
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
    children = examples(8, 20)
    program = FORKING.format(tests=str(Path(__file__).parent), out=str(out), steps=20 * children, children=children)
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True, timeout=600)
    assert len(list(tmp_path.glob("child*.h5"))) == children
    steps = [step for name in os.listdir(out) for step in steps_in(out / name)]
    assert sorted(list(range(max(steps) + 1)) * 300) == sorted(steps)


class TestForeign:
    """An HDF5 file that is not ours, or is damaged."""

    @pytest.fixture
    def shard(self, rank: Rank, out: Path) -> Path:
        """A file that does not say in which columns all rows are alike, so that every dataset is read."""
        write(Hdf5Sink(rank.context), rank, *range(5), kinds=BOTH)
        with h5py.File(out / "metrics_0-4.h5", "r+") as file:
            for group in file.values():
                del group.attrs["content"]
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

    def test_bytes_that_were_read_before_as_another_type_are_not_taken_for_it(self, shard: Path) -> None:
        assert read_hdf5(shard)["count"].to_pylist()
        with h5py.File(shard, "r+") as file:
            counts = file["actv/count"][...]
            del file["actv/count"]
            made = {"chunks": counts.shape, "maxshape": counts.shape, "shuffle": True, "compression": "lzf"}
            file["actv"].create_dataset("count", data=counts.view(np.float64), **made)
        with pytest.raises(NotAShardError, match="Cannot cast"):
            read_hdf5(shard)

    def test_a_column_that_changed_reads_as_it_is_now(self, shard: Path) -> None:
        before = read_hdf5(shard)["vpp_stage"].to_pylist()
        with h5py.File(shard, "r+") as file:
            file["actv/vpp_stage"][...] = 3
        kinds = read_hdf5(shard)["kind"].to_pylist()
        expected = [3 if kind == "actv" else stage for kind, stage in zip(kinds, before, strict=True)]
        assert read_hdf5(shard)["vpp_stage"].to_pylist() == expected

    @pytest.mark.parametrize(
        "said",
        [
            b"{",
            b"[1]",
            b'{"count": 0.5}',
            b'{"count": [4]}',
            b'{"count": "four"}',
            b'{"name": 4}',
            b'{"count": 1e400}',
            b'{"name": {}}',
        ],
    )
    def test_that_all_rows_are_alike_in_a_way_that_no_column_can_be(self, shard: Path, said: bytes) -> None:
        with h5py.File(shard, "r+") as file:
            file["actv"].attrs["content"] = np.bytes_(said)
        with pytest.raises(NotAShardError):
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


class TestColumnsWhoseRowsAreAlike:
    def _without_saying_so(self, shard: Path) -> Path:
        other = shard.with_name(f"plain-{shard.name}")
        shutil.copyfile(shard, other)
        with h5py.File(other, "r+") as file:
            for group in file.values():
                del group.attrs["content"]
        return other

    def test_they_read_the_same_whether_the_file_says_so_or_not(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, *range(5), kinds=BOTH)
        shard = out / "metrics_0-4.h5"
        with h5py.File(shard) as file:
            said = {kind: json.loads(group.attrs["content"]) for kind, group in file.items()}
            for kind, group in file.items():
                alike = {name: known for name, known in said[kind].items() if isinstance(known, int)}
                assert all((group[name][...] == known).all() for name, known in alike.items())
        assert {"count", "vpp_stage", "micro_step", "nans", "shape", "dtype"} <= said["actv"].keys()
        assert {name for name, known in said["actv"].items() if isinstance(known, dict)} == {"step"}
        assert not said["actv"].keys() & {"sum", "max"}
        for steps in (None, (1, 3), (4, 4)):
            assert read_hdf5(shard, steps=steps).equals(read_hdf5(self._without_saying_so(shard), steps=steps))

    @pytest.mark.parametrize("renamed", [False, True])
    def test_columns_of_another_file_are_not_taken_for_those_of_this_one(self, rank: Rank, out: Path, renamed: bool) -> None:
        """Columns are kept by what is in them: the same steps, and names that differ or come in another order."""
        for directory, names in (("one", "ab"), ("other", "ac" if renamed else "ba")):
            (out / directory).mkdir(parents=True)
            sink = Hdf5Sink(replace(rank.context, directory=out / directory))
            write(sink, rank, *range(5), kinds={"actv": [Measured(name) for name in names]})
            shard = out / directory / "metrics_0-4.h5"
            assert read_hdf5(shard)["name"].to_pylist() == list(names) * 5
            assert read_hdf5(shard).equals(read_hdf5(self._without_saying_so(shard)))

    def test_a_kept_column_must_have_the_rows_of_its_group(self, rank: Rank, out: Path) -> None:
        write(Hdf5Sink(rank.context), rank, *range(5), kinds={"actv": [Measured("a"), Measured("b")]})
        assert len(read_hdf5(out / "metrics_0-4.h5")) == 10
        with h5py.File(out / "metrics_0-4.h5", "r+") as file:
            content = json.loads(file["actv"].attrs["content"])
            file["actv"].attrs["content"] = np.bytes_(json.dumps({**content, "step": 3}))
            steps = file["actv/step"][:5]
            del file["actv/step"]
            file["actv/step"] = steps
        with pytest.raises(NotAShardError, match="has 10 rows and not 5"):
            read_hdf5(out / "metrics_0-4.h5")

    @pytest.mark.parametrize("odd", [0, 40_000, 69_999, None])
    def test_one_row_of_many_chunks_that_differs_is_read(self, tmp_path: Path, odd: int | None) -> None:
        rows = 70_000
        numbers = np.full(rows, 7)
        if odd is not None:
            numbers[odd] = 8
        columns = {name: np.zeros(rows) for name in SCHEMA.names if SCHEMA.field(name).type == pa.float64()}
        columns |= {name: np.zeros(rows, dtype=np.int64) for name in SCHEMA.names if SCHEMA.field(name).type == pa.int64()}
        texts = {name: pa.array([name] * rows).dictionary_encode() for name in ("name", "shape", "dtype")}
        texts["kind"] = pa.array(["actv"] * rows).dictionary_encode()
        arrays = [pa.array(numbers) if name == "count" else texts.get(name, columns.get(name)) for name in SCHEMA.names]
        block = SpoolBlock(pa.record_batch(arrays, schema=SCHEMA), ShardMetadata(0, 1e-8, ("min",), (), ()))
        shard = tmp_path / "metrics_0-0.h5"
        shard.write_bytes(image([block]))
        with h5py.File(shard) as file:
            assert json.loads(file["actv"].attrs["content"]).get("count") == (7 if odd is None else None)
        table = read_hdf5(shard)
        assert (table["count"].to_numpy() == numbers).all()
        assert table.equals(read_hdf5(self._without_saying_so(shard)))


def test_a_table_is_made_of_what_a_step_holds(rank: Rank) -> None:
    rows = rank.step(7, BOTH)
    batch = Measurements(rank.series).of(rows)
    assert isinstance(batch, pa.RecordBatch)
    assert SCHEMA.equals(batch.schema)
    assert batch["name"].to_pylist() == ["l.output", "w"]
    assert batch["micro_step"].to_pylist() == [0, None]
