"""All kernels, held to the same float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import fused as fused_kernel
from reference import assert_agrees, derived
from torch.utils._python_dispatch import TorchDispatchMode

from monitor.stats.ops import Epsilon
from monitor.stats.partials import COLUMNS, COUNT, SMALLS, WRITES
from monitor.stats.torch.device_kernel import TorchDeviceKernel
from monitor.stats.torch.host_kernel import PIECE, TorchHostKernel
from monitor.stats.torch.tensors import pieces
from monitor.stats.triton.elements import Blocks
from monitor.stats.triton.launch import FusedKernel

EPS = 1e-8
Reduce = Callable[[torch.Tensor], np.ndarray]


def portable(eps: float) -> TorchHostKernel:
    return TorchHostKernel(eps, with_native=False)


def host(eps: float = EPS, kernel: Callable[[float], TorchHostKernel] = TorchHostKernel) -> Reduce:
    own = kernel(eps)

    def reduce(x: torch.Tensor) -> np.ndarray:
        page = np.zeros((3, len(COLUMNS)))
        assert own.reduce_into(x, page, 1)
        assert not page[0].any()
        assert not page[2].any()
        return page[1]

    return reduce


def host_portable(eps: float = EPS) -> Reduce:
    return host(eps, portable)


def device(eps: float = EPS) -> Reduce:
    return into_a_page(TorchDeviceKernel(eps, chunk=1 << 12))


def fused(eps: float = EPS) -> Reduce:
    pytest.importorskip("triton")
    return into_a_page(fused_kernel(eps, Blocks(lanes=8192, rows=16, parts=4, tiles=4)))


def into_a_page(kernel: TorchDeviceKernel | FusedKernel) -> Reduce:
    def reduce(x: torch.Tensor) -> np.ndarray:
        page = torch.zeros(3, len(COLUMNS), dtype=torch.float64)
        assert kernel.reduce_into(x, page, 1)
        assert not page[0].any()
        assert not page[2].any()
        return page[1].numpy()

    return reduce


@pytest.fixture(params=[host, host_portable, device, fused], ids=["native", "host", "device", "fused"])
def make(request: pytest.FixtureRequest) -> Callable[..., Reduce]:
    return request.param


@pytest.fixture
def reduce(make: Callable[..., Reduce]) -> Reduce:
    return make()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", FLOATS + FLOAT8 + COMPLEX, ids=str)
def test_every_floating_dtype_agrees_with_the_reference(reduce: Reduce, dtype: torch.dtype) -> None:
    x = (torch.complex(normal(300, 7), normal(300, 7, seed=1)) if dtype.is_complex else normal(300, 7)).to(dtype)
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_integers_and_bool_are_measured_as_numbers(reduce: Reduce, dtype: torch.dtype) -> None:
    x = torch.arange(200).remainder(7).to(dtype)
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-20, 1e-5, 1.0, 1e5, 1e18, 1e30, 3e37])
@pytest.mark.parametrize("size", [1, 17, 3 * PIECE + 5])
def test_any_magnitude_of_float32_keeps_its_norm(reduce: Reduce, magnitude: float, size: int) -> None:
    x = normal(size) * magnitude
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("magnitude", [1e-300, 1e-160, 1e150, 1e300])
def test_a_finite_float64_tensor_has_a_finite_norm_that_is_not_zero(reduce: Reduce, magnitude: float) -> None:
    x = normal(5000).double() * magnitude
    assert_agrees(reduce(x), x, EPS)


def test_a_million_equal_elements(reduce: Reduce) -> None:
    x = torch.full((1_000_000,), 0.1)
    assert_agrees(reduce(x), x, EPS)


def test_scales_that_differ_by_sixty_orders_of_magnitude(reduce: Reduce) -> None:
    x = normal(100_000) * torch.logspace(-30, 30, 100_000)
    assert_agrees(reduce(x), x, EPS)


def test_the_spread_survives_a_mean_ten_thousand_times_larger(reduce: Reduce) -> None:
    x = 100 + 0.01 * normal(200_000)
    assert derived(reduce(x))["std"] == pytest.approx(float(x.double().std(correction=0)), rel=1e-5)


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_small_elements_are_counted_exactly(reduce: Reduce, share: float) -> None:
    x = normal(250_000) * (torch.rand(250_000, generator=torch.Generator().manual_seed(1)) >= share)
    assert_agrees(reduce(x), x, EPS)


@pytest.mark.parametrize("eps", [1e-300, 1e-25, 1e-8, 0.1, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_eps_is_compared_without_rounding(make: Callable[..., Reduce], eps: float, dtype: torch.dtype) -> None:
    near = torch.tensor(eps, dtype=torch.float64).to(dtype)
    x = torch.stack([near, torch.nextafter(near.float(), torch.tensor(0.0)).to(dtype), -near, near * 2, near * 0]).nan_to_num()
    row = make(eps)(x)
    assert row[SMALLS] == (x.double().abs() < eps).sum()


@pytest.mark.parametrize("precision", [np.float32, np.float64])
@given(eps=st.floats(min_value=1e-44, max_value=1e38), x=st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=200, deadline=None)
def test_the_rounded_bound_says_the_same_as_eps(precision: type, eps: float, x: float) -> None:
    with np.errstate(over="ignore"):
        value = precision(x)
    bound = Epsilon.of(eps, precision)
    assert (abs(float(value)) < eps) == bool(abs(value) < precision(bound.bound))
    if bound.square is not None:
        with np.errstate(over="ignore", under="ignore"):
            assert (abs(float(value)) < eps) == bool(value * value < precision(bound.square))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2], ids=str)
def test_a_non_finite_value_is_counted_and_hides_nothing_else(reduce: Reduce, bad: float, dtype: torch.dtype) -> None:
    x = normal(3000).to(torch.float32)
    x[17] = bad
    x = x.to(dtype)
    row = reduce(x)
    assert_agrees(row, x, EPS)
    kept = x.double()[torch.isfinite(x.double())]
    found = dict(zip(COLUMNS, row, strict=True))
    assert (found["min"], found["max"]) == (float(kept.min()), float(kept.max()))
    assert found["sumsq"] == pytest.approx(float(kept.square().sum()))


def test_all_kinds_of_non_finite_values_are_told_apart(reduce: Reduce) -> None:
    x = torch.tensor([math.nan, math.inf, math.inf, -math.inf, -math.inf, -math.inf, 2.0])
    found = dict(zip(COLUMNS, reduce(x), strict=True))
    assert (found["nans"], found["posinfs"], found["neginfs"], found["count"]) == (1, 2, 3, 7)
    assert (found["min"], found["max"], found["sum"]) == (2.0, 2.0, 2.0)


def test_nothing_but_nan_leaves_no_extremes(reduce: Reduce) -> None:
    row = reduce(torch.full((5,), math.nan))
    assert derived(row) == pytest.approx(
        {"min": math.nan, "max": math.nan, "mean": math.nan, "norm": math.nan, "absmax": math.nan, "std": math.nan}
        | {"nans": 5, "infs": 0, "zeros": 0},
        nan_ok=True,
    )


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_an_empty_tensor_is_a_measurement_without_mean_or_extremes(reduce: Reduce, shape: tuple[int, ...]) -> None:
    row = reduce(torch.empty(shape))
    assert (row[WRITES], row[COUNT]) == (1, 0)
    assert derived(row) == {"norm": 0.0, "nans": 0.0, "infs": 0.0}


VIEWS = {
    "zero-dim": lambda x: x[0, 0, 0],
    "transposed": lambda x: x.transpose(0, 2),
    "every second": lambda x: x[::2, 1:, ::3],
    "reversed rows": lambda x: x.flip(0)[:, ::2],
    "narrow rows": lambda x: x[:, :, 3:5],
    "expanded": lambda x: x[:, :1].expand(-1, 50, -1),
    "broadcast scalar": lambda x: x[0, 0, 0].expand(1000),
    "overlapping windows": lambda x: x.reshape(-1)[:500].unfold(0, 10, 3),
    "channels last": lambda x: x.reshape(4, 5, 9, 30).contiguous(memory_format=torch.channels_last),
    "parameter": lambda x: torch.nn.Parameter(x.clone()),
    "result of a graph": lambda x: x.clone().requires_grad_() * 2,
    "negated view": torch._neg_view,
    "conjugated": lambda x: torch.view_as_complex(x.reshape(-1, 2).contiguous()).conj(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_any_view_is_read_in_place(reduce: Reduce, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(normal(20, 9, 30))
    assert_agrees(reduce(x), x, EPS)


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_strided_view_hold_each_element_once(shape: list[int], steps: list[int], order: object) -> None:
    base = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    x = base.permute(dims)[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    cut = list(pieces(x, 7))
    assert all(piece.numel() <= 7 for piece in cut)
    assert sorted(torch.cat([piece.reshape(-1) for piece in cut]).tolist()) == sorted(x.reshape(-1).tolist())


def test_sparse_tensors_are_their_stored_values_and_the_zeros_between(reduce: Reduce) -> None:
    dense = normal(40, 30) * (normal(40, 30, seed=1) > 1.5)
    for x in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 3))):
        assert_agrees(reduce(x), dense, EPS)


def test_terms_of_an_uncoalesced_sparse_tensor_are_summed_first(reduce: Reduce) -> None:
    x = torch.sparse_coo_tensor(torch.tensor([[0, 0, 3]]), torch.tensor([1.0, 2.0, 4.0]), (6,))
    row = reduce(x)
    assert derived(row)["norm"] == pytest.approx(5.0)
    assert not x.is_coalesced()


def test_jagged_nested_tensors_are_their_elements(reduce: Reduce) -> None:
    parts = [normal(3, 4), normal(5, 4, seed=1)]
    assert_agrees(reduce(torch.nested.nested_tensor(parts, layout=torch.jagged)), torch.cat(parts), EPS)


def test_inference_tensors_are_read(reduce: Reduce) -> None:
    with torch.inference_mode():
        x = normal(100)
    assert_agrees(reduce(x), x.clone(), EPS)


def test_what_has_no_data_has_no_row() -> None:
    page = np.zeros((1, len(COLUMNS)))
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    for x in (torch.empty(3, device="meta"), fake):
        assert not TorchHostKernel(EPS).reduce_into(x, page, 0)
    assert not page.any()


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


def functional(x: torch.Tensor) -> torch.Tensor:
    """A part of what torch calls functional: it says that it has memory, and has no address."""
    torch._enable_functionalization(reapply_views=True)
    try:
        return torch._to_functional_tensor(x)[1:]
    finally:
        torch._disable_functionalization()


def shrunk(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(16)
    return x


FREED: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: freed(normal(50)),
    "functional": lambda: functional(normal(50)),
    "functional and more than a thousand": lambda: functional(normal(5000)),
    "more than a chunk": lambda: freed(torch.zeros(PIECE + 1)),
    "behind others": lambda: freed(normal(50)[7:]),
    "bfloat16": lambda: freed(normal(50).bfloat16()[3:]),
    "transposed": lambda: freed(normal(5, 6).t()),
    "every second": lambda: freed(normal(50)[1::2]),
    "expanded": lambda: freed(normal(50, 1).expand(-1, 3)),
    "efficient zeros": lambda: torch._efficientzerotensor((50,)),
    "values of a sparse tensor": lambda: torch.sparse_coo_tensor([[0, 2]], freed(torch.ones(2)), (3,), is_coalesced=True),
}


def fused_alone(eps: float) -> FusedKernel:
    pytest.importorskip("triton")
    return fused_kernel(eps, Blocks(lanes=32, rows=16, parts=4, tiles=4))


@pytest.mark.parametrize("make", FREED.values(), ids=FREED)
@pytest.mark.parametrize(
    "kernel", [TorchHostKernel, portable, TorchDeviceKernel, fused_alone], ids=["native", "host", "device", "fused"]
)
def test_what_was_freed_is_not_read(kernel: Callable[[float], object], make: Callable[[], torch.Tensor]) -> None:
    own, page = kernel(EPS), torch.zeros((1, len(COLUMNS)), dtype=torch.float64)
    assert not own.reduce_into(make(), page.numpy() if isinstance(own, TorchHostKernel) else page, 0)
    assert not page.any()


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


def test_the_kernels_agree_with_themselves_bit_for_bit(reduce: Reduce) -> None:
    x = normal(3 * PIECE + 11)
    assert np.array_equal(reduce(x), reduce(x.clone()))
