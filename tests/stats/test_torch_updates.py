"""What is read of two tensors at once, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference import assert_agrees
from torch import Tensor

from monitor.stats.histograms import UNIT_UPPER
from monitor.stats.partials import COLUMNS, EMPTY, Partials
from monitor.stats.torch.host_kernel import TorchHostKernel
from monitor.stats.torch.updates import CHUNK, TorchDeviceSigned, TorchHostSigned, agreement, squares_of_update


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(7,), (3, 5), (CHUNK + 3,), (0,), ()])
def test_signs_are_compared_element_by_element(shape: tuple[int, ...]) -> None:
    gradient, momentum = normal(*shape), normal(*shape, seed=1)
    expected = ((gradient > 0) == (momentum > 0)).sum().item()
    assert expected == agreement(gradient, momentum).item()
    assert gradient.numel() - expected == agreement(gradient, momentum, uphill=True).item()


def test_both_zero_agree_one_zero_does_not_and_nan_agrees_with_nothing() -> None:
    gradient = torch.tensor([0.0, 0.0, 1e-45, float("nan"), float("nan")])
    momentum = torch.tensor([-0.0, 1.0, 1e-45, float("nan"), 1.0])
    assert agreement(gradient, momentum).item() == 2.0


def test_what_the_product_of_tiny_numbers_would_lose_counts() -> None:
    assert agreement(torch.tensor([1e-30]), torch.tensor([1e-30])).item() == 1.0


def test_tensors_that_lie_differently_in_memory_are_compared_by_place() -> None:
    gradient, momentum = normal(4, 6), normal(6, 4, seed=1).t()
    assert ((gradient > 0) == (momentum > 0)).sum().item() == agreement(gradient, momentum).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_squares_of_updates_are_those_of_float64(dtype: torch.dtype, scale: float) -> None:
    before = (normal(300) * scale).to(dtype)
    after = (before + normal(300, seed=1) * scale * 0.01).to(dtype)
    update, weight = squares_of_update(after, before)
    exact_after, exact_before = after.double(), before.double()
    torch.testing.assert_close(update, (exact_after - exact_before).square().sum(), rtol=1e-12, atol=0.0, equal_nan=True)
    torch.testing.assert_close(weight, exact_before.square().sum(), rtol=1e-12, atol=0.0, equal_nan=True)


def test_what_is_compared_stays_as_it_is() -> None:
    after, before = normal(5).double(), normal(5, seed=1).double()
    copies = after.clone(), before.clone()
    squares_of_update(after, before)
    assert torch.equal(copies[0], after)
    assert torch.equal(copies[1], before)


COUNTERS = {
    "host": lambda: TorchHostSigned(TorchHostKernel(1e-8)),
    "device": lambda: TorchDeviceSigned(torch.device("cpu"), 1e-8),
}
both = pytest.mark.parametrize("where", COUNTERS)


def counted(where: str, *chunks: Tensor) -> tuple[Partials, list[int]]:
    counts = COUNTERS[where]()
    for chunk in chunks:
        counts.add(chunk)
    row = np.zeros((len(COLUMNS), 1))
    for column, number in counts.numbers().items():
        row[column] = float(number)
    return Partials(row), counts.histogram().tolist()


@both
def test_bins_hold_what_is_at_most_their_upper_end(where: str) -> None:
    x = torch.cat([normal(5000), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 1.0000001, -2.0, 1 / 32, 33 / 32])])
    expected = np.bincount(np.searchsorted(UNIT_UPPER, x.double().numpy()), minlength=len(UNIT_UPPER)).tolist()
    assert expected == counted(where, x)[1]


@both
def test_partials_are_those_of_all_chunks(where: str) -> None:
    x = torch.cat([normal(5000), torch.zeros(5)])
    partials, _ = counted(where, *x.split(999))
    wide = x.double()
    expected = {
        "count": 5005.0,
        "smalls": 5.0,
        "min": wide.min().item(),
        "max": wide.max().item(),
        "sum": wide.sum().item(),
        "sumsq": wide.square().sum().item(),
        "m2": (wide - wide.mean()).square().sum().item(),
    }
    assert expected == {name: pytest.approx(partials[name][0], rel=1e-6) for name in expected}


@pytest.mark.parametrize("where", ["host", "device"])
def test_kurtosis_is_that_of_all_chunks(where: str) -> None:
    kernel = TorchHostKernel(1e-8, higher=True)
    counts = TorchHostSigned(kernel) if where == "host" else TorchDeviceSigned(torch.device("cpu"), 1e-8, higher=True)
    x = torch.cat([3 + normal(5000).pow(3), normal(700) - 20, torch.zeros(5), torch.tensor([math.nan, math.inf])])
    for chunk in x.split(999):
        counts.add(chunk)
    row = np.zeros(len(COLUMNS))
    for column, number in (counts.numbers() | {0: 1.0}).items():
        row[column] = float(number)
    assert_agrees(row, x, 1e-8, higher=True)


@both
def test_nan_and_inf_are_counted_and_hide_nothing(where: str) -> None:
    partials, histogram = counted(where, torch.tensor([float("nan"), math.inf, -math.inf, -math.inf, 0.5, -0.25]))
    numbers = {name: partials[name][0] for name in ("count", "nans", "posinfs", "neginfs", "min", "max", "sum")}
    assert numbers == {"count": 6, "nans": 1, "posinfs": 1, "neginfs": 2, "min": -0.25, "max": 0.5, "sum": 0.25}
    assert sum(histogram) == 2


@both
def test_of_nothing_there_are_the_partials_of_nothing(where: str) -> None:
    counts = COUNTERS[where]()
    assert EMPTY[1:] == tuple(counts.numbers()[column] for column in range(1, len(COLUMNS)))
    assert counts.histogram().sum() == 0
