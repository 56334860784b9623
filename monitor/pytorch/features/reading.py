"""PyTorch's implementation of ``monitor.recording.features.reading``: finds queries, keys, weights and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from monitor.coordinator.ownership import alike_over
from monitor.pytorch.features.matrices import dtype_of_routing, entropy_from, entropy_of, norms_of, similarity_of_rows
from monitor.pytorch.frameworks.dtensor import layout_of, placement_of
from monitor.pytorch.frameworks.framework import Framework
from monitor.recording.attached_model import NamedParameter
from monitor.recording.features import reading
from monitor.recording.features.reading import Spread
from monitor.series import Placement
from monitor.stats.torch.tensors import beneath, local_shard, unseen, working_precision

# --- Entropy and maximum of attention weights, computed block by block, so the whole matrix is never in memory.

BLOCK: Final = 1 << 18
"""Attention weights in a block: 1 MB in float32, which fits a core's cache."""

KEYS: Final = 1024
"""Most keys of a block."""

OUT_OF_SIGHT: Final = -1e4
"""A score this far below the maximum has weight 0, in float64 too. Unlike -Inf it can be multiplied by 0."""


class Scores(NamedTuple):
    """The inputs of attention weights: softmax(query @ key^T * scale + mask).

    Attributes:
        query: Shape ``(batch, heads, queries, size)``.
        key: Shape ``(batch, key heads, keys, size)``: head i has key head ``i // (heads // key heads)``.
        causal: Whether query i sees only the keys up to i.
        mask: Boolean (False where a query does not see a key), or a float that is added to the scores. Its shape broadcasts to
            ``(batch, heads, queries, keys)``.
    """

    query: Tensor
    key: Tensor
    causal: bool
    scale: float
    mask: Tensor | None = None

    def sampled(self, heads: int, rows: int) -> Scores:
        """The first heads of the first rows of the batch; 0 for all of them."""
        batch = max(self.query.shape[0], self.key.shape[0])
        query = self.query.expand(batch, -1, -1, -1)
        of_each = max(1, query.shape[1] // self.key.shape[1])
        heads, rows = min(heads or query.shape[1], query.shape[1]), min(rows or batch, batch)
        mask = self.mask
        if mask is not None:
            mask = mask.expand(batch, query.shape[1], query.shape[2], self.key.shape[2])[:rows, :heads]
        key = self.key.expand(batch, -1, -1, -1)[:rows]
        keys = key.unsqueeze(2).expand(-1, -1, of_each, -1, -1)  # a view: (rows, key heads, heads of each, keys, size)
        return self._replace(query=query[:rows, :heads], key=keys, mask=mask)


def spread(scores: Scores, heads: int = 1, rows: int = 1) -> Spread:
    """Entropy and maximum of the attention weights for a sample of heads and rows of the batch; 0 for all.

    Online softmax, block by block, in float32 at least, summed in float64: memory does not grow with the square of the
    sequence. NaN or Inf in a query or key of the sample makes both sums NaN.
    """
    sample = scores.sampled(heads, rows)
    total = _SpreadSums(sample.query.device)
    for part in _parts(sample):
        for first in range(0, part.query.shape[1], part.queries_at_once):
            _add_queries(part, first, total)
    seen = sample.query.shape[0] * sample.query.shape[1] * sample.query.shape[2] if sample.mask is None else total.seen
    return Spread(seen, total.entropy, total.greatest)


class _HeadBlock(NamedTuple):
    """Some heads of one row of the batch: ``query`` of shape ``(heads, queries, size)``, each with its own ``keys``."""

    query: Tensor
    keys: list[Tensor]
    causal: bool
    scale: float
    mask: Tensor | None
    queries_at_once: int


class _SpreadSums:
    def __init__(self, device: torch.device) -> None:
        self.entropy, self.greatest, self.seen = torch.zeros(3, dtype=torch.float64, device=device)


class _OnlineSoftmax:
    """Running sums of some queries over the keys so far: the greatest score, Σ e^(score - greatest), and Σ (score - greatest)
    e^(score - greatest). Float64, shape ``(heads, queries)``.
    """

    def __init__(self, like: Tensor) -> None:
        self.greatest = torch.full(like.shape[:2], -math.inf, dtype=torch.float64, device=like.device)
        self.total = torch.zeros_like(self.greatest)
        self.weighted = torch.zeros_like(self.greatest)

    def add(self, scores: Tensor) -> None:
        """Take in scores of shape ``(heads, queries, keys)``, which are overwritten."""
        greatest = torch.maximum(self.greatest, scores.amax(-1).double())
        base = torch.where(greatest == -math.inf, 0.0, greatest)
        below = scores.sub_(base.to(scores.dtype).unsqueeze(-1)).clamp_(min=OUT_OF_SIGHT)
        weights = below.exp()
        down = (self.greatest - base).clamp(min=OUT_OF_SIGHT)
        kept = down.exp()
        self.weighted = kept * (self.weighted + self.total * down) + below.mul_(weights).sum(-1).double()
        self.total = kept * self.total + weights.sum(-1).double()
        self.greatest = greatest

    def finish(self, into: _SpreadSums) -> None:
        sees = self.total != 0  # NaN does
        total = torch.where(sees, self.total, 1.0)
        into.entropy += torch.where(sees, total.log() - self.weighted / total, 0.0).sum()
        into.greatest += torch.where(sees, 1.0 / total, 0.0).sum()
        into.seen += sees.sum()


def _parts(sample: Scores) -> Iterator[_HeadBlock]:
    """Blocks of heads, for one row of the batch after the other."""
    queries, keys = sample.query.shape[2], sample.key.shape[3]
    of_each = sample.key.shape[2]
    width = max(1, min(keys, KEYS))
    at_once = max(1, min(queries, BLOCK // width))
    heads = max(1, BLOCK // (width * at_once))
    for row in range(sample.query.shape[0]):
        for first in range(0, sample.query.shape[1], heads):
            chosen = slice(first, first + heads)
            query = sample.query[row, chosen]
            own = [sample.key[row, head // of_each, head % of_each] for head in range(first, first + query.shape[0])]
            mask = None if sample.mask is None else sample.mask[row, chosen]
            yield _HeadBlock(query, own, sample.causal, sample.scale, mask, at_once)


def _add_queries(part: _HeadBlock, first: int, into: _SpreadSums) -> None:
    query = part.query[:, first : first + part.queries_at_once]
    query = query.to(working_precision(query.dtype)) * part.scale
    running, last = _OnlineSoftmax(query), first + query.shape[1]
    keys = part.keys[0].shape[0]
    end = min(keys, last) if part.causal else keys
    unusable = (query * 0).sum().double()
    for begin in range(0, end, KEYS):
        until = min(end, begin + KEYS)
        key = torch.stack([one[begin:until] for one in part.keys]).to(query.dtype)
        scores = torch.bmm(query, key.transpose(1, 2))
        running.add(_masked(scores, part, first, begin))
        unusable += (key * 0).sum()
    running.finish(into)
    into.entropy += unusable  # 0, or NaN
    into.greatest += unusable


def _masked(scores: Tensor, part: _HeadBlock, query: int, key: int) -> Tensor:
    """The scores from this query and this key on, with -Inf where a query does not see a key."""
    _, queries, keys = scores.shape
    if part.mask is not None:
        mask = part.mask[:, query : query + queries, key : key + keys]
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    if part.causal and key + keys - 1 > query:
        rows = torch.arange(query, query + queries, device=scores.device).unsqueeze(1)
        later = torch.arange(key, key + keys, device=scores.device) > rows
        scores = scores.masked_fill_(later, -math.inf)
    return scores


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
