"""The algebra of partials."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from evidence import examples
from hypothesis import given, settings, strategies as st
from reference import assert_agrees, check_sums, checked, derived

from monitor.stats.partials import BITS_LOW, COLUMNS, EMPTY, Partials, combine, combine_groups, union
from monitor.stats.torch.host_kernel import TorchHostKernel

KERNEL = TorchHostKernel(1e-8)
HIGHER_KERNEL = TorchHostKernel(1e-8, higher=True)


def row(x: torch.Tensor) -> np.ndarray:
    return np.array(KERNEL.reduce(x), dtype=np.float64)


def higher_row(x: torch.Tensor) -> np.ndarray:
    return np.array(HIGHER_KERNEL.reduce(x), dtype=np.float64)


def scipy_kurtosis(x: np.ndarray) -> float:
    """As ``scipy.stats.kurtosis`` computes it by default, in extended precision."""
    off = x.astype(np.longdouble) - x.astype(np.longdouble).mean()
    return float((off**4).mean() / np.square(off).mean() ** 2 - 3)


values = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, -0.0, 1e-30, -1e30, float("nan"), float("inf"), float("-inf"), 1e-9])
)


@given(st.lists(values, max_size=30), st.lists(st.integers(0, 30), max_size=4))
@settings(max_examples=300)
def test_however_a_tensor_is_cut_its_parts_combine_to_the_whole(numbers: list[float], cuts: list[int]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    edges = [0, *sorted(min(cut, len(numbers)) for cut in cuts), len(numbers)]
    parts = [row(x[a:b]) for a, b in pairwise(edges)]
    assert_agrees(union(np.array(parts)), x, 1e-8)


@given(st.lists(values, max_size=30), st.lists(st.integers(0, 30), max_size=4))
@settings(max_examples=300)
def test_kurtosis_of_the_parts_of_a_tensor_combines_to_that_of_the_whole(numbers: list[float], cuts: list[int]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    edges = [0, *sorted(min(cut, len(numbers)) for cut in cuts), len(numbers)]
    parts = [higher_row(x[a:b]) for a, b in pairwise(edges)]
    assert_agrees(union(np.array(parts)), x, 1e-8, higher=True)


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e8])
def test_kurtosis_of_many_shards_does_not_lose_digits_to_a_large_mean(mean: float) -> None:
    x = mean + torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    parts = np.array([higher_row(part) for part in x.split([1, 999, 2500, 500])])
    one_after_the_other = parts[0]
    for part in parts[1:]:
        one_after_the_other = union(np.array([one_after_the_other, part]))
    expected = scipy_kurtosis(x.numpy())
    for whole in (higher_row(x), union(parts), one_after_the_other):
        assert derived(whole)["kurtosis"] == pytest.approx(expected, rel=1e-6)


def test_kurtosis_is_absent_where_one_of_the_parts_has_none() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 8.0, 3.0, 3.0])
    known, unknown, constant = higher_row(x[:2]), row(x[2:4]), row(x[4:])
    assert "kurtosis" not in derived(union(np.array([known, unknown])))
    assert "kurtosis" not in derived(union(np.array([unknown, known, constant])))
    assert derived(union(np.array([known, constant])))["kurtosis"] == pytest.approx(scipy_kurtosis(x[[0, 1, 4, 5]].numpy()))


def test_kurtosis_of_parts_of_extreme_scale_is_right_or_absent() -> None:
    drawn = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    for scale in (1e-300, 1e-120, 1e-90, 1e-70, 1.0, 1e70, 1e90, 1e120, 1e300):
        parts = np.array([higher_row(part * scale) for part in drawn.split(100)])
        assert derived(union(parts))["kurtosis"] == pytest.approx(scipy_kurtosis(drawn.numpy()), rel=1e-9), scale
    tiny, wide = 1 + 1e-15 * torch.arange(3, dtype=torch.float64), torch.tensor([1e80, -1e80, 2e80], dtype=torch.float64)
    mixed = derived(union(np.array([higher_row(x) for x in (tiny, wide)])))
    assert mixed["kurtosis"] == pytest.approx(scipy_kurtosis(np.concatenate([tiny, wide])), rel=1e-6)


def test_norms_do_not_add_and_means_do_not_average() -> None:
    both = derived(union(np.array([row(torch.tensor([3.0])), row(torch.tensor([4.0, 0.0, 0.0]))])))
    assert (both["norm"], both["mean"]) == (5.0, 1.75)


def test_a_root_mean_square_is_finite_though_the_norm_leaves_the_range() -> None:
    greatest = torch.finfo(torch.float64).max
    whole = derived(row(torch.tensor([greatest, -greatest, greatest / 2, 0.0], dtype=torch.float64)))
    assert whole["norm"] == math.inf
    assert whole["rms"] == pytest.approx(greatest * 0.75, rel=1e-15)


def test_nothing_is_the_neutral_element() -> None:
    one = row(torch.tensor([1.5, -2.0]))
    np.testing.assert_array_equal(union(np.array([one, EMPTY])), one)
    np.testing.assert_array_equal(union(np.array([EMPTY, one])), one)


def test_parts_of_extreme_scale_combine_without_overflow_or_underflow() -> None:
    huge, tiny = (torch.tensor([scale, scale], dtype=torch.float64) for scale in (1e300, 1e-300))
    for x in (huge, tiny, torch.cat([huge, tiny])):
        assert_agrees(union(np.array([row(x[:1]), row(x[1:])])), x, 1e-8)
    zeros = torch.zeros(2, dtype=torch.float64)
    assert_agrees(union(np.array([row(zeros), row(tiny)])), torch.cat([zeros, tiny]), 1e-8)


def test_pairs_combine_row_by_row() -> None:
    a, b = (Partials.from_rows(np.array([row(torch.full((n,), 2.0)), row(torch.full((n,), -1.0))])) for n in (2, 3))
    both = combine(a, b)
    assert both["count"].tolist() == [5, 5]
    assert both["sum"].tolist() == [10, -5]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=50)
def test_runs_of_rows_combine_each_on_its_own(lengths: list[int]) -> None:
    rows = np.array([row(torch.full((3,), float(i))) for i in range(sum(lengths))])
    starts = np.cumsum([0, *lengths[:-1]])
    together = combine_groups(Partials.from_rows(rows), starts)
    alone = [union(rows[start : start + n]) for start, n in zip(starts, lengths, strict=True)]
    np.testing.assert_allclose(together.columns.T, np.array(alone))


def test_columns_are_found_by_name() -> None:
    partials = Partials.from_rows(np.arange(2 * len(COLUMNS), dtype=np.float64).reshape(2, -1))
    assert [partials[name].tolist() for name in COLUMNS] == partials.columns.tolist()
    with pytest.raises(ValueError, match="not in"):
        partials["median"]


@pytest.mark.parametrize("rows", [np.array([4, 0, 2]), np.arange(5) % 2 == 0, slice(1, 4)], ids=["index", "flags", "slice"])
def test_rows_that_are_taken_stay_contiguous_along_each_column(rows: np.ndarray | slice) -> None:
    """Reading a column of them would otherwise fetch all twelve."""
    numbers = np.random.default_rng(0).random((5, len(COLUMNS)))
    taken = Partials.from_rows(numbers).take(rows)
    assert np.array_equal(taken.columns, numbers.T[:, rows])
    assert taken.columns.strides[1] == taken.columns.itemsize


CHECKING_KERNEL = TorchHostKernel(1e-8, check_sums=True)


def row_of(x: torch.Tensor) -> np.ndarray:
    page = np.zeros((1, len(COLUMNS)))
    assert CHECKING_KERNEL.reduce_into(x, page, 0)
    return page[0]


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
@settings(max_examples=examples(100, 1000))
def test_check_sums_of_parts_add_up_to_those_of_the_whole(bits: list[int], cuts: list[int]) -> None:
    whole = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))
    ends = sorted({min(cut, len(bits)) for cut in cuts} | {len(bits)})
    begins = [0, *ends[:-1]]
    rows = np.array([row_of(whole[begin:end]) for begin, end in zip(begins, ends, strict=True)])
    assert checked(union(rows)) == checked(row_of(whole)) == check_sums(whole)
    order = np.random.default_rng(0).permutation(len(rows))  # shards may come in any order if each says where it begins
    shuffled = Partials.from_rows(rows[order])
    together = combine_groups(shuffled, np.zeros(1, dtype=np.int64), np.array(begins)[order])
    assert checked(together.columns[:, 0]) == checked(row_of(whole))


def test_parts_whose_place_is_not_known_and_parts_without_check_sums_make_no_check_sum() -> None:
    rows = np.array([row_of(torch.ones(3)), row_of(torch.ones(4))])
    assert checked(combine_groups(Partials.from_rows(rows), np.zeros(1, dtype=np.int64)).columns[:, 0]) == (0, 0)
    rows[1, BITS_LOW:] = 0
    assert checked(union(rows)) == (0, 0)
    with_none = np.array([row_of(torch.ones(3)), row_of(torch.empty(0))])
    assert checked(union(with_none)) == check_sums(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_flipped_bit_no_swap_and_no_opposite_pair_is_missed(dtype: torch.dtype) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    raw = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    before, seen = row_of(x), set()
    numbers = np.frombuffer(x.view(torch.uint8).numpy().tobytes(), dtype=raw)
    for place in range(len(numbers)):
        for bit in range(8 * dtype.itemsize):
            seen.add(checked(row_of(_changed(numbers, {place: numbers[place] ^ raw(1 << bit)}, dtype))))
    for one in range(len(numbers)):
        for other in range(one):
            if numbers[one] != numbers[other]:
                swapped = {one: numbers[other], other: numbers[one]}
                seen.add(checked(row_of(_changed(numbers, swapped, dtype))))
            with np.errstate(over="ignore"):
                opposite = {one: numbers[one] + raw(1), other: numbers[other] - raw(1)}
            seen.add(checked(row_of(_changed(numbers, opposite, dtype))))
    assert checked(before) not in seen


def _changed(numbers: np.ndarray, places: dict[int, np.generic], dtype: torch.dtype) -> torch.Tensor:
    changed = numbers.copy()
    for place, number in places.items():
        changed[place] = number
    return torch.from_numpy(changed.view(np.uint8)).view(dtype)
