"""Tensors that are copied and reduced together give the rows that each gives alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_agrees

from monitor.stats.partials import MAX
from monitor.stats.torch_copies import Copies
from monitor.stats.torch_host_kernel import HostKernel
from monitor.stats.torch_small_tensors import BATCH, SMALL
from monitor.stats.torch_tensors import is_plain

EPS = 1e-8


class Table:
    """What copies are entered into.

    Attributes:
        rows: The numbers of each row.
        entered: How often rows were entered.
    """

    def __init__(self, eps: float = EPS) -> None:
        self.rows: dict[int, np.ndarray] = {}
        self.entered = 0
        self.copies = Copies(eps, HostKernel(eps).reduce, self.enter)

    def enter(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        self.entered += 1
        assert len(set(rows.tolist())) == len(rows) == len(numbers)
        self.rows |= dict(zip(rows.tolist(), numbers, strict=True))


def rows_of(tensors: list[torch.Tensor], eps: float = EPS) -> dict[int, np.ndarray]:
    """One by one, as hooks copy them."""
    table = Table(eps)
    for row, x in enumerate(tensors):
        table.copies.take(row, x)
    table.copies.reduce()
    return table.rows


def rows_of_all(tensors: list[torch.Tensor]) -> dict[int, np.ndarray]:
    """All at once, as weights are copied."""
    table = Table()
    table.copies.take_all(range(len(tensors)), tensors)
    table.copies.reduce()
    return table.rows


def assert_all_agree(rows: dict[int, np.ndarray], tensors: list[torch.Tensor], eps: float = EPS) -> None:
    assert sorted(rows) == list(range(len(tensors)))
    for row, x in enumerate(tensors):
        assert_agrees(rows[row], x, eps)


values = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1e-9, 1e-30, 1e30, math.nan, math.inf, -math.inf, 1.0]))


@given(st.lists(st.lists(values, min_size=1, max_size=12), max_size=6))
@settings(max_examples=200, deadline=None)
def test_each_row_is_that_of_its_tensor(numbers: list[list[float]]) -> None:
    tensors = [torch.tensor(n, dtype=torch.float32) for n in numbers]
    assert_all_agree(rows_of(tensors), tensors)


@given(st.lists(values, min_size=1, max_size=12), st.sampled_from([1e-30, 1e-8, 0.5, 1e30]))
@settings(max_examples=100, deadline=None)
def test_what_counts_as_zero_is_what_is_below_eps(numbers: list[float], eps: float) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    assert_all_agree(rows_of([x], eps), [x], eps)


@pytest.mark.parametrize("length", [1, 64, SMALL])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e-8, 1.0, 1e18, 1e30])
def test_every_length_and_magnitude_is_right(length: int, magnitude: float) -> None:
    tensors = [magnitude * torch.randn(length), magnitude * torch.rand(length), torch.randn(length).relu()]
    assert_all_agree(rows_of(tensors), tensors)


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3, 1e6])
def test_a_small_spread_around_a_large_mean_survives(offset: float) -> None:
    x = offset + 1e-2 * torch.randn(500)
    assert_all_agree(rows_of([x]), [x])


@pytest.mark.parametrize("rows", [rows_of, rows_of_all])
def test_more_than_the_buffer_holds_is_reduced_in_several(rows: Callable[[list[torch.Tensor]], dict[int, np.ndarray]]) -> None:
    tensors = [torch.randn(SMALL // 8 - i, 8) for i in range(BATCH // SMALL // 2)]
    tensors += [torch.randn(SMALL) for _ in range(BATCH // SMALL)]
    assert_all_agree(rows(tensors), tensors)


def test_what_changes_after_it_was_copied_has_the_row_of_what_it_was() -> None:
    x = torch.randn(4, 30)
    before = x.clone()
    table = Table()
    table.copies.take(0, x)
    x.zero_()
    table.copies.reduce()
    assert_agrees(table.rows[0], before, EPS)


def test_of_several_copies_for_a_row_the_latest_counts() -> None:
    table = Table()
    later = torch.randn(7)
    for x in (torch.randn(3), torch.randn(500), later):
        table.copies.take(5, x)
    table.copies.reduce()
    assert list(table.rows) == [5]
    assert_agrees(table.rows[5], later, EPS)


def test_a_row_that_is_given_up_or_discarded_is_not_entered() -> None:
    table = Table()
    for row in range(3):
        table.copies.take(row, torch.randn(4))
    table.copies.give_up(1)
    table.copies.reduce()
    assert sorted(table.rows) == [0, 2]
    table.copies.take(7, torch.randn(4))
    table.copies.discard()
    table.copies.reduce()
    assert sorted(table.rows) == [0, 2]


def test_a_row_is_entered_once() -> None:
    table = Table()
    table.copies.take(0, torch.randn(4))
    table.copies.reduce()
    table.copies.reduce()
    assert table.entered == 1


def test_longer_tensors_are_not_copied() -> None:
    copies = Table().copies
    assert [copies.takes(torch.empty(length)) for length in (1, SMALL, SMALL + 1)] == [True, True, False]


def test_copying_leaves_no_trace_in_the_graph_and_works_on_inference_tensors() -> None:
    weight = torch.nn.Parameter(torch.randn(20, 20))
    with torch.inference_mode():
        inferred = torch.randn(9)
        table = Table()
        table.copies.take(0, inferred)
    product = weight * 2
    table.copies.take(1, product)
    table.copies.take(2, weight)
    table.copies.take(3, inferred)
    table.copies.reduce()
    assert weight._version == product._version == 0
    assert_all_agree(table.rows, [inferred, product, weight, inferred])


def test_only_plain_tensors_are_candidates() -> None:
    assert all(is_plain(x) for x in (torch.randn(3), torch.nn.Parameter(torch.ones(9))))
    others = [torch.randn(5, 4).t(), torch.empty(2, device="meta"), torch.randn(7).double(), torch.randn(2, 2).to_sparse()]
    assert not any(is_plain(x) for x in [*others, torch.empty(0)])


@pytest.mark.parametrize(
    "copy",
    [lambda copies, x: copies.take(0, x), lambda copies, x: copies.take_all([0, 1], [torch.full((4,), 7.0), x])],
    ids=["one", "at once"],
)
def test_a_copy_that_fails_leaves_no_row_of_what_stood_there_before(copy: Callable[[Copies, torch.Tensor], None]) -> None:
    table = Table()
    table.copies.take_all([0, 1], [torch.full((4,), 3.0), torch.full((4,), 5.0)])
    table.copies.discard()
    with pytest.raises(NotImplementedError, match="meta"):
        copy(table.copies, torch.empty(4, device="meta"))
    table.copies.take(2, torch.full((4,), 9.0))
    table.copies.reduce()
    assert {row: numbers[MAX] for row, numbers in table.rows.items()} == {2: 9.0}
