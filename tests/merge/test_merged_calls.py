"""How many calls a row combines comes through a merge, whatever the ranks wrote it in."""

from __future__ import annotations

from pathlib import Path

import h5py
import pyarrow.parquet
import pytest
from recorded_job import EXACT_AND_ROUNDED, FORMATS, RecordedRank, files, merged, table, tensors
from sink_rows import Measured

from monitor.merge.outputs import read_merged
from monitor.series import Placement, Shard

OUTPUTS = ("hdf5", "csv", "parquet")
STEPS = 3
LOSS_SCALE = Measured("loss_scale", [65536.0])


def communicating(
    base: Path, rank: int = 0, ranks: int = 1, steps: int = STEPS, *, counted: bool = True, **how: object
) -> RecordedRank:
    """A rank that calls an operator once in step 0, twice in step 1, and so on, with two elements each time; it has a loss
    scale, and a gradient.

    Args:
        counted: Otherwise it calls it once a step, and its files are those from before calls were counted.
    """
    one = RecordedRank(base, rank, ranks, counted_kinds=["other"] if counted else [], **how)  # type: ignore[arg-type]
    for step in range(steps):
        calls = step + 1 if counted else 1
        reduced = Measured("all_reduce.post_0", [3.0, 4.0] * calls, shape=(2,), calls=calls)
        one.write(step, {"other": [reduced, LOSS_SCALE], "grad_reduced": [Measured("w")]})
    one.close()
    return one


def counts(base: Path, folder: str, output: str = "merged") -> list[tuple[object, ...]]:
    rows = table(base, folder, "other", output).to_pylist()
    return sorted(((row["step"], row.get("rank", row.get("ranks")), row["name"], row["calls"]) for row in rows), key=str)


def expected(ranks: list[object], steps: int = STEPS) -> list[tuple[object, ...]]:
    names = (("all_reduce.post_0", 1), ("loss_scale", None))
    rows = ((step, rank, name, one and step + one) for step in range(steps) for rank in ranks for name, one in names)
    return sorted(rows, key=str)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("formats", ["hdf5", "csv", "parquet", "csv hdf5", "parquet hdf5"])
def test_calls_of_every_rank_are_there(tmp_path: Path, formats: str, output: str) -> None:
    for rank in (0, 1):
        communicating(tmp_path, rank, 2, format=formats.split())
    assert merged(tmp_path, format=output).clean
    assert counts(tmp_path, "per_rank") == expected([0, 1])
    assert counts(tmp_path, "global") == expected(["0", "1"])


def test_ranks_of_one_job_may_have_written_different_formats(tmp_path: Path) -> None:
    for rank, format in enumerate(EXACT_AND_ROUNDED):  # noqa: A001
        communicating(tmp_path, rank, 2, format=format)
    merged(tmp_path)
    assert counts(tmp_path, "per_rank") == expected([0, 1])


@pytest.mark.parametrize("format", FORMATS)
def test_calls_come_through_where_rows_are_put_in_order_first(tmp_path: Path, format: str) -> None:  # noqa: A002
    for rank in (0, 1):
        communicating(tmp_path, rank, 2, format=format, steps=20, steps_per_record=20)
    merged(tmp_path, rows=8)
    assert len(list((tmp_path / "merged" / "per_rank").glob("other_*"))) > 1
    assert counts(tmp_path, "per_rank") == expected([0, 1], 20)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_kind_that_counts_no_calls_has_no_column_for_them(tmp_path: Path, output: str) -> None:
    communicating(tmp_path)
    merged(tmp_path, format=output)
    for folder in ("per_rank", "global"):
        (path,) = (tmp_path / "merged" / folder).glob("grad_reduced_*")
        assert not [name for name in written_columns(path) if name.startswith("calls")]


@pytest.mark.parametrize("output", OUTPUTS)
def test_all_files_of_the_kind_that_counts_calls_have_the_same_columns(tmp_path: Path, output: str) -> None:
    one = RecordedRank(tmp_path, steps_per_record=2, counted_kinds=["other"])
    for step in range(6):
        calls = [Measured("send.pre_0", calls=1)] if step > 3 else []
        one.write(step, {"other": [LOSS_SCALE, *calls]})
    one.close()
    merged(tmp_path, format=output, rows=2)
    found = {tuple(read_merged(path).column_names) for path in (tmp_path / "merged" / "per_rank").iterdir()}
    assert len(found) == 1
    assert table(tmp_path, "per_rank", "other")["calls"].to_pylist() == [None] * 4 + [None, 1] * 2


def written_columns(path: Path) -> list[str]:
    if path.suffix == ".csv":
        return path.read_text().splitlines()[0].replace('"', "").split(",")
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_schema(path).names
    with h5py.File(path) as file:
        return list(file)


def test_elements_of_all_calls_are_counted_and_where_only_the_shape_of_one_is_known_none(tmp_path: Path) -> None:
    for rank, format in enumerate(EXACT_AND_ROUNDED):  # noqa: A001
        communicating(tmp_path, rank, 2, format=format, ops=("norm", "shape"))
    merged(tmp_path)
    for folder in ("per_rank", "global"):
        rows = [row for row in table(tmp_path, folder, "other").to_pylist() if row["name"] == "all_reduce.post_0"]
        counts = {(row["step"], str(row.get("rank", row.get("ranks")))): row["count"] for row in rows}
        assert counts == {(0, "0"): 2, (1, "0"): 4, (2, "0"): 6, (0, "1"): None, (1, "1"): None, (2, "1"): None}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("of_parts", "together"), [((2, 3), 5), ((2, 0), None)])
def test_calls_of_the_parts_of_one_tensor_are_added_if_all_are_known(
    tmp_path: Path,
    format: str,  # noqa: A002
    of_parts: tuple[int, int],
    together: int | None,
) -> None:
    for rank, calls in enumerate(of_parts):
        one = RecordedRank(tmp_path, rank, 2, format, counted_kinds=["other"])
        one.place("other", "all_reduce.post_0", Placement(shard=Shard((0, 1), (2,), (rank,))))
        one.write(0, {"other": [Measured("all_reduce.post_0", [1.0] * calls, shape=(1,), calls=calls)]})
        one.close()
    assert merged(tmp_path).clean
    assert [(row["ranks"], row["calls"]) for row in tensors(tmp_path, "other")] == [("0 1", together)]


def test_copies_are_one_row_with_the_calls_of_the_first(tmp_path: Path) -> None:
    for rank in (0, 1):
        one = RecordedRank(tmp_path, rank, 2, counted_kinds=["other"])
        one.place("other", "all_reduce.post_0", Placement(unclaimed=(0, 1)))
        one.write(0, {"other": [Measured("all_reduce.post_0", calls=7)]})
        one.close()
    assert merged(tmp_path).clean
    assert [(row["ranks"], row["calls"]) for row in tensors(tmp_path, "other")] == [("0", 7)]


def test_the_number_of_workers_changes_no_byte(tmp_path: Path) -> None:
    for rank, format in enumerate(EXACT_AND_ROUNDED):  # noqa: A001
        communicating(tmp_path, rank, 2, format=format, steps=20, steps_per_record=20)
    for workers in (1, 2):
        merged(tmp_path, str(workers), workers=workers, rows=8)
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_files_from_before_calls_were_counted_are_merged_without_them(tmp_path: Path, format: str, output: str) -> None:  # noqa: A002
    """Of two ranks one has such files."""
    communicating(tmp_path, 0, 2, counted=False, format=format)
    communicating(tmp_path, 1, 2, format=format)
    assert merged(tmp_path, format=output).clean
    own = [row for row in expected([0, 1]) if row[1] == 1]
    assert [row for row in counts(tmp_path, "per_rank") if row[1] == 1] == own
    assert [row[-1] for row in counts(tmp_path, "per_rank") if row[1] == 0] == [None] * 6


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_was_merged_before_calls_were_counted_still_reads(tmp_path: Path, output: str) -> None:
    communicating(tmp_path)
    merged(tmp_path, format=output)
    for folder in ("per_rank", "global"):
        (of_calls,) = (tmp_path / "merged" / folder).glob("other_*")
        before = read_merged(of_calls).drop_columns(["calls"])
        rows = remade(of_calls)
        assert rows.column_names == before.column_names
        assert rows["name"].to_pylist() == before["name"].to_pylist()


def remade(path: Path):
    """The rows of a file, read after its column of calls was taken out."""
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            del file["calls"], file["calls_missing"]
    elif path.suffix == ".csv":
        path.write_text("".join(f"{line.rpartition(',')[0]}\n" for line in path.read_text().splitlines()))
    else:
        rows = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(rows.drop_columns(["calls"]), path)
    return read_merged(path)


# Files that somebody else made.


@pytest.mark.parametrize("cell", ["many", "1.5", "9223372036854775808"])
def test_a_csv_with_calls_that_are_no_whole_number_is_set_aside(tmp_path: Path, cell: str) -> None:
    one = communicating(tmp_path)
    (one.directory / "other_5-9.csv").write_text(f"vpp_stage,name,step,norm,calls\n0,send.pre_0,5,1.0,{cell}\n")
    told = merged(tmp_path).told()["set_aside"]["listed"]
    assert [Path(one["path"]).name for one in told] == ["other_5-9.csv"]
    assert counts(tmp_path, "per_rank") == expected([0])


@pytest.mark.parametrize("calls", [0, -1, -(2**63)])
@pytest.mark.parametrize("format", FORMATS)
def test_fewer_calls_than_one_are_none(tmp_path: Path, format: str, calls: int) -> None:  # noqa: A002
    one = communicating(tmp_path, format=format, steps=1)
    if format == "csv":
        path = one.directory / "other_0-4.csv"
        path.write_text(path.read_text().replace(",1\n", f",{calls}\n"))
    elif format == "parquet":
        path = one.directory / "metrics_0-4.parquet"
        rows = pyarrow.parquet.read_table(path)
        column = pyarrow.array([calls if one == 1 else one for one in rows["calls"].to_pylist()])
        pyarrow.parquet.write_table(rows.set_column(rows.column_names.index("calls"), "calls", column), path)
    else:
        with h5py.File(one.directory / "metrics_0-4.h5", "r+") as file:
            file["other/calls"][0] = calls
    merged(tmp_path)
    for folder in ("per_rank", "global"):
        assert [row[-1] for row in counts(tmp_path, folder)] == [None, None]


def test_a_column_of_that_name_in_another_kind_is_not_merged(tmp_path: Path) -> None:
    one = communicating(tmp_path, format="csv", steps=1)
    (one.directory / "exp_avg_0-4.csv").write_text("vpp_stage,name,step,norm,calls\n0,w,0,1.0,3\n")
    merged(tmp_path)
    (row,) = table(tmp_path, "per_rank", "exp_avg").to_pylist()
    assert row["norm"] == 1.0
    assert "calls" not in row
