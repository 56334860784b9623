"""The kernels for tensors: held to the contract of all kernels, and what is true of these alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_contract import Make, Reduce, TensorContract
from kernel_corpus import EPS, normal
from reference import assert_agrees
from torch.utils._python_dispatch import TorchDispatchMode

from monitor.stats.ops import Epsilon
from monitor.stats.partials import COLUMNS
from monitor.stats.torch.device_kernel import TorchDeviceKernel
from monitor.stats.torch.host_kernel import TorchHostKernel
from monitor.stats.torch.tensors import pieces


def portable(eps: float, **wanted: bool) -> TorchHostKernel:
    return TorchHostKernel(eps, with_native=False, **wanted)


def chunked(eps: float, **wanted: bool) -> TorchDeviceKernel:
    return TorchDeviceKernel(eps, chunk=1 << 12, **wanted)


KERNELS = {"native": TorchHostKernel, "host": portable, "device": chunked}
AnyKernel = TorchHostKernel | TorchDeviceKernel


def into_a_page(own: AnyKernel) -> Reduce:
    def reduce(x: torch.Tensor) -> np.ndarray:
        page = torch.zeros(3, len(COLUMNS), dtype=torch.float64)
        assert own.reduce_into(x, page.numpy() if isinstance(own, TorchHostKernel) else page, 1)
        assert not page[[0, 2]].any()
        return page[1].numpy()

    return reduce


class TestTensorKernels(TensorContract):
    @pytest.fixture(params=KERNELS.values(), ids=KERNELS)
    def kernel(self, request: pytest.FixtureRequest) -> Callable[..., AnyKernel]:
        return request.param

    @pytest.fixture
    def make(self, kernel: Callable[..., AnyKernel]) -> Make:
        return lambda eps: into_a_page(kernel(eps))

    @pytest.fixture
    def make_higher(self, kernel: Callable[..., AnyKernel]) -> Make:
        return lambda eps: into_a_page(kernel(eps, higher=True))

    @pytest.fixture
    def make_checked(self, kernel: Callable[..., AnyKernel]) -> Make:
        return lambda eps: into_a_page(kernel(eps, check_sums=True))


@pytest.mark.parametrize("precision", [np.float32, np.float64])
@given(eps=st.floats(min_value=1e-44, max_value=1e38), x=st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=200)
def test_the_rounded_bound_says_the_same_as_eps(precision: type, eps: float, x: float) -> None:
    with np.errstate(over="ignore"):
        value = precision(x)
    bound = Epsilon.of(eps, precision)
    assert (abs(float(value)) < eps) == bool(abs(value) < precision(bound.bound))
    if bound.square is not None:
        with np.errstate(over="ignore", under="ignore"):
            assert (abs(float(value)) < eps) == bool(value * value < precision(bound.square))


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_pieces_of_any_strided_view_hold_each_element_once(shape: list[int], steps: list[int], order: object) -> None:
    base = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    x = base.permute(dims)[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    cut = list(pieces(x, 7))
    assert all(piece.numel() <= 7 for piece in cut)
    assert sorted(torch.cat([piece.reshape(-1) for piece in cut]).tolist()) == sorted(x.reshape(-1).tolist())


def test_what_has_no_data_has_no_row() -> None:
    page = np.zeros((1, len(COLUMNS)))
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    for x in (torch.empty(3, device="meta"), fake):
        assert not TorchHostKernel(EPS).reduce_into(x, page, 0)
    assert not page.any()


def shrunk(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(16)
    return x


@pytest.mark.parametrize("make", [lambda: normal(50), lambda: normal(50).bfloat16()[20:], lambda: normal(5, 9)[:, ::2]])
@pytest.mark.parametrize("kernel", [TorchHostKernel, portable], ids=["native", "host"])
def test_what_was_shrunk_is_not_read(kernel: Callable[[float], TorchHostKernel], make: Callable[[], torch.Tensor]) -> None:
    page = np.zeros((1, len(COLUMNS)))
    assert not kernel(EPS).reduce_into(shrunk(make()), page, 0)
    assert not page.any()


@pytest.mark.parametrize(
    "kernel", [TorchHostKernel(EPS), portable(EPS), TorchDeviceKernel(EPS)], ids=["native", "host", "device"]
)
def test_reading_records_nothing_casts_nothing_and_shows_in_no_mode_of_the_users(
    kernel: TorchHostKernel | TorchDeviceKernel,
) -> None:
    class Everything(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    page = torch.zeros(1, len(COLUMNS), dtype=torch.float64)
    into = page if isinstance(kernel, TorchDeviceKernel) else page.numpy()
    x = normal(500).requires_grad_()
    version, state = x._version, torch.random.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16), Everything():
        kernel.reduce_into(x, into, 0)
    assert_agrees(page[0].numpy(), x, EPS)
    assert (x.grad_fn, x._version, seen) == (None, version, [])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("kernel", [TorchHostKernel, portable], ids=["native", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_storage_of_what_was_read_can_still_be_resized(
    kernel: Callable[[float], TorchHostKernel], dtype: torch.dtype
) -> None:
    """As FSDP does: torch resizes no storage that numpy has a view of."""
    x = torch.randn(40).to(dtype)
    kernel(EPS).reduce(x)
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
