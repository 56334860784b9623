import pytest
from hypothesis import given, strategies as st

from monitor.coordinator.estimate import Bounds, Estimate, KindLoad, estimate
from monitor.formats import FORMATS

GRADIENTS_AND_ACTIVATIONS = {"grad_reduced": KindLoad(100, 100, 1), "actv": KindLoad(400, 1600, 8)}


def test_kinds_add_up_and_the_kind_that_most_ranks_write_says_how_many_do():
    both = estimate(GRADIENTS_AND_ACTIVATIONS, ["csv"], 1)
    assert (both.series, both.rows, both.ranks) == (500, 1700, 8)


def test_bytes_are_those_of_the_rows_in_each_format():
    both = estimate(GRADIENTS_AND_ACTIVATIONS, ["csv", "hdf5"], 1)
    assert both.bytes == 1700 * (FORMATS["csv"].bytes_per_row + FORMATS["hdf5"].bytes_per_row)


def test_histograms_come_on_top_in_the_formats_that_have_them():
    loads = {"adam_update": KindLoad(10, 10, 1, "signed"), "grad_reduced": KindLoad(4, 4, 1, "magnitudes")}
    each = {name: estimate(loads, [name], 1).bytes - 14 * one.bytes_per_row for name, one in FORMATS.items()}
    assert each == {
        "csv": 4 * 220,
        "hdf5": 10 * 95 + 4 * 45,
        "parquet": 10 * 65 + 4 * 25,
        "tensorboard": 10 * 2200 + 4 * 630,
        "api": 0,
    }


def test_csv_writes_a_file_for_each_kind_rank_and_record():
    assert estimate(GRADIENTS_AND_ACTIVATIONS, ["csv"], 1).files == 9
    assert estimate(GRADIENTS_AND_ACTIVATIONS, ["csv"], 10).files == 0.9


@pytest.mark.parametrize("name", ["hdf5", "parquet"])
def test_some_formats_write_a_file_for_each_rank_and_record(name):
    assert estimate(GRADIENTS_AND_ACTIVATIONS, [name], 100).files == 0.08


@pytest.mark.parametrize("name", ["api", "tensorboard"])
def test_other_formats_write_no_file_a_step(name):
    assert estimate(GRADIENTS_AND_ACTIVATIONS, [name], 1).files == 0


@pytest.mark.parametrize(("interval", "files"), [(1, 1), (5, 5), (10, 10), (1000, 10)])
def test_steps_that_are_not_collected_fill_no_file(interval, files):
    assert estimate({"actv": KindLoad(1, 1, 10)}, ["csv"], 10, interval).files == files


def test_a_kind_without_rows_makes_no_file():
    assert estimate({"actv": KindLoad(0, 0, 8)}, ["csv"], 1).files == 0


def test_13_kinds_on_10000_ranks_are_130000_files():
    loads = {str(kind): KindLoad(1, 1, 10_000) for kind in range(13)}
    assert estimate(loads, ["csv"], 1).files == 130_000


def test_nothing_to_write_comes_to_nothing():
    assert estimate({}, ["csv"], 1) == Estimate(0, 0, 0, 0, 0)


def test_the_line_says_what_the_whole_job_will_write():
    assert Estimate(4096, 512_000, 64 * 2**20, 2.6, 8).line() == (
        "each collected step of this job will write 512,000 rows of 4,096 series on 8 ranks: about 64 MiB in 2.6 files"
    )


def test_files_of_many_steps_are_said_by_the_steps_that_one_has():
    line = Estimate(4, 4, 120, 0.02, 2).line()
    assert line.endswith("about 120 bytes in 1 file every 50 steps")


def test_the_line_of_one_small_rank():
    assert Estimate(1, 1, 120, 1.0, 1).line() == (
        "each collected step of this job will write 1 row of 1 series on 1 rank: about 120 bytes in 1 file"
    )


def test_how_long_the_disk_lasts_is_said_in_steps():
    of_a_step = Estimate(4096, 512_000, 64 * 2**20, 2.6, 8)
    assert of_a_step.lasting(2**40, 0) == (
        ". The disk of the output directory has 1 TiB free, about 16,000 collected steps if all ranks write to it"
    )
    assert of_a_step.lasting(None, 2**30) == (
        ". After about 130 collected steps a rank reaches max_output_bytes (1 GiB), and thins its oldest steps"
    )
    assert of_a_step.lasting(None, 0) == Estimate(0, 0, 0, 0, 0).lasting(2**40, 2**30) == ""


def test_each_bound_that_is_exceeded_is_named():
    bounds = Bounds(rows=10_000_000, bytes=2**30, files=10_000)
    assert Estimate(1, 20_000_000, 3 * 2**30, 130_000, 1).exceeded(bounds) == (
        "20,000,000 rows a step for the whole job, more than 10,000,000",
        "3 GiB a step for the whole job, more than 1 GiB",
        "130,000 files a step for the whole job, more than 10,000",
    )


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_bound_is_exceeded_by_more_than_it_and_by_nothing_else(rows, bound):
    assert bool(Estimate(1, rows, 0, 0, 1).exceeded(Bounds(rows=bound))) == (rows > bound)


def test_without_bounds_nothing_is_exceeded():
    assert Estimate(1, 10**12, 1e15, 1e9, 1).exceeded(Bounds()) == ()
