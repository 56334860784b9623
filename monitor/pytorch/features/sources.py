"""Where the numbers of a feature are: in what a module is called with, in what it calls, in its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from monitor.pytorch.features.attention import Scores
from monitor.pytorch.frameworks.dtensor import layout_of
from monitor.recording.features.reading import (
    MATRIX_NAMES,
    NO_SCORES,
    NOT_2D,
    NOT_WHOLE,
    OTHER_LENGTHS,
    TOKENS,
    MisfitError,
    first_named,
    go_together,
    places_of,
    queries_and_keys,
)
from monitor.stats.torch.tensors import local_shard

SDPA: Final = torch.nn.functional.scaled_dot_product_attention
PRODUCTS: Final = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})
_SDPA_ARGUMENTS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


def given_scores(args: tuple[Any, ...], kwargs: Mapping[str, Any], order: str) -> Scores | None:
    """Q and K where a module is called with them, as Megatron's core attention is; None if it is not.

    Raises:
        MisfitError: They are there, and cannot be read as such.
    """
    query, key = queries_and_keys(args, kwargs, Tensor)
    if query is None or key is None or query.dim() != 4 or key.dim() != 4:
        return None
    places = places_of(order)
    return _causal(_whole(query, places[2]).permute(places), _whole(key, places[2]).permute(places))


def called_scores(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Scores | None:
    """Q and K in a call of torch's that an attention is made of; None if it is none.

    Raises:
        MisfitError: It is one, and cannot be read.
    """
    if func is SDPA:
        return _of_sdpa({**dict(zip(_SDPA_ARGUMENTS, args, strict=False)), **kwargs})
    if func in PRODUCTS and len(args) == 2 and all(isinstance(one, Tensor) and one.dim() == 4 for one in args):
        query, transposed = args
        return _causal(_whole(query, 2), _whole(transposed, 3).transpose(2, 3))
    return None


def matrix_of(module: nn.Module) -> Tensor | None:
    """``weight`` or ``wg`` of a module, which may be a layer that has it.

    As it lies there: ZeRO gathers a parameter that is asked for by its name, and a parametrization computes it.
    """
    for name in MATRIX_NAMES:
        value = _lying(module, name)
        if isinstance(value, nn.Module):
            value = _lying(value, "weight")
        if isinstance(value, Tensor):
            return value
    return None


def bias_of(module: nn.Module, experts: int) -> Tensor | None:
    """What is added to logits, whole; None where there is none."""
    bias = _lying(module, "bias")
    return whole_rows(bias) if isinstance(bias, Tensor) and tuple(bias.shape) == (experts,) else None


def _lying(module: nn.Module, name: str) -> Any:
    return next((found for place in _places(module) if (found := dict.get(place, name)) is not None), None)


def _places(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._parameters, module._modules


def local_matrix(weight: Tensor | None) -> Tensor:
    """The part of a weight that this rank has now, which may be all of it.

    Raises:
        MisfitError: It is no matrix, or holds no numbers of its own.
    """
    local = None if weight is None else local_shard(weight)
    if weight is None or local is None or local.is_meta or local.layout is not torch.strided or _is_partial(weight):
        raise MisfitError(NOT_2D)
    if local.dim() != 2 or not local.numel() or not local.is_floating_point():
        raise MisfitError(NOT_2D)
    return local


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: int) -> Tensor | None:
    """What a router is to route: its first tensor of the hidden size."""
    for value in (*args, first_named(kwargs, TOKENS, Tensor)):
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] == hidden and value.is_floating_point():
            return whole_rows(value)
    return None


def whole_rows(x: Tensor) -> Tensor | None:
    """The local part of a tensor, if no row of its last dimension is cut, or a term of a sum; None otherwise."""
    local = local_shard(x)
    if local is None or local.is_meta or local.layout is not torch.strided or _is_partial(x) or _cuts(x, x.dim() - 1):
        return None
    return local


def _of_sdpa(given: Mapping[str, Any]) -> Scores:
    query, key, mask, scale = (given.get(name) for name in ("query", "key", "attn_mask", "scale"))
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() != 4 or key.dim() != 4:
        raise MisfitError(NO_SCORES)
    if mask is not None and type(mask) is not Tensor and type(mask) is not nn.Parameter:
        raise MisfitError("its mask is of a kind that is not known")
    query, key = _whole(query, 2), _whole(key, 2)
    return _checked(query, key, bool(given.get("is_causal")), query.shape[-1] ** -0.5 if scale is None else float(scale), mask)


def _causal(query: Tensor, key: Tensor) -> Scores:
    if query.shape[2] != key.shape[2]:
        raise MisfitError(OTHER_LENGTHS)
    return _checked(query, key, True, query.shape[-1] ** -0.5, None)


def _checked(query: Tensor, key: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Scores:
    of_numbers = query.is_floating_point() and key.is_floating_point()
    if not of_numbers or not go_together(tuple(query.shape), tuple(key.shape)):
        raise MisfitError(NO_SCORES)
    return Scores(query, key, causal, scale, mask)


def _whole(x: Tensor, sequence: int) -> Tensor:
    """The local part of Q or K, whose heads and rows of the batch may be cut over ranks, but nothing else."""
    local = None if x.is_nested else local_shard(x)
    if local is None or local.is_meta or not local.numel() or _is_partial(x) or _cuts(x, sequence):
        raise MisfitError(NOT_WHOLE)
    return local


def _cuts(x: Tensor, dim: int) -> bool:
    layout = layout_of(x)
    return layout is not None and any(getattr(one, "dim", None) == dim for one in layout[1])


def _is_partial(x: Tensor) -> bool:
    layout = layout_of(x)
    return layout is not None and any(one.is_partial() for one in layout[1])
