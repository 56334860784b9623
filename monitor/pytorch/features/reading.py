"""What PyTorch brings to features: see ``monitor.recording.features.reading``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from monitor.pytorch.features.attention import spread
from monitor.pytorch.features.calls_within import CallsWithin
from monitor.pytorch.features.matrices import norms_of, similarity_of_rows
from monitor.pytorch.features.routing import dtype_of_routing, entropy_from, entropy_of
from monitor.pytorch.features.sources import bias_of, given_scores, local_matrix, matrix_of, tokens_of, whole_rows
from monitor.pytorch.features.weight_placement import weight_placement
from monitor.stats.torch.tensors import beneath, unseen

__all__ = [
    "beneath",
    "bias_of",
    "dtype_of_routing",
    "embeds",
    "entropy_from",
    "entropy_of",
    "given_scores",
    "is_floating_point",
    "is_linear",
    "local_matrix",
    "matrix_of",
    "norms_of",
    "searching",
    "similarity_of_rows",
    "spread",
    "tokens_of",
    "unseen",
    "unwrapped",
    "weight_placement",
    "whole_rows",
]

SWITCHING = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that compute otherwise, and to other bits, while a function mode looks on."""

_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def is_floating_point(x: Any) -> bool:
    """Whether it is a tensor, and of floating-point numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


def embeds(module: nn.Module) -> bool:
    """Whether the weight of a module is a table."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def is_linear(module: nn.Module) -> bool:
    """Whether what a module returns is a product with its weight, and nothing else."""
    return isinstance(module, nn.Linear)


def unwrapped(module: nn.Module) -> nn.Module:
    """What FSDP and activation checkpointing have wrapped: that is where weights are whole."""
    while (within := next((getattr(module, name) for name in _WRAPPED if name in module._modules), None)) is not None:
        module = within
    return module


def searching(module: nn.Module) -> type[CallsWithin] | None:
    """What makes a search for Q and K in a call of the module; None where it cannot be looked into."""
    closed = any(_is_compiled(one) or isinstance(one, SWITCHING) for one in module.modules())
    return None if closed else CallsWithin


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
