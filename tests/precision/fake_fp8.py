"""FP8 emulated with torch's own casts: linear layers whose operands are rounded, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "fp16": torch.float16, "bf16": torch.bfloat16}


def rounded(x: Tensor, name: str, scale: float | None = None) -> Tensor:
    """``x`` after a cast to a float8 format and back, with the scale that takes its greatest magnitude to the format's."""
    greatest = torch.finfo(DTYPES[name]).max
    if scale is None:
        absmax = x.abs().max().item()
        scale = greatest / absmax if absmax else 1.0
    scaled = (x.double() * scale).float().clamp(-greatest, greatest)
    return (scaled.to(DTYPES[name]).double() / scale).to(x.dtype)


class RoundedLinear(torch.autograd.Function):
    """``x @ weight.T``. All three products of a step take rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, formats: Mapping[str, str]) -> Tensor:
        x, weight = rounded(x, formats["input"]), rounded(weight, formats["weight"])
        ctx.save_for_backward(x, weight)
        ctx.format = formats["gradient"]
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        gradient = rounded(gradient, ctx.format)
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), None


@contextmanager
def fp8(model: nn.Module, formats: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """While it is entered, the linear layers named compute with rounded operands.

    Args:
        formats: By name of the layer, the format of its ``input``, ``weight`` and ``gradient``.
    """
    layers = {name: model.get_submodule(name) for name in formats}
    for name, layer in layers.items():
        assert isinstance(layer, nn.Linear)

        def forward(x: Tensor, layer: nn.Linear = layer, name: str = name) -> Tensor:
            product = RoundedLinear.apply(x, layer.weight, formats[name])
            return product if layer.bias is None else product + layer.bias

        layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward
