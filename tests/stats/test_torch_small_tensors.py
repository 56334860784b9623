"""Small tensors that wait, and are reduced together, have the rows that each has alone."""

from __future__ import annotations

import math
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from reference import assert_agrees

from monitor.stats.partials import M2
from monitor.stats.torch.host_kernel import BATCH, SMALL, Staging, TorchHostKernel, reduce_segments
from monitor.stats.torch.tensors import is_plain

EPS = 1e-8


def assert_all_agree(tensors: list[torch.Tensor], eps: float = EPS) -> None:
    for with_native, higher in product((True, False), repeat=2):
        staging = Staging()
        assert all(staging.add(x) for x in tensors)
        rows = TorchHostKernel(eps, with_native=with_native, higher=higher).staged_rows(staging)
        assert (len(rows), len(staging)) == (len(tensors), 0)
        for row, x in zip(rows, tensors, strict=True):
            assert_agrees(row, x, eps, higher=higher)


values = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1e-9, 1e-30, 1e30, math.nan, math.inf, -math.inf, 1.0]))


@given(st.lists(st.lists(values, min_size=1, max_size=12), min_size=1, max_size=6), st.sampled_from([1e-30, EPS, 0.5, 1e30]))
@settings(max_examples=100)
def test_each_row_is_that_of_its_tensor(numbers: list[list[float]], eps: float) -> None:
    assert_all_agree([torch.tensor(n, dtype=torch.float32) for n in numbers], eps)


@pytest.mark.parametrize("length", [1, 64, SMALL])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e-8, 1.0, 1e18, 1e30])
def test_every_length_and_magnitude_is_right(length: int, magnitude: float) -> None:
    assert_all_agree([magnitude * torch.randn(length), magnitude * torch.rand(length), torch.randn(length).relu()])


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3, 1e6])
def test_a_small_spread_around_a_large_mean_survives(offset: float) -> None:
    assert_all_agree([offset + 1e-2 * torch.randn(500)])


@pytest.mark.parametrize("value", [0.1, -0.3, 1e10, 1e-10])
def test_a_constant_tensor_has_no_spread_and_need_not_be_read_again(value: float) -> None:
    lengths = np.array([3, 7, 641, 3])
    starts = np.cumsum(lengths) - lengths
    narrow = np.full(lengths.sum(), value, dtype=np.float32)
    narrow[starts[-1] :] = [1.0, 2.0, 3.0]
    rows, hold = reduce_segments(narrow, starts, lengths, 0.0, np.empty(len(narrow)))
    assert rows[:, M2].tolist() == [0.0, 0.0, 0.0, 2.0]
    assert hold.all()


def test_what_changes_after_it_was_copied_has_the_row_of_what_it_was() -> None:
    x, staging = torch.randn(4, 30), Staging()
    before = x.clone()
    assert staging.add(x)
    x.zero_()
    assert_agrees(TorchHostKernel(EPS).staged_rows(staging)[0], before, EPS)


def test_torch_does_not_warn_of_the_memory_of_what_was_copied() -> None:
    """Torch warns of read-only memory once in each process. With ``set_warn_always`` it warns each time."""
    staging = Staging()
    assert staging.add(torch.tensor([1.0, math.nan]))
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            TorchHostKernel(EPS).staged_rows(staging)
    finally:
        torch.set_warn_always(False)


def test_what_is_long_or_not_plain_or_finds_no_room_is_not_taken() -> None:
    staging = Staging()
    assert not any(staging.add(x) for x in (torch.randn(SMALL + 1), torch.randn(5, 4).t(), torch.randn(7).double()))
    taken = sum(staging.add(torch.randn(SMALL)) for _ in range(BATCH // SMALL + 3))
    assert taken == len(staging) == BATCH // SMALL


def test_only_float32_without_gaps_is_plain() -> None:
    assert all(is_plain(x) for x in (torch.randn(3), torch.nn.Parameter(torch.ones(9))))
    others = [torch.randn(5, 4).t(), torch.empty(2, device="meta"), torch.randn(7).double(), torch.randn(2, 2).to_sparse()]
    assert not any(is_plain(x) for x in [*others, torch.empty(0)])
