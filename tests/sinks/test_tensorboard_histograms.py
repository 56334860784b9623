from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from counted_rows import counted_step, histograms
from evidence import examples
from hypothesis import given, settings, strategies as st
from sink_rows import Measured, Rank
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monitor.series import Series
from monitor.sinks.tensorboard import TensorBoardSink, magnitudes, signed
from monitor.stats.partials import MAX, MIN, Partials
from monitor.stats.table import StepRows

FLOATS = st.floats(-1e150, 1e150)


def write(rank: Rank, *steps: StepRows) -> None:
    sink = TensorBoardSink(rank.context)
    for rows in steps:
        sink.write(rows)
    sink.close()


def only_buckets(out: Path) -> list[list[float]]:
    (steps,) = histograms(out).values()
    ((_, buckets),) = steps
    return buckets


def filled(buckets: list[list[float]]) -> list[list[float]]:
    return [one for one in buckets if one[2]]


class TestMagnitudes:
    def test_buckets_are_of_the_logarithm_from_the_first_that_is_filled_to_the_last(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 3, {"grad_reduced": [Measured("w", [0.25, -0.2, 1.0, 0.75, -0.6])]}))
        assert histograms(out) == {
            "0:w/rank0/grad_reduced_magnitude_histogram": [(3, [[-3.0, -2.0, 2.0], [-2.0, -1.0, 0.0], [-1.0, 0.0, 3.0]])]
        }

    def test_zeros_and_what_is_not_finite_are_left_out(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 0, {"actv": [Measured("x", [0.0, -0.0, 2.0, math.nan, math.inf, -math.inf])]}))
        assert only_buckets(out) == [[0.0, 1.0, 1.0]]

    def test_of_zeros_alone_there_is_no_histogram(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 0, {"actv": [Measured("x", [0.0, 0.0])]}))
        assert histograms(out) == {}

    def test_the_smallest_numbers_and_those_beyond_single_precision_stand_at_the_ends(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 0, {"actv": [Measured("x", [2.0**-149, -(2.0**200)])]}))
        buckets = only_buckets(out)
        assert (buckets[0], buckets[-1]) == ([-150.0, -149.0, 1.0], [128.0, 200.0, 1.0])

    def test_a_bin_that_ends_where_a_format_does_is_a_bucket_of_its_own(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 0, {"actv": [Measured("x", [448.0, 500.0])]}))
        limit = math.log2(464)
        assert only_buckets(out) == [[8.0, limit, 1.0], [limit, 9.0, 1.0]]

    def test_every_row_has_its_tag(self, rank: Rank, out: Path) -> None:
        one = [Measured("l.input_0#1", micro_step=2), Measured("ü\n", vpp_stage=1)]
        write(rank, counted_step(rank, 0, {"actv": one}))
        tags = {f"{Series('actv', m.vpp_stage, m.name).tag(0, m.micro_step)}_magnitude_histogram" for m in one}
        assert set(histograms(out)) == tags
        assert "0:l.input_0#1:2/rank0/actv_magnitude_histogram" in tags

    def test_nothing_is_written_that_is_not_among_the_ops(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 0, {"actv": [Measured("x")]}, ops=("norm", "underflow_e4m3")))
        assert histograms(out) == {}

    def test_rows_without_a_whole_histogram_have_none(self, rank: Rank, out: Path) -> None:
        rows = counted_step(rank, 0, {"actv": [Measured("x", [1.0, 2.0]), Measured("y", [1.0])]})
        rows.kinds["actv"].partials.histogram[0] = 0
        write(rank, rows)
        assert set(histograms(out)) == {"0:y/rank0/actv_magnitude_histogram"}

    @settings(max_examples=examples(20, 50))
    @given(st.lists(FLOATS, min_size=1, max_size=20))
    def test_every_element_but_zeros_is_in_the_bucket_around_it(self, values: list[float]) -> None:
        rows = counted_step(Rank(Path("unused")), 0, {"actv": [Measured("x", values)]})
        buckets = magnitudes(rows.kinds["actv"].partials, 0)
        assert np.isfinite(buckets).all()
        powers = [math.log2(abs(x)) for x in values if x]
        around = [((low < p) & (p <= high)).sum() for low, high, _ in buckets for p in [np.maximum(powers, -149.0)]]
        assert around == buckets[:, 2].tolist()


class TestSigned:
    def test_the_bins_between_minus_one_and_one_are_always_there(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 5, {"adam_update": [Measured("w", [0.0, 0.01, -0.99])]}))
        buckets = only_buckets(out)
        edges = np.linspace(-1, 1, 65).tolist()
        assert [one[:2] for one in buckets] == [list(pair) for pair in pairwise(edges)]
        assert filled(buckets) == [[-1.0, -0.96875, 1.0], [-0.03125, 0.0, 1.0], [0.0, 0.03125, 1.0]]

    def test_what_is_beyond_ends_at_the_extremes(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 5, {"adam_ratio": [Measured("w", [-7.0, -1.5, 0.5, 3.0, 2.0, 1.5])]}))
        assert filled(only_buckets(out)) == [[-7.0, -1.0, 2.0], [0.46875, 0.5, 1.0], [1.0, 3.0, 3.0]]

    def test_elements_at_minus_one_are_a_bucket_without_width(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 5, {"adam_ratio": [Measured("w", [-1.0, -1.0])]}))
        assert filled(only_buckets(out)) == [[-1.0, -1.0, 2.0]]

    def test_tags_end_in_histogram_and_need_no_op(self, rank: Rank, out: Path) -> None:
        kinds = {"adam_update": [Measured("w")], "adam_ratio": [Measured("w")]}
        write(rank, counted_step(rank, 0, kinds, ops=("norm",)), counted_step(rank, 1, kinds, ops=("norm",)))
        found = {tag: [step for step, _ in steps] for tag, steps in histograms(out).items()}
        assert found == {"0:w/rank0/adam_update_histogram": [0, 1], "0:w/rank0/adam_ratio_histogram": [0, 1]}

    def test_where_the_extremes_contradict_the_bins_there_is_no_histogram(self) -> None:
        rows = counted_step(Rank(Path("unused")), 0, {"adam_ratio": [Measured("w", [-2.0, 2.0])]})
        partials = rows.kinds["adam_ratio"].partials
        for column, wrong in ((MIN, -0.5), (MIN, -math.inf), (MAX, 0.5), (MAX, math.nan)):
            columns = partials.columns.copy()
            columns[column] = wrong
            assert signed(Partials(columns, partials.histogram), 0).shape == (0, 3)

    def test_bins_that_were_joined_with_wider_ones_are_the_same(self) -> None:
        rows = counted_step(Rank(Path("unused")), 0, {"adam_ratio": [Measured("w", [-2.0, 0.3, 2.0])]})
        partials = rows.kinds["adam_ratio"].partials
        wide = Partials(partials.columns, np.pad(partials.histogram, ((0, 0), (0, 200))))
        assert signed(wide, 0).tolist() == signed(partials, 0).tolist()

    @settings(max_examples=examples(20, 50))
    @given(st.lists(FLOATS, min_size=1, max_size=20))
    def test_every_element_is_in_the_bucket_around_it(self, values: list[float]) -> None:
        rows = counted_step(Rank(Path("unused")), 0, {"adam_update": [Measured("x", values)]})
        buckets = signed(rows.kinds["adam_update"].partials, 0)
        assert np.isfinite(buckets).all()
        assert (np.diff(buckets[:, 0]) >= 0).all()
        x = np.array(values)
        closed = [(low < x) if number else (low <= x) for number, low in enumerate(buckets[:, 0])]
        assert [(above & (x <= high)).sum() for above, high in zip(closed, buckets[:, 1], strict=True)] == buckets[
            :, 2
        ].tolist()


class TestFiles:
    def test_scalars_stand_beside_histograms(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 0, {"actv": [Measured("x")], "adam_update": [Measured("w")]}))
        run = EventAccumulator(str(out))
        run.Reload()
        assert set(run.Tags()["scalars"]) == {"0:x/rank0/actv_norm", "0:w/rank0/adam_update_norm"}

    def test_of_a_step_written_again_the_new_histogram_is_shown(self, rank: Rank, out: Path) -> None:
        for value in (1.0, 4.0):
            write(rank, *(counted_step(rank, step, {"actv": [Measured("x", [value])]}) for step in (0, 1)))
        assert histograms(out) == {"0:x/rank0/actv_magnitude_histogram": [(0, [[1.0, 2.0, 1.0]]), (1, [[1.0, 2.0, 1.0]])]}

    def test_a_histogram_says_what_its_axis_is(self, rank: Rank, out: Path) -> None:
        write(rank, counted_step(rank, 0, {"actv": [Measured("x")], "adam_update": [Measured("w")]}))
        run = EventAccumulator(str(out))
        run.Reload()
        of_magnitudes = run.SummaryMetadata("0:x/rank0/actv_magnitude_histogram")
        assert of_magnitudes.plugin_data.plugin_name == "histograms"
        assert "base-2 logarithm" in of_magnitudes.summary_description
        assert "between −1 and 1" in run.SummaryMetadata("0:w/rank0/adam_update_histogram").summary_description

    def test_an_error_in_a_histogram_leaves_the_step_out(self, rank: Rank, out: Path) -> None:
        good, broken = (counted_step(rank, step, {"actv": [Measured("x"), Measured("y")]}) for step in (0, 1))
        wrong = replace(broken.kinds["actv"].partials, histogram=np.array([[0, 0, 2]] * 2))
        broken = replace(broken, kinds={"actv": replace(broken.kinds["actv"], partials=wrong)})
        sink = TensorBoardSink(rank.context)
        sink.write(good)
        with pytest.raises(ValueError, match="dimension"):
            sink.write(broken)
        sink.write(counted_step(rank, 2, {"actv": [Measured("x")]}))
        run = EventAccumulator(str(out))
        run.Reload()
        assert [one.step for one in run.Scalars("0:x/rank0/actv_norm")] == [0, 2]
        assert [step for step, _ in histograms(out)["0:x/rank0/actv_magnitude_histogram"]] == [0, 2]
