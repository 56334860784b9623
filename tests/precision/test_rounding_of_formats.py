"""What is computed from histograms, compared with what torch's casts do to the elements."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from fake_fp8 import DTYPES
from sink_rows import magnitudes_of
from torch import Tensor

from monitor.precision.rounding import GRIDS, Grid, Lost, Magnitudes, lost
from monitor.stats.histograms import FORMATS, histogram_text

EACH = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
FP8 = pytest.mark.parametrize("grid", [GRIDS["e4m3"], GRIDS["e5m2"]], ids=["e4m3", "e5m2"])


def drawn() -> dict[str, Tensor]:
    torch.manual_seed(0)
    normal, uniform = torch.randn(20_000), torch.rand(20_000)
    return {
        "normal": normal,
        "uniform": 3 * uniform,
        "gelu": torch.nn.functional.gelu(normal),
        "zeros": torch.cat([torch.zeros(500), normal[:500]]),
        "heavy": normal * torch.exp(3 * torch.randn(20_000)),
        "outliers": torch.cat([normal, 1e5 * normal[:300]]),
        "wide": torch.exp(8 * normal),
    }


SMOOTH = ("normal", "uniform", "gelu", "zeros")


def rows_of(*tensors: Tensor) -> Magnitudes:
    texts = [histogram_text(magnitudes_of(one.double().tolist())) for one in tensors]
    absmax, norm = (
        [float(what) for what in each]
        for each in zip(*((one.abs().max(), one.double().norm()) for one in tensors), strict=True)
    )
    return Magnitudes.of(pa.chunked_array([pa.array(texts)]), np.array(absmax), np.array(norm))


def row(found: Lost, number: int) -> dict[str, float]:
    return {name: float(one[number]) for name, one in zip(Lost._fields, found, strict=True)}


def cast(x: Tensor, grid: Grid, scale: float) -> dict[str, float]:
    """The same numbers from the elements themselves."""
    y = x.double() * scale
    q = (y.clamp(-grid.greatest, grid.greatest) if grid.saturates else y).float().to(DTYPES[grid.name]).double()
    away, size = (q / scale - x.double()).abs(), x.double().abs()
    filled = size.gt(0)
    least = away[filled][size[filled].argsort()][: int(filled.sum()) // 2], size[filled].sort().values[: int(filled.sum()) // 2]
    return {
        "underflow": float(((q == 0) & filled).double().mean()),
        "subnormal": float(((y.abs() <= 2.0**grid.lowest) & (q != 0)).double().mean()),
        "saturated": float((y.abs() > FORMATS[grid.name].overflows).double().mean()),
        "error": float(away.norm() / size.norm()),
        "small_error": float(least[0].norm() / least[1].norm()),
    }


def scales(grid: Grid, rows: Magnitudes, *, power_of_two: bool) -> np.ndarray:
    found = grid.greatest / rows.absmax if grid.saturates else np.ones(len(rows))
    return 2.0 ** np.floor(np.log2(found)) if power_of_two else found


@EACH
def test_with_a_scale_that_is_a_power_of_two_shares_are_those_of_the_cast(grid: Grid) -> None:
    tensors = drawn()
    rows = rows_of(*tensors.values())
    scale = scales(grid, rows, power_of_two=True)
    found = lost(grid, rows, scale)
    for number, x in enumerate(tensors.values()):
        one, real = row(found, number), cast(x, grid, scale[number])
        assert one["underflow"] == one["most_underflow"] == pytest.approx(real["underflow"], abs=1e-12)
        assert one["subnormal"] == pytest.approx(real["subnormal"], abs=1e-12)


@EACH
def test_with_any_scale_shares_are_within_their_bounds_and_near_what_is_expected(grid: Grid) -> None:
    tensors = drawn()
    rows = rows_of(*tensors.values())
    scale = scales(grid, rows, power_of_two=False)
    found = lost(grid, rows, scale)
    for number, x in enumerate(tensors.values()):
        one, real = row(found, number), cast(x, grid, scale[number])
        for what in ("underflow", "saturated"):
            assert real[what] <= one[f"most_{what}"] + 1e-12
            assert one[what] == pytest.approx(real[what], abs=0.02)


@EACH
@pytest.mark.parametrize("power_of_two", [True, False])
def test_no_error_is_above_its_bound_and_that_of_smooth_numbers_is_as_expected(grid: Grid, power_of_two: bool) -> None:
    tensors = drawn()
    rows = rows_of(*tensors.values())
    scale = scales(grid, rows, power_of_two=power_of_two)
    found = lost(grid, rows, scale)
    for number, (name, x) in enumerate(tensors.items()):
        one, real = row(found, number), cast(x, grid, scale[number])
        assert real["error"] <= one["most_error"] * (1 + 1e-6)
        if name in SMOOTH:
            assert one["error"] == pytest.approx(real["error"], rel=0.2)
            assert one["small_error"] == pytest.approx(real["small_error"], rel=0.25)


@FP8
def test_outliers_hide_the_error_of_the_others_but_not_of_the_lesser_half(grid: Grid) -> None:
    x = torch.cat([torch.randn(20_000), torch.full((300,), 1e7 if grid.name == "e4m3" else 1e11)])
    found = row(lost(grid, rows_of(x), np.array([grid.greatest / x.abs().max().item()])), 0)
    assert found["error"] < grid.usual_error * 2
    assert found["small_error"] > 0.9
    assert found["underflow"] > 0.9


@FP8
def test_what_was_scaled_for_smaller_numbers_saturates_and_tails_do_so_less_than_expected(grid: Grid) -> None:
    x = torch.randn(20_000)
    for growth in (2.0, 4.0, 8.0):
        scale = grid.greatest / x.abs().max().item() * growth
        found, real = row(lost(grid, rows_of(x), np.array([scale])), 0), cast(x, grid, scale)
        assert 0 < real["saturated"] <= found["saturated"] <= real["saturated"] + 0.02
        assert real["error"] <= found["error"] <= 2.5 * real["error"]
        assert real["error"] <= found["most_error"]


@EACH
def test_the_integral_of_squared_errors_is_that_of_a_fine_grid(grid: Grid) -> None:
    step = 2.0 ** (grid.lowest - grid.mantissa)
    for end in (step / 8, step / 2, step, 2 * step, 2.0**grid.lowest, 1.0, 1.5, 96.0):
        x = torch.linspace(0, end, 400_001, dtype=torch.float64)[1:]
        away = (x.float().to(DTYPES[grid.name]).double() - x).square()
        assert float(grid.squares(np.array([end]))[0] / end) == pytest.approx(float(away.mean()), rel=0.01)
        assert float(away.max()) <= float(grid.most(np.array([end]))[0]) ** 2 * (1 + 1e-4)


def test_tensors_of_zeros_and_of_one_value_lose_nothing_that_is_not_a_number() -> None:
    rows = rows_of(torch.zeros(8), torch.full((8,), 2.0))
    found = lost(GRIDS["e4m3"], rows, np.array([1.0, 224.0]))
    assert all(np.isfinite(one).all() for one in found)
    assert row(found, 0) == dict.fromkeys(Lost._fields, 0.0)
