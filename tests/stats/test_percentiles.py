"""Percentiles of magnitudes: each within the bin of its element, and what is known of other elements does not change them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import derived, expected
from torch import Tensor

from monitor.stats.histograms import PERCENTILES
from monitor.stats.ops import derive, derive_all
from monitor.stats.partials import Partials, combine_groups
from monitor.stats.torch.host_kernel import TorchHostKernel, count_magnitudes


def measured(*tensors: Tensor) -> Partials:
    """Rows of tensors with their histograms."""
    rows = np.array([TorchHostKernel(1e-8, higher=True).reduce(x) for x in tensors])
    counts = [count_magnitudes(x) for x in tensors]
    return Partials(Partials.from_rows(rows).columns, np.array(counts))


def percentiles_of(partials: Partials, row: int = 0) -> dict[str, float | None]:
    return {op: float(values[row]) if there[row] else None for op, (values, there) in derive_all(PERCENTILES, partials).items()}


def exact(x: Tensor) -> dict[str, float]:
    """The element itself: the smallest magnitude that at least this share of the elements do not exceed."""
    magnitudes = x.detach().double().abs().numpy().ravel()
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    return {op: float(np.quantile(magnitudes, share, method="inverted_cdf")) for op, share in PERCENTILES.items()}


generator = torch.Generator().manual_seed(3)
TENSORS = {
    "normal": torch.randn(50_000, generator=generator),
    "with outliers": torch.cat([torch.randn(9_000, generator=generator), 1e4 * torch.randn(100, generator=generator)]),
    "of many scales": torch.exp(8 * torch.randn(20_000, generator=generator)),
    "mostly zeros": torch.relu(torch.randn(10_000, generator=generator) - 1),
    "bfloat16": torch.randn(5_000, generator=generator).bfloat16() * 1e-3,
    "one": torch.tensor([-0.75]),
    "equal": torch.full((100,), 3.0),
    "beside NaN and Inf": torch.cat([torch.randn(1000, generator=generator), torch.tensor([torch.nan, torch.inf])]),
}


@pytest.mark.parametrize("what", TENSORS)
def test_a_percentile_is_less_than_twice_its_element_and_more_than_half_of_it(what: str) -> None:
    found, elements = percentiles_of(measured(TENSORS[what])), exact(TENSORS[what])
    for op, element in elements.items():
        assert found[op] == 0 if element == 0 else 0.5 < found[op] / element < 2, op


def test_a_percentile_of_normal_elements_is_off_by_less_than_a_tenth() -> None:
    found, elements = percentiles_of(measured(TENSORS["normal"])), exact(TENSORS["normal"])
    assert found == pytest.approx(elements, rel=0.1)


def test_no_percentile_is_above_the_greatest_magnitude() -> None:
    assert percentiles_of(measured(torch.full((10,), 1.01)))["abs_p999"] <= 1.01


def test_a_percentile_beyond_the_range_of_float32_is_absent() -> None:
    half_beyond = torch.cat([torch.ones(6, dtype=torch.float64), torch.full((4,), 1e200, dtype=torch.float64)])
    found = percentiles_of(measured(half_beyond))
    assert found["abs_p50"] == pytest.approx(1.0, rel=0.5)
    assert found["abs_p75"] is None


def test_percentiles_of_shards_are_those_of_the_whole() -> None:
    parts = measured(*TENSORS["of many scales"].split(3_000))
    whole = combine_groups(parts, np.zeros(1, dtype=np.int64))
    assert percentiles_of(whole) == pytest.approx(percentiles_of(measured(TENSORS["of many scales"])))


def test_nothing_has_no_percentile_and_nor_has_a_row_without_a_histogram() -> None:
    empty = measured(torch.zeros(0), torch.tensor([torch.nan]), torch.ones(3))
    assert set(percentiles_of(empty).values()) == set(percentiles_of(empty, 1).values()) == {None}
    assert not derive("abs_p50", Partials(empty.columns))[1].any()


@pytest.mark.parametrize("what", [name for name, x in TENSORS.items() if len(x) > 1 and x.isfinite().all()])
def test_mean_and_least_magnitude_skewness_and_root_mean_square_of_shards_are_those_of_the_whole(what: str) -> None:
    x = TENSORS[what].float()
    whole = combine_groups(measured(*x.split(len(x) // 7)), np.zeros(1, dtype=np.int64))
    found, ops = derived(whole.columns[:, 0]), expected(x, 1e-8).ops
    for op in ("absmean", "smallest_nonzero", "rms", "skewness"):
        assert (op in found) == (op in ops), op
        assert op not in found or found[op] == pytest.approx(ops[op], rel=1e-6, abs=1e-6 if op == "skewness" else 0), op


def test_mean_and_least_magnitude_are_absent_where_one_of_the_parts_has_none() -> None:
    x = TENSORS["normal"]
    known, unknown = TorchHostKernel(1e-8, higher=True).reduce(x), TorchHostKernel(1e-8).reduce(x)
    zeros = TorchHostKernel(1e-8).reduce(torch.zeros(3))

    def of(*rows: object) -> dict[str, float]:
        return derived(combine_groups(Partials.from_rows(np.array(rows)), np.zeros(1, dtype=np.int64)).columns[:, 0])

    assert {"absmean", "smallest_nonzero"}.isdisjoint(of(known, unknown))
    assert of(known, zeros)["absmean"] == pytest.approx(x.abs().sum().item() / (len(x) + 3))
    assert of(zeros)["absmean"] == 0
