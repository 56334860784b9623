"""PyTorch's implementation of ``monitor.recording.features.reading``: finds queries, keys, weights and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from monitor.coordinator.ownership import alike_over
from monitor.pytorch.features.attention import Scores, spread
from monitor.pytorch.features.matrices import dtype_of_routing, entropy_from, entropy_of, norms_of, similarity_of_rows
from monitor.pytorch.frameworks.dtensor import layout_of, placement_of
from monitor.pytorch.frameworks.framework import Framework
from monitor.recording.features import reading
from monitor.recording.parameter_series import NamedParameter
from monitor.series import Placement
from monitor.stats.torch.tensors import beneath, local_shard, unseen

# --- The tensors of a feature: among a module's arguments, among the calls in its forward, or its weight.

SDPA: Final = torch.nn.functional.scaled_dot_product_attention
PRODUCTS: Final = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})
_SDPA_ARGUMENTS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


def given_scores(args: tuple[Any, ...], kwargs: Mapping[str, Any], order: str) -> Scores | None:
    """Q and K among the arguments of a module, as for Megatron's core attention; None if they are not there.

    Raises:
        MisfitError: They are there, but cannot be read.
    """
    query, key = reading.queries_and_keys(args, kwargs, Tensor)
    if query is None or key is None or query.dim() != 4 or key.dim() != 4:
        return None
    places = reading.places_of(order)
    return _causal(_whole(query, places[2]).permute(places), _whole(key, places[2]).permute(places))


def called_scores(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Scores | None:
    """Q and K in a call of a torch function that computes attention; None for other calls.

    Raises:
        MisfitError: The call computes attention, but cannot be read.
    """
    if func is SDPA:
        return _of_sdpa({**dict(zip(_SDPA_ARGUMENTS, args, strict=False)), **kwargs})
    if func in PRODUCTS and len(args) == 2 and all(isinstance(one, Tensor) and one.dim() == 4 for one in args):
        query, transposed = args
        return _causal(_whole(query, 2), _whole(transposed, 3).transpose(2, 3))
    return None


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
    return whole_rows(bias) if isinstance(bias, Tensor) and tuple(bias.shape) == (experts,) else None


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
    if weight is None or local is None or local.is_meta or local.layout is not torch.strided or _is_partial(weight):
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


def whole_rows(x: Tensor) -> Tensor | None:
    """The local part of a tensor; None if its last dimension is sharded or its numbers are terms of a sum."""
    local = local_shard(x)
    if local is None or local.is_meta or local.layout is not torch.strided or _is_partial(x) or _cuts(x, x.dim() - 1):
        return None
    return local


def _of_sdpa(given: Mapping[str, Any]) -> Scores:
    query, key, mask, scale = (given.get(name) for name in ("query", "key", "attn_mask", "scale"))
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() != 4 or key.dim() != 4:
        raise reading.MisfitError(reading.NO_SCORES)
    if mask is not None and type(mask) is not Tensor and type(mask) is not nn.Parameter:
        raise reading.MisfitError("its mask is of a kind that is not known")
    query, key = _whole(query, 2), _whole(key, 2)
    return _checked(query, key, bool(given.get("is_causal")), query.shape[-1] ** -0.5 if scale is None else float(scale), mask)


def _causal(query: Tensor, key: Tensor) -> Scores:
    if query.shape[2] != key.shape[2]:
        raise reading.MisfitError(reading.OTHER_LENGTHS)
    return _checked(query, key, True, query.shape[-1] ** -0.5, None)


def _checked(query: Tensor, key: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Scores:
    of_numbers = query.is_floating_point() and key.is_floating_point()
    if not of_numbers or not reading.go_together(tuple(query.shape), tuple(key.shape)):
        raise reading.MisfitError(reading.NO_SCORES)
    return Scores(query, key, causal, scale, mask)


def _whole(x: Tensor, sequence: int) -> Tensor:
    """The local part of Q or K. Only heads and rows of the batch may be sharded over ranks."""
    local = None if x.is_nested else local_shard(x)
    if local is None or local.is_meta or not local.numel() or _is_partial(x) or _cuts(x, sequence):
        raise reading.MisfitError(reading.NOT_WHOLE)
    return local


def _cuts(x: Tensor, dim: int) -> bool:
    layout = layout_of(x)
    return layout is not None and any(getattr(one, "dim", None) == dim for one in layout[1])


def _is_partial(x: Tensor) -> bool:
    layout = layout_of(x)
    return layout is not None and any(one.is_partial() for one in layout[1])


# --- The search for attention calls while a module's forward runs.


class AttentionSearch(TorchFunctionMode):
    """Finds the first torch call that computes attention. Forwards every call unchanged.

    Attributes:
        saw: Whether the search has ended.
        reason: Why nothing was found.
    """

    def __init__(self, seen: Callable[[Scores], object], on_misfit: Callable[[str], object]) -> None:
        self.saw = False
        self.reason = reading.NO_SCORES
        self._seen = seen
        self._on_misfit = on_misfit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # In code that is being compiled this is traced, and must have no effect.
        if not torch.compiler.is_compiling() and not self.saw:
            with unseen():  # by the user's modes, which are below this one
                self._look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if self.reason != reading.NO_SCORES and func is not SDPA:
                return  # the product after that of Q and K looks alike
            scores = called_scores(func, args, kwargs)
            if scores is None:
                return
            self.saw = True
            self._seen(scores)
        except reading.MisfitError as misfit:
            if func is not SDPA:  # this product may be another one, and the right one may follow
                self.reason = str(misfit)
                return
            self.saw = True
            self._on_misfit(str(misfit))
        except Exception as error:  # this runs amid the module's own operations
            self.saw = True
            self._on_misfit(f"the monitor failed to read a call in it: {error!r}")

    def enter(self) -> None:
        """Search from now on, until ``leave``."""
        _push_mode(self)

    def leave(self) -> None:
        """End the search and remove this mode, wherever it is on this thread's stack.

        It may not be on top: another monitor's hooks run in the same order after a forward as before it, and an interrupted
        forward may have left modes behind.
        """
        self.saw = True
        above: list[Any] = []
        while torch._C._len_torch_function_stack():
            mode = _pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)


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

MODE_SENSITIVE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that take another path, with other bits, while a function mode is active."""

_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def is_floating_point(x: Any) -> bool:
    """Whether ``x`` is a floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()


def embeds(module: nn.Module) -> bool:
    """Whether the weight of a module is an embedding table."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def is_linear(module: nn.Module) -> bool:
    """Whether a module returns the product with its weight, plus bias, and nothing else."""
    return isinstance(module, nn.Linear)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers of FSDP and activation checkpointing. Weights are whole there."""
    while (within := next((getattr(module, name) for name in _WRAPPED if name in module._modules), None)) is not None:
        module = within
    return module


def searching(module: nn.Module) -> type[AttentionSearch] | None:
    """The search for Q and K in a call of the module; None if the module is opaque."""
    closed = any(_is_compiled(one) or isinstance(one, MODE_SENSITIVE) for one in module.modules())
    return None if closed else AttentionSearch


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
