"""The fused kernel on its own: what it reads itself, in how many parts, and what it leaves behind.

What it has in common with the other kernels is in ``test_fused_contract.py``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evidence import examples, sampled
from hypothesis import Phase, given, settings, strategies as st
from reference import assert_agrees, derived
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from interpreted import HOST, SMALL, engine, fused, source

from monitor.stats.partials import COLUMNS, SUM
from monitor.stats.torch.device_kernel import TorchDeviceKernel
from monitor.stats.triton.launch import PART_COLUMNS, FusedEngine, FusedKernel
from monitor.stats.triton.reading import FORMATS, Blocks, cut

EPS = 1e-8
KERNEL = fused(EPS)
COARSE = fused(EPS, Blocks(lanes=256, rows=16, parts=4, tiles=4))
"""The interpreter counts operations, not elements."""


def row_of(x: torch.Tensor, kernel: FusedKernel = KERNEL) -> np.ndarray:
    """The row that the fused kernel leaves, without the portable one's help."""
    page = torch.full((3, len(COLUMNS)), -1.0, dtype=torch.float64)
    assert kernel.reduces(x, page, 1)
    assert (page[[0, 2]] == -1).all()
    return page[1].numpy()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(dtype: torch.dtype, size: int) -> torch.Tensor:
    if dtype.is_complex:
        return torch.complex(normal(size), normal(size, seed=1)).to(dtype)
    return normal(size).to(dtype) if dtype.is_floating_point else torch.arange(size).remainder(7).to(dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in FORMATS if "float8" in str(dtype)], ids=str)
def test_every_byte_of_a_float8_is_the_number_that_torch_has(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    for x in every.split(32):
        row, finite = row_of(x), x.double()[x.double().isfinite()]
        assert_agrees(row, x, EPS)
        assert row[SUM] == pytest.approx(float(finite.sum()), rel=1e-15)


SIZES = [0, 1, 15, 16, 17, 511, 512, 513, 1024, 2047, 4096, 4097, 20_001]


SIZED = list(product((torch.float64, torch.float32, torch.bfloat16), SIZES))
AROUND_GROUPS = (15, 16, 17, 18, 19, 20, 23, 24)
"""The float32 of one more or less than a number of lanes; of the others the ends are sampled, and some between."""


@pytest.mark.parametrize(("dtype", "size"), sampled(SIZED, 0, 7, 12, *AROUND_GROUPS, 37), ids=str)
def test_any_number_of_elements_agrees_with_the_reference(dtype: torch.dtype, size: int) -> None:
    x = normal(size).to(dtype)
    assert_agrees(row_of(x), x, EPS)


def test_the_sizes_make_one_part_and_many_and_more_than_are_combined_at_once() -> None:
    parts = {cut(size, FORMATS[torch.float64].lane(True), SMALL).parts for size in SIZES}
    assert 1 in parts
    assert 1 < min(parts - {1}) <= SMALL.rows < max(parts)


@given(elements=st.integers(0, 1 << 40), lane=st.sampled_from([2, 8, 16, 32]))
@settings(max_examples=200)
def test_parts_cover_a_tensor_and_none_is_empty(elements: int, lane: int) -> None:
    whole = cut(elements, lane, SMALL)
    part = whole.tiles * lane * SMALL.lanes
    assert (whole.parts - 1) * part < max(1, elements) <= whole.parts * part


BEGINNINGS = list(product((torch.float32, torch.bfloat16, torch.uint8), (1, 3, 8)))


@pytest.mark.parametrize(("dtype", "start"), sampled(BEGINNINGS, 0, 4, 5, 8), ids=str)
def test_a_tensor_may_begin_anywhere_in_memory(dtype: torch.dtype, start: int) -> None:
    x = (normal(3000) * 9).abs().to(dtype)[start:]
    assert_agrees(row_of(x), x, EPS)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 3),
    "groups of adjacent elements": lambda x: x[:, :, ::2],
    "adjacent elements, no whole groups": lambda x: x[..., 1:],
    "every second element": lambda x: x[..., ::2],
    "four dimensions": lambda x: x[::2, ::2, ::2, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 11, -1, -1)[..., ::2],
}


VIEWED = list(product((torch.bfloat16, torch.float32, torch.complex64, torch.complex128), VIEWS))


@pytest.mark.parametrize(("dtype", "view"), sampled(VIEWED, 0, 2, 4, 6, 13, 20), ids=str)
def test_views_are_read_where_they_are(dtype: torch.dtype, view: str) -> None:
    x = VIEWS[view](numbers(dtype, 6 * 5 * 4 * 32).view(6, 5, 4, 32))
    assert_agrees(row_of(x), x, EPS)


def test_a_view_of_more_dimensions_is_left_to_the_portable_kernel() -> None:
    x = normal(4, 4, 4, 4, 4)[::2, ::2, ::2, ::2, ::2]
    page = torch.zeros(1, len(COLUMNS), dtype=torch.float64)
    assert not KERNEL.reduces(x, page, 0)
    assert not page.any()
    assert KERNEL.reduce_into(x, page, 0)
    assert_agrees(page[0].numpy(), x, EPS)


def test_rows_of_a_view_may_lie_further_apart_than_32_bits_count() -> None:
    memory = torch.empty((1 << 32) + 64, dtype=torch.int8)  # of which two pages are ever touched
    x = memory.as_strided((2, 32), (1 << 32, 1))
    x.copy_(torch.arange(64).view(2, 32))
    assert_agrees(row_of(x), x, EPS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_subnormal_numbers_are_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([0.3, -0.7, 0.0]).to(dtype) * torch.finfo(dtype).tiny
    assert float(x.min()) < 0
    assert_agrees(row_of(x), x, EPS)


def test_elements_of_a_strided_tensor_too_many_for_32_bits_are_numbered_in_64(monkeypatch: pytest.MonkeyPatch) -> None:
    from monitor.stats.triton import launch

    x, own = normal(40, 50)[:, ::2], engine()
    kernel = FusedKernel(EPS, own)
    row_of(x, kernel)
    assert ["uint32" in key for key in own._launches] == [True]
    monkeypatch.setattr(launch, "_FAR", x.numel())
    assert_agrees(row_of(x, kernel), x, EPS)
    assert ["uint64" in key for key in own._launches] == [False, True]


SPECIALS = [0.0, -0.0, 1e-45, -1e-42, 1e-38, 1e-30, -1e-12, 1.0, -3.0, 1e18, -1e30, 3.4e38, math.nan, math.inf, -math.inf]


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    special=st.lists(st.sampled_from(SPECIALS), max_size=6),
    scale=st.sampled_from([1e-44, 1e-38, 1e-20, 1.0, 1e25, 1e37]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(15, 40), phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_view_of_any_values(
    shape: list[int], steps: list[int], order: list[int], dtype: torch.dtype, special: list[float], scale: float, seed: int
) -> None:
    base = normal(*shape, seed=seed) * scale
    base.view(-1)[: len(special)] = torch.tensor(special[: base.numel()])
    dims = [dim for dim in order if dim < len(shape)]
    x = base.to(dtype).permute(dims)[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    assert_agrees(row_of(x, COARSE), x, EPS)


@given(
    size=st.integers(1, 2000),
    centre=st.sampled_from([0.0, 1.0, -1e4, 3e6, 1e-30, 1e30]),
    spread=st.sampled_from([0.0, 1e-6, 1e-2, 1.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20)
def test_a_spread_of_any_size_about_any_mean(size: int, centre: float, spread: float, seed: int) -> None:
    x = centre + centre * spread * normal(size, seed=seed)
    assert_agrees(row_of(x, COARSE), x, EPS)


@pytest.mark.parametrize("size", [512, 20_000])
def test_a_spread_in_the_last_bits_about_a_small_mean(size: int) -> None:
    x = (1e-13 * (1 + 1.5e-7 * normal(size).double())).float()
    row, exact = derived(row_of(x)), x.double()
    assert row["std"] == pytest.approx(float(exact.std(correction=0)), rel=1e-6, abs=0)
    assert row["mean"] == pytest.approx(float(exact.mean()), rel=1e-14, abs=0)


def test_a_part_that_is_unlike_the_others_is_combined_with_them() -> None:
    x = torch.cat([normal(900), 1e4 + normal(900), torch.zeros(600), normal(600) * 1e-30, normal(600) * 1e30])
    x[1000] = math.nan
    assert_agrees(row_of(x), x, EPS)


def test_parts_of_float64_at_both_ends_of_its_range_are_combined() -> None:
    x = torch.cat([normal(500).double() * 1e-300, normal(500).double() * 1e300, torch.zeros(500, dtype=torch.float64)])
    assert_agrees(row_of(x), x, EPS)


def test_the_same_tensor_has_the_same_row_bit_for_bit_whatever_was_reduced_between() -> None:
    x, other = normal(12_000), normal(3_000, seed=1) * 1e30
    first = row_of(x).copy()
    row_of(other)
    assert np.array_equal(first, row_of(x.clone()))


def test_a_workspace_grows_with_the_parts_and_is_left_as_it_was_found() -> None:
    own = engine()
    kernel = FusedKernel(EPS, own)
    workspace = own.workspace(torch.empty(0), 0, 4)
    before = workspace.rows
    assert own.workspace(torch.empty(0), 0, 100_000, 5000) is workspace
    assert workspace.rows != before
    x = normal(12_000)
    assert np.array_equal(row_of(x, kernel), row_of(x))
    assert own.workspace(torch.empty(0), 0, 4) is workspace
    assert not workspace._counters.any()


def test_each_captured_launch_has_a_workspace_of_its_own_of_its_size_that_is_not_kept() -> None:
    capturing = False
    own = FusedEngine(source(), replace(HOST, capturing=lambda: capturing), SMALL)
    usual, address = own.workspace(torch.empty(0), 0, 4), own.workspace(torch.empty(0), 0, 4).rows
    capturing = True
    first, second = own.workspace(torch.empty(0), 0, 5), own.workspace(torch.empty(0), 0, 100_000)
    assert len({first.rows, second.rows, address}) == len({first.counters, second.counters, usual.counters}) == 3
    assert (first._rows.numel(), first._counters.tolist()) == (5 * PART_COLUMNS, [0])
    capturing = False
    assert own.workspace(torch.empty(0), 0, 4) is usual
    assert usual.rows == address


def test_what_a_capture_is_given_is_made_in_the_capturing_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from monitor.stats.triton import launch

    def elsewhere(*_: object) -> torch.Tensor:
        raise AssertionError("kept memory was asked for")

    monkeypatch.setattr(launch.Workspace.__init__, "__defaults__", (1, 1, elsewhere))
    own = FusedEngine(source(), replace(HOST, capturing=lambda: True), SMALL)
    assert own.workspace(torch.empty(0), 0, 7)._rows.numel() == 7 * PART_COLUMNS


@pytest.mark.parametrize("kernel", [KERNEL, TorchDeviceKernel(EPS)], ids=["fused", "portable"])
@pytest.mark.parametrize("whole", [torch.int64, torch.int32], ids=str)
def test_the_micro_step_says_which_row(kernel: FusedKernel | TorchDeviceKernel, whole: torch.dtype) -> None:
    page, x = torch.zeros(5, len(COLUMNS), dtype=torch.float64), normal(5000)
    assert kernel.reduce_into(x, page, 1, torch.tensor(2, dtype=whole))
    assert_agrees(page[3].numpy(), x, EPS)
    assert not page[[0, 1, 2, 4]].any()


@pytest.mark.parametrize("kernel", [KERNEL, TorchDeviceKernel(EPS)], ids=["fused", "portable"])
@pytest.mark.parametrize("row", [0, 1])
def test_nothing_is_written_where_the_micro_step_is_negative(kernel: FusedKernel | TorchDeviceKernel, row: int) -> None:
    page = torch.arange(3 * len(COLUMNS), dtype=torch.float64).view(3, -1)
    before = page.clone()
    assert kernel.reduce_into(normal(5000), page, row, torch.tensor(-1))
    assert torch.equal(page, before)
    assert_agrees(row_of(normal(5000)), normal(5000), EPS)  # and the next one counts its parts from 0


def test_a_variant_that_does_not_run_is_said_once_and_the_portable_kernel_takes_its_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = engine()
    kernel = FusedKernel(EPS, own)
    monkeypatch.setattr(logging.getLogger("monitor"), "propagate", True)

    class Uncompilable:
        arg_names = own._source.reduce_one.arg_names

        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("no such instruction")

    monkeypatch.setattr(own._source, "reduce_one", Uncompilable())
    page, x = torch.zeros(1, len(COLUMNS), dtype=torch.float64), normal(100)
    with caplog.at_level("WARNING", logger="monitor"):
        for _ in range(2):
            assert kernel.reduce_into(x, page, 0)
    assert_agrees(page[0].numpy(), x, EPS)
    assert [record.getMessage().count("no such instruction") for record in caplog.records] == [1]


def test_a_variant_whose_constants_cannot_be_had_is_said_once_and_the_portable_kernel_takes_its_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = engine()
    own._source = SimpleNamespace(reduce_one=own._source.reduce_one, tl=SimpleNamespace())
    kernel, page, x = FusedKernel(EPS, own), torch.zeros(1, len(COLUMNS), dtype=torch.float64), normal(100)
    monkeypatch.setattr(logging.getLogger("monitor"), "propagate", True)
    with caplog.at_level("WARNING", logger="monitor"):
        for _ in range(2):
            assert kernel.reduce_into(x, page, 0)
    assert_agrees(page[0].numpy(), x, EPS)
    assert ["float32" in record.getMessage() for record in caplog.records] == [True]


def test_compiling_is_reported_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, page = fused(EPS), torch.zeros(1, len(COLUMNS), dtype=torch.float64)
    monkeypatch.setattr(logging.getLogger("monitor"), "propagate", True)
    with caplog.at_level("INFO", logger="monitor"):
        for x in (normal(100), normal(100).bfloat16()):
            assert kernel.reduces(x, page, 0)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "Compiling" in caplog.records[0].getMessage()


def test_reading_records_nothing_and_shows_in_no_mode_of_the_users() -> None:
    class Everything(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    kernel, page = fused(EPS), torch.zeros(2, len(COLUMNS), dtype=torch.float64)
    x = normal(60, 60).requires_grad_()
    view = x.detach()[:, ::2]
    with torch.autocast("cpu", dtype=torch.bfloat16), Everything():
        assert kernel.reduces(x, page, 0)
        assert kernel.reduces(view, page, 1)
    for row, read in zip(page, (x, view), strict=True):
        assert_agrees(row.numpy(), read, EPS)
    assert (seen, x.grad_fn, x._version) == ([], None, 0)
