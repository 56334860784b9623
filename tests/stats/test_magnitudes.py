"""Histograms of magnitudes, against a search for each element in float64 and against what torch's own casts lose."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from monitor.stats.histograms import BINS, UPPER, histogram_text, lost_elements
from monitor.stats.host import array_kernel
from monitor.stats.torch.device_kernel import count_magnitudes_on_device
from monitor.stats.torch.host_kernel import PIECE, count_magnitudes

Counter = Callable[[Tensor], np.ndarray]
CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16, "e5m2": torch.float8_e5m2}


def there(x: Tensor) -> np.ndarray:
    return count_magnitudes_on_device(x).numpy()


COUNTERS = pytest.mark.parametrize("count", [count_magnitudes, there])


def searched(x: Tensor) -> np.ndarray:
    """The definition, an element at a time."""
    magnitudes = x.detach().to_dense().to(torch.complex128 if x.is_complex() else torch.float64).abs().flatten().numpy()
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    with np.errstate(over="ignore"):
        single = magnitudes.astype(np.float32).astype(np.float64)
    bins = np.searchsorted(UPPER, single)
    bins[(magnitudes > 0) & (single == 0)] = 1
    bins[np.isinf(single)] = BINS - 1
    return np.bincount(bins, minlength=BINS)


def of_any_size(elements: int, spread: float = 20.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(elements)
    x = torch.randn(elements, generator=generator, dtype=torch.float64)
    return (x * torch.exp(spread * torch.randn(elements, generator=generator, dtype=torch.float64))).to(dtype)


def of_any_bits(dtype: torch.dtype, integers: torch.dtype, elements: int = 50_000) -> Tensor:
    bounds = torch.iinfo(integers)
    return torch.randint(bounds.min, bounds.max, (elements,), dtype=integers).view(dtype)


EDGES = torch.tensor([0.0, -0.0, 1.0, 2.0, 464.0, 464.001, 61440.0, 61439.996, 65520.0, 65519.996, 3.3961775e38, 3.4e38])
TENSORS = {
    "more than a chunk": of_any_size(PIECE + 77),
    "edges": torch.cat([EDGES, torch.tensor([2.0**-149, 2.0**-127, 2.0**-126, 3 * 2.0**-149, -464.0])]),
    "not finite": torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, 3e38]),
    "every float32": of_any_bits(torch.float32, torch.int32),
    "every bfloat16": of_any_bits(torch.bfloat16, torch.int16),
    "every float16": of_any_bits(torch.float16, torch.int16),
    "every float8_e4m3fn": of_any_bits(torch.float8_e4m3fn, torch.uint8, 3000),
    "float64": of_any_size(5000, 100.0, torch.float64),
    "int64": torch.randint(-(2**62), 2**62, (1000,)),
    "bool": torch.tensor([True, False, True]),
    "complex64": torch.complex(of_any_size(500, 5.0), of_any_size(501, 5.0)[:500]),
    "a transposed matrix": of_any_size(600).view(20, 30).t(),
    "a part of the columns of float64": of_any_size(600, 100.0, torch.float64).view(20, 30)[:, :-1],
    "a part of the columns of int64": torch.arange(-300, 300).view(20, 30)[:, :-1],
    "every second": of_any_size(1000)[::2],
    "expanded": of_any_size(7).expand(3, 7),
    "sparse": torch.eye(4).to_sparse(),
    "empty": torch.zeros(0),
    "a single zero": torch.zeros(()),
}


@COUNTERS
@pytest.mark.parametrize("what", TENSORS)
def test_every_finite_element_is_in_its_bin(what: str, count: Counter) -> None:
    x = TENSORS[what]
    assert searched(x).tolist() == count(x).tolist()


@pytest.mark.parametrize("what", [name for name in TENSORS if "float8" not in name and "bfloat16" not in name])
def test_every_finite_element_of_an_array_is_in_its_bin(what: str) -> None:
    x = TENSORS[what].to_dense()
    assert searched(x).tolist() == array_kernel.count_magnitudes(x.numpy()).tolist()


def test_counting_leaves_the_array_alone_and_has_nothing_for_what_is_no_number() -> None:
    x = np.array([-1.5, 0.25, -0.0], dtype=np.float32)
    array_kernel.count_magnitudes(x)
    assert np.signbit(x).tolist() == [True, False, True]
    assert array_kernel.count_magnitudes(np.array(["a"])) is None


@COUNTERS
@pytest.mark.parametrize("name", CASTS)
def test_what_is_lost_is_what_the_cast_loses(name: str, count: Counter) -> None:
    """Every pattern of bits, and magnitudes where the formats end."""
    x = torch.cat([of_any_bits(torch.float32, torch.int32), of_any_size(50_000, 12.0), EDGES, 2.0 ** -torch.arange(1.0, 149)])
    x = x[torch.isfinite(x)]
    cast = x.to(CASTS[name]).float()
    counts = count(x)[None]
    assert ((cast == 0) & (x != 0)).sum().item() == lost_elements(f"underflow_{name}", counts)[0]
    assert (~torch.isfinite(cast)).sum().item() == lost_elements(f"overflow_{name}", counts)[0]


@COUNTERS
def test_what_e4m3_loses_is_what_its_cast_makes_zero_and_what_exceeds_its_range(count: Counter) -> None:
    x = torch.cat([of_any_size(50_000, 6.0), EDGES, 2.0 ** -torch.arange(1.0, 20)])
    counts = count(x)[None]
    assert ((x.to(torch.float8_e4m3fn).float() == 0) & (x != 0)).sum().item() == lost_elements("underflow_e4m3", counts)[0]
    assert (x.abs() > 464).sum().item() == lost_elements("overflow_e4m3", counts)[0]


def test_subnormal_numbers_are_counted_where_torch_flushes_them_to_zero() -> None:
    assert torch.set_flush_denormal(True)
    try:
        counts = count_magnitudes(torch.tensor([1, 3], dtype=torch.int32).view(torch.float32))
    finally:
        torch.set_flush_denormal(False)
    assert counts is not None
    assert counts[1:4].tolist() == [1, 0, 1]


def test_a_tensor_that_was_counted_can_still_be_resized() -> None:
    x = of_any_size(10)
    count_magnitudes(x)
    assert x.resize_(20).shape == (20,)


def test_a_tensor_without_data_has_none() -> None:
    assert count_magnitudes(torch.empty(3, device="meta")) is None
    assert count_magnitudes_on_device(torch.empty(3, device="meta")) is None


def test_a_histogram_is_written_by_the_upper_ends_of_its_bins() -> None:
    counts = count_magnitudes(torch.tensor([0.0, 0.0, 1.0, -0.75, 300.0]))
    assert counts is not None
    assert histogram_text(counts) == "0:2 1:2 464:1"


def test_inf_and_nan_are_in_no_bin() -> None:
    """Inf and NaN are in no bin, and neither hides the rest."""
    counts = count_magnitudes(torch.tensor([float("inf"), float("nan"), 3.4e38, 2.0**127]))
    assert counts is not None
    assert counts.sum() == 2
