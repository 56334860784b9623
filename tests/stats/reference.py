"""What the ops are by definition, in extended precision on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from monitor.config.model import HIGHER_OPS
from monitor.stats import partials
from monitor.stats.ops import NUMERIC_OPS, derive
from monitor.stats.partials import Partials


def elements(x: torch.Tensor | np.ndarray) -> np.ndarray:
    """Every element of a tensor, by magnitude (in its own precision) where it is complex, as extended floats."""
    if isinstance(x, np.ndarray):
        return (np.abs(x) if x.dtype.kind == "c" else x).astype(np.longdouble).ravel()
    x = x.detach()
    if x.layout is not torch.strided:
        x = x.to_dense()
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        x = (x.to(torch.complex64) if x.dtype is torch.complex32 else x).abs()
    wide = x.to(torch.float64) if x.dtype.is_floating_point or x.dtype is torch.bool else x.to(torch.int64)
    return wide.cpu().numpy().astype(np.longdouble).ravel()


def reference(x: torch.Tensor | np.ndarray, eps: float) -> dict[str, float]:
    """The ops of a tensor; those without a value are absent."""
    a = elements(x)
    found = {"norm": np.sqrt(np.square(a).sum()), "nans": np.isnan(a).sum(), "infs": np.isinf(a).sum()}
    if a.size:
        with np.errstate(invalid="ignore"):
            found |= {"min": a.min(), "max": a.max(), "mean": a.mean(), "absmax": np.abs(a).max(), "std": a.std()}
        found["zeros"] = (np.abs(a) < eps).mean()
        found |= {"absmean": np.abs(a).mean(), "rms": np.sqrt(np.square(a).mean())}
    kept = a[np.isfinite(a)]
    if kept.any():
        found["smallest_nonzero"] = np.abs(kept[kept != 0]).min()
    if len(kept) and kept.min() < kept.max():
        off = kept - kept.mean()
        found["kurtosis"] = (off**4).mean() / np.square(np.square(off).mean()) - 3
        found["skewness"] = (off**3).mean() / np.square(off).mean() ** np.longdouble(1.5)
    return {op: float(value) for op, value in found.items()}


def derived(row: object) -> dict[str, float]:
    """The ops that a table row gives; those without a value are absent."""
    partials = Partials.from_rows(np.array(row, dtype=np.float64)[None])
    found = {op: derive(op, partials) for op in NUMERIC_OPS}
    return {op: float(values[0]) for op, (values, valid) in found.items() if valid[0]}


@dataclass(frozen=True)
class Expected:
    """What a row has to say, and how exactly: the scale is the mean magnitude of what is finite."""

    ops: dict[str, float]
    scale: float
    rounded: float


def expected(x: torch.Tensor | np.ndarray, eps: float) -> Expected:
    """Of a tensor. Extremes of complex128 are square roots, which may be rounded either way."""
    a = elements(x)
    finite = a[np.isfinite(a)]
    is_rounded = str(getattr(x, "dtype", "")) in ("torch.complex128", "complex128")
    return Expected(reference(x, eps), float(np.abs(finite).mean()) if finite.size else 0.0, 4e-16 if is_rounded else 0.0)


def assert_agrees(
    row: object, x: torch.Tensor | np.ndarray, eps: float, tolerance: float = 1e-6, *, higher: bool = False
) -> None:
    """The row has the ops of ``x``: extremes, counts and shares exactly; norm, mean and std to ``tolerance`` of their scale.

    Kurtosis relative to the fourth moment, skewness to the third moment of magnitudes; without ``higher`` the row need not have
    the ops that are measured on request.
    """
    assert_is(row, expected(x, eps), tolerance, higher=higher)


def assert_is(row: object, expected: Expected, tolerance: float = 1e-6, *, higher: bool = False) -> None:
    found, ops, scale = derived(row), expected.ops, expected.scale
    unasked = set() if higher else HIGHER_OPS - found.keys()
    assert ops.keys() - unasked == found.keys()
    if "kurtosis" in found:
        np.testing.assert_allclose(found["kurtosis"] + 3, ops["kurtosis"] + 3, rtol=5 * tolerance, err_msg="kurtosis")
    if "skewness" in found:
        np.testing.assert_allclose(
            found["skewness"], ops["skewness"], rtol=5 * tolerance, atol=5 * tolerance, err_msg="skewness"
        )
    if "absmean" in found:
        np.testing.assert_allclose(found["absmean"], ops["absmean"], rtol=tolerance, err_msg="absmean")
    for op in ("min", "max", "absmax", "nans", "infs", "zeros", "smallest_nonzero"):
        if op in found:
            np.testing.assert_allclose(found[op], ops[op], rtol=expected.rounded, atol=0, err_msg=op)
    if "mean" in ops:
        np.testing.assert_allclose(found["mean"], ops["mean"], rtol=0, atol=tolerance * scale, err_msg="mean")
        np.testing.assert_allclose(found["std"], ops["std"], rtol=2e-6, atol=tolerance * scale, err_msg="std")
    for op in ("norm", "rms"):
        if op in ops:
            np.testing.assert_allclose(found[op], ops[op], rtol=tolerance, err_msg=op)


def check_sums(x: torch.Tensor) -> tuple[int, int]:
    """``bits`` and ``places`` (``monitor.stats.partials``) of elements in the order of memory; zeros if some are repeated."""
    x = x.detach().resolve_conj().resolve_neg()
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return 0, 0
    ordered = x.permute(sorted(range(x.dim()), key=lambda dim: -x.stride(dim))).contiguous()
    return check_sums_of(ordered.reshape(-1).view(torch.uint8).numpy().tobytes(), x.itemsize)


def check_sums_of(raw: bytes, itemsize: int) -> tuple[int, int]:
    """The same, of the elements one after the other."""
    size = min(itemsize, 4)
    words = [int.from_bytes(raw[start : start + size], "little") for start in range(0, len(raw), size)]
    places = sum(place * word for place, word in enumerate(words))
    return (len(raw) // itemsize + sum(words)) % 2**64, places % 2**64


def checked(row: np.ndarray) -> tuple[int, int]:
    """The check sums of a table row."""
    bits, places = partials.check_sums(np.asarray(row)[:, np.newaxis])
    return int(bits[0]), int(places[0])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of a normal distribution, float32."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
