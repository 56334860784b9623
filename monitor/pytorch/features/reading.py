"""PyTorch's implementation of ``monitor.recording.features.reading``: finds weights and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from monitor.coordinator.ownership import alike_over
from monitor.pytorch.features import attention, choices, matrices
from monitor.pytorch.features.activations import activation_of, active_share, last_active
from monitor.pytorch.features.attention import AttentionSearch, ClosedSearch, given_scores, heads_of, spread, summed
from monitor.pytorch.frameworks.dtensor import placement_of
from monitor.pytorch.frameworks.framework import Framework
from monitor.recording.attached_model import NamedParameter
from monitor.recording.features import reading
from monitor.series import Placement
from monitor.stats.torch.tensors import beneath, local_shard, unseen

# --- The tensors of a feature: among a module's arguments, or its weight.


def matrix_of(module: nn.Module) -> Tensor | None:
    """``weight`` or ``wg`` of a module. The attribute may also be a layer that holds the weight.

    Read from the module's dictionaries: attribute access would gather the parameter under ZeRO, or compute a parametrization.
    """
    for name in reading.MATRIX_NAMES:
        value = _stored(module, name)
        if isinstance(value, nn.Module):
            value = _stored(value, "weight")
        if isinstance(value, Tensor):
            return value
    return None


def bias_of(module: nn.Module, experts: int) -> Tensor | None:
    """The whole bias of the logits; None if there is none."""
    bias = _stored(module, "bias")
    fits = isinstance(bias, Tensor) and tuple(bias.shape) == (experts,) and not reading.adds_to_scores(module)
    return whole_rows(bias) if fits else None


def _stored(module: nn.Module, name: str) -> Any:
    return next((found for place in _places(module) if (found := dict.get(place, name)) is not None), None)


def _places(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._parameters, module._modules


def local_matrix(weight: Tensor | None) -> Tensor:
    """The part of a weight that this rank has now, possibly all of it.

    Raises:
        MisfitError: It is no matrix, has no data here, or holds terms of a sum.
    """
    local = None if weight is None else local_shard(weight)
    if weight is None or local is None or local.is_meta or local.layout is not torch.strided or attention.is_partial(weight):
        raise reading.MisfitError(reading.NOT_2D)
    if local.dim() != 2 or not local.numel() or not local.is_floating_point():
        raise reading.MisfitError(reading.NOT_2D)
    return local


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: int) -> Tensor | None:
    """The tokens that a router receives: its first tensor of the hidden size."""
    for value in (*args, reading.first_named(kwargs, reading.TOKENS, Tensor)):
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] == hidden and value.is_floating_point():
            return whole_rows(value)
    return None


def call_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> reading.RouterCall:
    """The size of a router's call."""
    experts = reading.rows_for(matrix_of(module), partial(tokens_of, args, kwargs))
    return reading.RouterCall(count_tokens(args, kwargs), experts)


def whole_rows(x: Tensor) -> Tensor | None:
    """The local part of a tensor; None if its last dimension is sharded or its numbers are terms of a sum."""
    local = local_shard(x)
    if local is None or local.is_meta or local.layout is not torch.strided:
        return None
    return None if attention.is_partial(x) or attention.cuts(x, x.dim() - 1) else local


# --- Placement of a weight during its module's forward.


def weight_placement(framework: Framework, rank: int, parameter: NamedParameter, seen: Tensor) -> Placement:
    """The placement of a weight during forward. A weight that is sharded between forwards may be gathered there.

    Args:
        parameter: The weight between forwards.
        seen: The weight now: whole, or the part of this rank.
    """
    said = placement_of(seen)
    if said is not None:
        return said
    kept = framework.placement("param_origin", parameter)
    if kept.shard is None:
        return kept
    if tuple(seen.shape) == kept.shard.global_shape:
        alike = alike_over(rank, [ranks for ranks in (kept.replicas, kept.shard.ranks) if ranks])
        return Placement(replicas=alike, unclaimed=kept.unclaimed, differing=kept.differing)
    if not kept.shard.flat:
        return kept
    # The optimizer steps a run of elements; the forward multiplies with a part of the matrix.
    part = framework.placement("grad_unreduced", parameter)
    return replace(part, partial=False, data_parallel=kept.data_parallel)


choices_of, count_tokens, is_linear = choices.choices_of, choices.count_tokens, choices.is_linear
dtype_of_routing = matrices.dtype_of_routing
entropy_of, entropy_from = matrices.entropy_of, matrices.entropy_from
confirmed, logits_from = choices.confirmed, matrices.logits_from
logit_sums_of, logit_sums_from = matrices.logit_sums_of, matrices.logit_sums_from
norms_of, similarity_of_rows = matrices.norms_of, matrices.similarity_of_rows

__all__ = [
    "activation_of",
    "active_share",
    "beneath",
    "bias_of",
    "choices_of",
    "confirmed",
    "count_tokens",
    "dtype_of_routing",
    "embeds",
    "entropy_from",
    "entropy_of",
    "given_scores",
    "heads_of",
    "is_floating_point",
    "is_linear",
    "last_active",
    "local_matrix",
    "logit_sums_from",
    "logit_sums_of",
    "logits_from",
    "matrix_of",
    "norms_of",
    "searching",
    "similarity_of_rows",
    "spread",
    "summed",
    "tokens_of",
    "unseen",
    "unwrapped",
    "weight_placement",
    "whole_rows",
]

MODE_SENSITIVE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that take another path, with other bits, while a function mode is active."""

_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def is_floating_point(x: Any) -> bool:
    """Whether ``x`` is a floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()


def embeds(module: nn.Module) -> bool:
    """Whether the weight of a module is an embedding table."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers of FSDP and activation checkpointing. Weights are whole there."""
    while (within := next((getattr(module, name) for name in _WRAPPED if name in module._modules), None)) is not None:
        module = within
    return module


def searching(module: nn.Module) -> type[AttentionSearch]:
    """The search for Q and K in a call of the module."""
    closed = any(_is_compiled(one) or isinstance(one, MODE_SENSITIVE) for one in module.modules())
    return ClosedSearch if closed else AttentionSearch


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
