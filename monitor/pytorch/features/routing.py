"""How sure a router is of its experts."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from monitor.recording.features.reading import Routing
from monitor.stats.torch.tensors import working_precision

BLOCK: Final = 1 << 18
"""Numbers that are worked on at once."""

DTYPES: Final = {"fp32": torch.float32, "fp64": torch.float64}
"""As Megatron's configuration names them."""


def entropy_of(logits: Tensor) -> Routing:
    """Of logits of any shape whose last dimension is the experts."""
    flat = logits.flatten(0, -2)
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for block in flat.split(max(1, BLOCK // max(1, flat.shape[1]))):
        total += _entropies(block).sum(dtype=torch.float64)
    return Routing(flat.shape[0], total)


def entropy_from(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Routing:
    """Of the logits ``tokens @ weight^T + bias``, formed in ``dtype`` as the router does, some tokens at a time.

    Args:
        tokens: Last dimension the hidden size.
        weight: Shape ``(experts, hidden size)``.
    """
    flat, weight = tokens.flatten(0, -2), weight.to(dtype)
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for block in flat.split(max(1, BLOCK // max(1, *weight.shape))):
        logits = torch.nn.functional.linear(block.to(dtype), weight, None if bias is None else bias.to(dtype))
        total += _entropies(logits).sum(dtype=torch.float64)
    return Routing(flat.shape[0], total)


def dtype_of_routing(module: torch.nn.Module, tokens: Tensor, weight: Tensor) -> torch.dtype:
    """The precision in which a router forms its logits, as far as it says: its configuration, autocast, what it is given."""
    said = DTYPES.get(str(getattr(getattr(module, "config", None), "moe_router_dtype", None)))
    if said is not None:
        return said
    device = tokens.device.type
    lowered = torch.is_autocast_enabled(device)
    dtype: torch.dtype = torch.get_autocast_dtype(device) if lowered else torch.promote_types(tokens.dtype, weight.dtype)
    return dtype


def _entropies(logits: Tensor) -> Tensor:
    """An expert that a token cannot go to has a logit of -Inf and the share 0."""
    shares = torch.softmax(logits.to(working_precision(logits.dtype)), -1)
    entropies: Tensor = torch.special.entr(shares).sum(-1)
    return entropies
