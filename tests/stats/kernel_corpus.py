"""The tensors that every kernel is held to, by name, each with what its row has to say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import numpy as np
import torch
from evidence import sampled
from reference import Expected, expected

EPS = 1e-8
LONG = 3 * 262_144 + 5
"""Elements of more than one piece of any kernel, and no whole number of them."""

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
NUMBERS = [*FLOATS, *FLOAT8, *COMPLEX, *INTEGERS, torch.bool]


@dataclass(frozen=True)
class Case:
    """A tensor, and its elements where they are not all stored."""

    x: torch.Tensor
    eps: float = EPS
    elements: torch.Tensor | np.ndarray | None = None

    @cached_property
    def expected(self) -> Expected:
        return expected(self.x if self.elements is None else self.elements, self.eps)


Corpus = dict[str, Case]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.complex(normal(300, 7), normal(300, 7, seed=1)).to(dtype)
    return normal(300, 7).to(dtype) if dtype.is_floating_point else torch.arange(200).remainder(7).to(dtype)


@cache
def dtypes() -> Corpus:
    return {str(dtype): Case(numbers(dtype)) for dtype in NUMBERS}


MAGNITUDES = [1e-38, 1e-30, 1e-20, 1e-5, 1.0, 1e5, 1e18, 1e30, 3e37]
WIDE_MAGNITUDES = [1e-300, 1e-160, 1e150, 1e300]


@cache
def magnitudes() -> Corpus:
    few = {f"{size} of {m:g}": Case(normal(size) * m) for size, m in product((1, 17), MAGNITUDES)}
    return few | {f"float64 of {m:g}": Case(normal(5000).double() * m) for m in WIDE_MAGNITUDES}


@cache
def long_magnitudes() -> Corpus:
    return {f"of {m:g}": Case(normal(LONG) * m) for m in sampled(MAGNITUDES, 0, len(MAGNITUDES) // 2, -1)}


@cache
def distributions() -> Corpus:
    drawn = torch.rand(250_000, generator=torch.Generator().manual_seed(1))
    sparse = {f"a share {share} of zeros": Case(normal(250_000) * (drawn >= share)) for share in (0.05, 0.5, 1.0)}
    return sparse | {
        "a million equal elements": Case(torch.full((1_000_000,), 0.1)),
        "sixty orders of magnitude": Case(normal(100_000) * torch.logspace(-30, 30, 100_000)),
    }


@cache
def shapes() -> Corpus:
    """Distributions with different kurtosis, also far from 0 beside their spread."""
    drawn = normal(5001).double()
    outlier = normal(5001, seed=1)
    outlier[7] = 1e4
    return {
        "exponential": Case(drawn.exp().float()),
        "of two values": Case((drawn > 0.3).float()),
        "one outlier": Case(outlier),
        "a mean of 100 spreads": Case((1 + 0.01 * drawn.pow(3)).float()),
        "a mean of a million spreads": Case(1e6 + drawn.pow(3)),
        "a tiny spread in float64": Case(1 + 1e-9 * drawn.pow(3)),
        "one of many differs": Case(torch.ones(5001).index_fill(0, torch.tensor(3), 1.0000001)),
        "small gradients": Case((1e-12 * drawn).float()),
    }


@cache
def long_shapes() -> Corpus:
    """The same of more than a piece, with parts that differ."""
    drift = torch.linspace(0, 5, LONG)
    return {"long exponential": Case(normal(LONG).exp()), "long drift": Case(normal(LONG) + drift * drift)}


def near(eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Numbers at the bound, just below it, and far from it."""
    at = torch.tensor(eps, dtype=torch.float64).to(dtype)
    return torch.stack([at, torch.nextafter(at.float(), torch.tensor(0.0)).to(dtype), -at, at * 2, at * 0]).nan_to_num()


@cache
def bounds() -> Corpus:
    of = product((1e-300, 1e-25, 1e-8, 0.1, 1e30), (torch.float32, torch.float64, torch.bfloat16))
    return {f"{dtype} at {eps:g}": Case(near(eps, dtype), eps) for eps, dtype in of}


def with_one(bad: float, dtype: torch.dtype) -> torch.Tensor:
    x = normal(3000)
    x[17] = bad
    return x.to(dtype)


@cache
def non_finite() -> Corpus:
    of = product((math.nan, math.inf, -math.inf), [*FLOATS, torch.float8_e5m2])
    return {f"{bad} in {dtype}": Case(with_one(bad, dtype)) for bad, dtype in of}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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


@cache
def views() -> Corpus:
    return {name: Case(view(normal(20, 9, 30))) for name, view in VIEWS.items()}


@cache
def layouts() -> Corpus:
    """Tensors whose elements do not lie in memory one by one."""
    dense = normal(40, 30) * (normal(40, 30, seed=1) > 1.5)
    sparse = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 3)),
    }
    parts = [normal(3, 4), normal(5, 4, seed=1)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    strided = torch.nested.nested_tensor(parts, layout=torch.strided)
    with torch.inference_mode():
        inferred = normal(100)
    return {name: Case(x, elements=dense) for name, x in sparse.items()} | {
        "jagged": Case(nested, elements=torch.cat(parts)),
        "nested": Case(strided, elements=torch.cat(parts)),
        "nested and transposed": Case(strided.transpose(-1, -2), elements=torch.cat(parts)),
        "a part of nested": Case(strided.chunk(2, -1)[1], elements=torch.cat([one[:, 2:] for one in parts])),
        "made in inference mode": Case(inferred, elements=inferred.clone()),
    }
