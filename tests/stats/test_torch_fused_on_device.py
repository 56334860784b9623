"""The fused kernels where they belong. Without a device of Triton's all of this is left out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from reference import assert_agrees

from monitor.stats.partials import COLUMNS
from monitor.stats.torch.dispatch import DeviceKernels, reduce_into
from monitor.stats.triton.launch import FusedKernel
from monitor.stats.triton.reading import FORMATS

EPS = 1e-8

pytestmark = pytest.mark.accelerator


@pytest.fixture(scope="module")
def kernels(device: torch.device) -> DeviceKernels:
    kernels = DeviceKernels()
    if not isinstance(kernels.kernel(EPS, device), FusedKernel):
        pytest.skip("Triton does not compile for this device")
    return kernels


@pytest.fixture
def no_waits(device: torch.device) -> Iterator[None]:
    """Every wait for the device is an error, where torch can tell."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    module.set_sync_debug_mode("error")
    yield
    module.set_sync_debug_mode("default")


def page(device: torch.device, rows: int = 2) -> torch.Tensor:
    return torch.zeros(rows, len(COLUMNS), dtype=torch.float64, device=device)


def row_of(kernels: DeviceKernels, x: torch.Tensor) -> np.ndarray:
    into = page(x.device)
    kernel = kernels.kernel(EPS, x.device)
    assert isinstance(kernel, FusedKernel)
    assert kernel.reduces(x, into, 1)
    return into[1].cpu().numpy()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("size", [0, 1, 1000, 300_001, 4_000_000])
def test_every_dtype_and_size_agrees_with_the_reference(
    kernels: DeviceKernels, device: torch.device, dtype: torch.dtype, size: int
) -> None:
    x = torch.randn(size)
    x = torch.complex(x, x.flip(0)) if dtype.is_complex else x if dtype.is_floating_point else x.abs() * 9
    x = x.to(dtype)
    assert_agrees(row_of(kernels, x.to(device)), x, EPS)


@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e18, 3e37])
def test_any_magnitude_keeps_its_norm(kernels: DeviceKernels, device: torch.device, magnitude: float) -> None:
    x = torch.randn(1_000_000) * magnitude
    assert_agrees(row_of(kernels, x.to(device)), x, EPS)


def test_views_are_read_where_they_are(kernels: DeviceKernels, device: torch.device) -> None:
    x = torch.randn(40, 50, 60)
    for view in (x[:, ::2], x[..., 1:], x[..., ::2], x.transpose(0, 2)[::2], x[:, :1].expand(-1, 9, -1)):
        moved = x.to(device).as_strided(view.shape, view.stride(), view.storage_offset())
        assert_agrees(row_of(kernels, moved), view, EPS)


def test_rows_of_a_list_are_those_of_each_alone_twice_in_a_row(kernels: DeviceKernels, device: torch.device) -> None:
    tensors = [torch.randn(size, device=device) for size in (1, 1000, 3_000_001, 0, 8192)]
    tensors += [x.bfloat16() for x in tensors]
    together = kernels.list(EPS, device)
    assert together is not None
    for _ in range(2):
        into = page(device, len(tensors))
        assert together.reduce_into(tensors, [into] * len(tensors), range(len(tensors))) == []
        for row, x in enumerate(tensors):
            assert np.array_equal(into[row].cpu().numpy(), row_of(kernels, x))


@pytest.mark.usefixtures("no_waits")
def test_nothing_waits_for_the_device(kernels: DeviceKernels, device: torch.device) -> None:
    x, into, step = torch.randn(1_000_000, device=device), page(device), torch.ones((), dtype=torch.int64, device=device)
    kernels.kernel(EPS, device).reduce_into(x, into, 0, step)
    together = kernels.list(EPS, device)
    assert together is not None
    for _ in range(3):
        together.reduce_into([x + 1], [into], [0])


@pytest.mark.usefixtures("kernels")
def test_captured_work_is_recorded_whenever_it_is_run(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs of work are CUDA's")
    x, into, step = torch.randn(1_000_000, device=device), page(device, 4), torch.zeros((), dtype=torch.int64, device=device)
    reduce_into(x, into, 0, step, EPS)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduce_into(x, into, 0, step, EPS)
    for number in (1, 2, -1):
        into.zero_()
        x.normal_()
        step.fill_(number)
        graph.replay()
        if number >= 0:
            assert_agrees(into[number].cpu().numpy(), x.cpu(), EPS)
        assert into.any(dim=1).sum().item() == (number >= 0)
