"""Runs a program of torchtitan where there is no CUDA device; ``titan_without_cuda.py PROGRAM``."""

from types import SimpleNamespace
from typing import Any

import program
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention


def causal(q: Any, k: Any, v: Any, *, enable_gqa: bool = False, **_: Any) -> Any:
    """FlexAttention has no backward on a CPU."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa), None


divide = FSDPModule.set_gradient_divide_factor


def divide_first(module: Any, factor: float) -> None:
    """Gloo cannot multiply while it sums."""
    module.set_force_sum_reduction_for_comms(True)
    divide(module, factor)


FSDPModule.set_gradient_divide_factor = divide_first  # type: ignore[method-assign]
STANDS_IN: Any = {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**30),
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda *_: None,
    "memory_stats": lambda *_: {},
}
for name, function in STANDS_IN.items():
    setattr(torch.cpu, name, function)
barrier = torch.distributed.barrier
torch.distributed.barrier = lambda **_: barrier()  # of Gloo, which knows no numbers of devices
torch.distributed.set_timeout = lambda *_, **__: None  # type: ignore[attr-defined]  # newer than torch 2.13
torch._utils._get_available_device_type = lambda: "cpu"
flex_attention.flex_attention = causal
torch.compile = lambda compiled, **_: compiled  # type: ignore[assignment]
program.run()
