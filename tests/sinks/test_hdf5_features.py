"""Features, shares and histograms in the ``hdf5`` format."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from sink_rows import Measured, Rank, magnitudes_of
from spool_forms import AGREEING, ATTENTION, COUNTED, MATRIX, SIGNED, SMALL

from monitor.sinks import hdf5_write
from monitor.sinks.arrow import partials_of
from monitor.sinks.hdf5 import Hdf5Sink, NotAShardError, read_hdf5, recover
from monitor.stats.histograms import BINS, UNIT_UPPER, UPPER, histogram_text
from monitor.stats.partials import COUNT, MAX, SMALLS, SUM, SUMSQ, combine_groups

CUT = Measured("h.1.mlp.weight", numbers={COUNT: 20, SMALLS: 2, SUMSQ: 36.0, MAX: 2.0})


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "run", steps_per_record=10)


def written(rank: Rank, *steps: dict[str, list[Measured]]) -> Path:
    """The file of a record with these rows, a step each."""
    sink = Hdf5Sink(rank.context)
    for step, kinds in enumerate(steps):
        sink.write(rank.step(step, kinds))
    sink.close()
    return rank.context.directory / "metrics_0-9.h5"


class TestFeatures:
    def test_their_columns_stand_beside_the_partials(self, rank: Rank) -> None:
        with h5py.File(written(rank, {"attention_hook": [ATTENTION], "linear_hook": [MATRIX]})) as file:
            rows = file["attention_hook"]
            assert [rows[name][0] for name in ("count", "entropy", "softmax_max", "sum")] == [4, 1.5, 0.75, 6.0]
            assert [file["linear_hook"][name][0] for name in ("sr", "kernel_norm", "frobenius_norm")] == [2.5, 2.0, 5.0]

    def test_what_has_no_value_is_nan(self, rank: Rank) -> None:
        with h5py.File(written(rank, {"linear_hook": [MATRIX, CUT]})) as file:
            np.testing.assert_array_equal(file["linear_hook/kernel_norm"][...], [2.0, np.nan])
            np.testing.assert_array_equal(file["linear_hook/frobenius_norm"][...], [5.0, 6.0])

    def test_a_share_stands_beside_what_it_is_a_share_of(self, rank: Rank) -> None:
        with h5py.File(written(rank, {"mg_direction": [AGREEING]})) as file:
            assert [file["mg_direction"][name][0] for name in ("mg_direction", "count")] == [0.75, 8]

    def test_other_kinds_have_no_such_columns(self, rank: Rank) -> None:
        with h5py.File(written(rank, {"grad_reduced": [Measured("w")]})) as file:
            assert {"entropy", "sr", "mg_direction", "histogram"}.isdisjoint(file["grad_reduced"])

    def test_rows_beyond_a_chunk_have_theirs(self, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hdf5_write, "CHUNK_ROWS", 4)
        steps = [{"mg_direction": [Measured(f"p{i}", numbers={COUNT: 10, SUM: i}) for i in range(3)]}] * 3
        with h5py.File(written(rank, *steps)) as file:
            np.testing.assert_array_equal(file["mg_direction/mg_direction"][...], [0, 0.1, 0.2] * 3)

    def test_they_are_derived_where_they_are_asked_for_and_are_null_elsewhere(self, rank: Rank) -> None:
        path = written(rank, {"attention_hook": [ATTENTION], "grad_reduced": [Measured("w")], "linear_hook": [MATRIX]})
        table = read_hdf5(path, ops=["entropy", "sr", "norm"])
        assert table["entropy"].to_pylist() == [1.5, None, None]
        assert table["sr"].to_pylist() == [None, None, 2.5]
        assert table["norm"].to_pylist() == [None, 5.0, None]

    def test_a_share_has_ops_as_in_csv_and_is_one_itself(self, rank: Rank) -> None:
        table = read_hdf5(
            written(rank, {"grad_reduced": [Measured("w")], "mg_direction": [AGREEING]}), ops=["mg_direction", "mean"]
        )
        assert table["mg_direction"].to_pylist() == [None, 0.75]
        assert table["mean"].to_pylist() == [3.5, 0.75]

    def test_a_share_is_not_of_calls(self, rank: Rank) -> None:
        sink = Hdf5Sink(rank.context)
        rows = {"other": [Measured("all_reduce.post_0", calls=3)], "mg_direction": [AGREEING]}
        sink.write(rank.step(0, rows, counted_kinds=frozenset({"other"})))
        sink.close()
        assert read_hdf5(rank.context.directory / "metrics_0-9.h5", ops=[])["calls"].to_pylist() == [None, 3]

    def test_partials_that_were_read_combine(self, rank: Rank) -> None:
        table = read_hdf5(written(rank, {"mg_direction": [AGREEING, Measured("v", numbers={COUNT: 2, SUM: 0.0})]}))
        whole = combine_groups(partials_of(table), np.array([0])).columns[:, 0]
        assert whole[SUM] / whole[COUNT] == 0.6


class TestHistograms:
    def test_they_are_rows_of_a_dataset_that_says_where_its_bins_end(self, rank: Rank) -> None:
        with h5py.File(written(rank, {"grad_reduced": [COUNTED]}, {"grad_reduced": [COUNTED]})) as file:
            histogram = file["grad_reduced/histogram"]
            np.testing.assert_array_equal(histogram[...], [magnitudes_of(SMALL)] * 2)
            np.testing.assert_array_equal(histogram.attrs["upper"], UPPER)
            assert (histogram.dtype, histogram.chunks, histogram.compression) == (np.int64, (2, BINS), "lzf")

    def test_those_of_signed_numbers_have_bins_of_their_own(self, rank: Rank) -> None:
        path = written(rank, {"adam_update": [SIGNED], "grad_reduced": [COUNTED]})
        with h5py.File(path) as file:
            np.testing.assert_array_equal(file["adam_update/histogram"][...], [SIGNED.histogram])
            np.testing.assert_array_equal(file["adam_update/histogram"].attrs["upper"], UNIT_UPPER)
        assert [len(one) for one in read_hdf5(path)["histogram"].to_pylist()] == [len(UNIT_UPPER), BINS]

    def test_rows_without_one_are_zeros_in_the_file_and_null_in_the_table(self, rank: Rank) -> None:
        plain = {"grad_reduced": [Measured("w")]}
        path = written(rank, plain, {"grad_reduced": [Measured("v"), COUNTED]}, plain)
        with h5py.File(path) as file:
            assert (file["grad_reduced/histogram"][...].sum(axis=1) == [0, 0, 4, 0]).all()
        assert [one is None for one in read_hdf5(path)["histogram"].to_pylist()] == [True, True, False, True]

    def test_a_kind_without_any_has_no_dataset_and_a_file_without_any_no_column(self, rank: Rank) -> None:
        path = written(rank, {"actv": [Measured("a", micro_step=0)], "grad_reduced": [COUNTED]})
        with h5py.File(path) as file:
            assert "histogram" not in file["actv"]
        assert "histogram" not in read_hdf5(path, kinds=["actv"]).column_names

    def test_those_beyond_a_chunk_stand_with_their_rows(self, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hdf5_write, "CHUNK_HISTOGRAMS", 4)
        steps = [
            {"actv": [Measured(f"m{i}", [float(2**i)] * (step + 1), 0, magnitudes=step % 3 == 1) for i in range(3)]}
            for step in range(9)
        ]
        path = written(rank, *steps)
        found = read_hdf5(path)["histogram"].to_pylist()
        expected = [magnitudes_of(m.values).tolist() if m.magnitudes else None for step in steps for m in step["actv"]]
        assert found == expected
        assert [
            one for step in range(9) for one in read_hdf5(path, steps=(step, step)).to_pylist() if one.get("histogram")
        ] == [one for one in read_hdf5(path).to_pylist() if one["histogram"]]

    def test_what_is_lost_in_low_precision_is_derived(self, rank: Rank) -> None:
        ops = ["underflow_fp16", "overflow_fp16", "magnitude_histogram"]
        table = read_hdf5(written(rank, {"adam_update": [SIGNED], "grad_reduced": [COUNTED, Measured("v")]}), ops=ops)
        assert table["underflow_fp16"].to_pylist() == [None, 0.2, None]
        assert table["overflow_fp16"].to_pylist() == [None, 0.0, None]
        assert table["magnitude_histogram"].to_pylist() == [None, histogram_text(magnitudes_of(SMALL)), None]

    def test_those_that_were_read_combine(self, rank: Rank) -> None:
        table = read_hdf5(written(rank, {"grad_reduced": [COUNTED, Measured("v", [1.0], magnitudes=True)]}))
        whole = combine_groups(partials_of(table), np.array([0]))
        np.testing.assert_array_equal(whole.histogram, [magnitudes_of([*SMALL, 1.0])])

    def test_a_dataset_of_another_width_is_refused(self, rank: Rank) -> None:
        path = written(rank, {"grad_reduced": [COUNTED]})
        with h5py.File(path, "a") as file:
            del file["grad_reduced/histogram"]
            file["grad_reduced/histogram"] = np.zeros((1, 5), dtype=np.int64)
        with pytest.raises(NotAShardError, match="histogram is not a plain column"):
            read_hdf5(path)


class TestUnion:
    """Of records that are continued, written again, or left by a kill."""

    def test_steps_that_join_keep_the_histograms_of_those_before(self, rank: Rank) -> None:
        written(rank, {"grad_reduced": [COUNTED]})
        sink = Hdf5Sink(rank.context)
        sink.write(rank.step(1, {"grad_reduced": [Measured("w")]}))
        sink.write(rank.step(2, {"grad_reduced": [Measured("w", [8.0], magnitudes=True)]}))
        sink.close()
        found = read_hdf5(rank.context.directory / "metrics_0-9.h5")["histogram"].to_pylist()
        assert found == [magnitudes_of(SMALL).tolist(), None, magnitudes_of([8.0]).tolist()]

    def test_a_step_written_again_has_the_new_ones(self, rank: Rank) -> None:
        written(rank, {"grad_reduced": [COUNTED]}, {"grad_reduced": [COUNTED]})
        sink = Hdf5Sink(rank.context)
        sink.write(rank.step(1, {"grad_reduced": [Measured("w", [8.0], magnitudes=True)]}))
        sink.close()
        found = read_hdf5(rank.context.directory / "metrics_0-9.h5")["histogram"].to_pylist()
        assert found == [magnitudes_of(SMALL).tolist(), magnitudes_of([8.0]).tolist()]

    def test_a_part_that_a_kill_left_is_recovered_with_them(self, rank: Rank) -> None:
        sink = Hdf5Sink(rank.context)
        sink.write(rank.step(0, {"grad_reduced": [Measured("w")], "linear_hook": [MATRIX]}))
        sink.write(rank.step(1, {"grad_reduced": [COUNTED]}))
        recover(rank.context.directory, 0, 0, 0)
        table = read_hdf5(rank.context.directory / "metrics_0-9.h5")
        assert table["histogram"].to_pylist() == [None, magnitudes_of(SMALL).tolist(), None]
        with h5py.File(rank.context.directory / "metrics_0-9.h5") as file:
            assert file["linear_hook/sr"][0] == 2.5

    @pytest.mark.parametrize("left", [COUNTED, Measured("w", SMALL)])
    def test_a_part_whose_rows_are_visible_is_news_if_its_histograms_are_not(self, tmp_path: Path, left: Measured) -> None:
        path = written(Rank(tmp_path / "run", steps_per_record=10), {"grad_reduced": [Measured("w", SMALL)]})
        aside = path.rename(tmp_path / "aside.h5")
        resumed = Rank(path.parent, steps_per_record=10)
        Hdf5Sink(resumed.context).write(resumed.step(0, {"grad_reduced": [left]}))
        aside.rename(path)
        recover(path.parent, 0, 0, 0)
        assert read_hdf5(path)["count"].to_pylist() == [len(SMALL)]
        assert ("histogram" in read_hdf5(path).column_names) == left.magnitudes
