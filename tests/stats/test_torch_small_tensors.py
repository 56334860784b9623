"""Many small tensors at once give the rows that each gives alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_agrees

from monitor.stats.torch_host_kernel import HostKernel
from monitor.stats.torch_small_tensors import BATCH, SMALL

EPS = 1e-8
KERNEL = HostKernel(EPS)


def rows_of(tensors: list[torch.Tensor]) -> list[object]:
    """As the recorder reads them: together where that holds, alone where it does not."""
    together = KERNEL.small_rows(tensors)
    return [together[place] if place in together else KERNEL.reduce(x) for place, x in enumerate(tensors)]


values = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1e-9, 1e-30, 1e30, math.nan, math.inf, -math.inf, 1.0]))


@given(st.lists(st.lists(values, min_size=0, max_size=12), max_size=6))
@settings(max_examples=200, deadline=None)
def test_each_row_is_that_of_its_tensor(numbers: list[list[float]]) -> None:
    tensors = [torch.tensor(n, dtype=torch.float32) for n in numbers]
    for x, row in zip(tensors, rows_of(tensors), strict=True):
        assert_agrees(row, x, EPS)


def test_large_other_and_unreadable_tensors_stand_among_them_in_their_places() -> None:
    tensors = [
        torch.randn(3),
        torch.randn(SMALL + 1),
        torch.randn(5, 4).t(),
        torch.empty(2, device="meta"),
        torch.randn(7).double(),
        torch.randn(2, 2).to_sparse(),
        torch.nn.Parameter(torch.ones(9)),
    ]
    rows = rows_of(tensors)
    assert rows[3] is None
    for x, row in zip(tensors, rows, strict=True):
        if row is not None:
            assert_agrees(row, x, EPS)


def test_more_than_a_buffer_holds_is_reduced_in_several() -> None:
    tensors = [torch.randn(SMALL - i) for i in range(BATCH // SMALL + 3)]
    for x, row in zip(tensors, rows_of(tensors), strict=True):
        assert_agrees(row, x, EPS)


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3, 1e6])
def test_a_small_spread_around_a_large_mean_survives(offset: float) -> None:
    x = offset + 1e-2 * torch.randn(500)
    assert_agrees(rows_of([x])[0], x, EPS)


def test_only_small_tensors_without_surprises_are_read_together() -> None:
    tensors = [torch.randn(5), torch.tensor([math.nan, 1.0]), torch.randn(SMALL + 1), torch.ones(3)]
    assert sorted(KERNEL.small_rows(tensors)) == [0, 3]
