"""Finds attention among a module's arguments and calls, and sums up its weights block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from monitor.pytorch.features.flex import FLEX, Modification
from monitor.pytorch.frameworks import dtensor
from monitor.pytorch.hooks import between_graphs
from monitor.recording.features import reading
from monitor.stats.torch.tensors import local_shard, unseen, working_precision

# --- Sums over the queries of each head, computed block by block, so the whole matrix is never in memory.

BLOCK: Final = 1 << 18
"""Attention weights in a block on the host: 1 MB in float32, which fits a core's cache."""

DEVICE_BLOCK: Final = 1 << 22
"""The same on a device: 16 MB, which takes few launches."""

KEYS: Final = 1024
"""Most keys of a block on the host; a device has four times as many."""

OUT_OF_SIGHT: Final = -1e4
"""A score this far below the maximum has weight 0, in float64 too. Unlike -Inf it can be multiplied by 0."""


class Source(Protocol):
    """The scores of an attention: what its softmax receives, including masks.

    Attributes:
        measured: The tensor whose shape and dtype a row has.
        shape: Rows of the batch, heads, queries, keys.
        causal: Whether query i sees only the keys up to i.
        floor: A query that has only scores up to this sees no key.
    """

    @property
    def measured(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, int, int, int]: ...
    @property
    def causal(self) -> bool: ...
    @property
    def floor(self) -> float: ...

    def block(self, row: int, heads: slice, queries: slice, keys: slice) -> Tensor:
        """A new tensor of shape ``(heads, queries, keys)``, float32 or wider; -Inf where a query does not see a key."""

    def unusable(self, row: int, heads: slice) -> Tensor:
        """NaN for each head whose inputs have NaN or Inf, else 0; float64, shape ``(heads,)``."""


class Scores(NamedTuple):
    """Scores that are computed from their factors: query @ key^T * scale, modified, + mask.

    Attributes:
        query: Shape ``(batch, heads, queries, size)``.
        key: Shape ``(batch, key heads, keys, size)``: head i has key head ``i // (heads // key heads)``.
        mask: Boolean (False where a query does not see a key), or a float that is added to the scores. Its shape broadcasts to
            ``(batch, heads, queries, keys)``.
        rounded: The dtype to which autocast rounds ``query``, ``key`` and ``mask``; None without it.
        certain: Whether mask and scale are known, not assumed, where they are not those of a call.
    """

    query: Tensor
    key: Tensor
    causal: bool
    scale: float
    mask: Tensor | None = None
    rounded: torch.dtype | None = None
    modification: Modification | None = None
    certain: bool = False

    @property
    def measured(self) -> Tensor:
        return self.query

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when the program changes ``query`` or ``key`` in place."""
        return tuple(one._version for one in (self.query, self.key) if not one.is_inference())

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return max(len(self.query), len(self.key)), self.query.shape[1], self.query.shape[2], self.key.shape[2]

    @property
    def floor(self) -> float:
        return -math.inf if self.mask is None or self.mask.dtype == torch.bool else _least(self.mask.dtype)

    def block(self, row: int, heads: slice, queries: slice, keys: slice) -> Tensor:
        query = self._floats(_row(self.query, row)[heads, queries]) * self.scale
        of_row = _row(self.key, row)
        key = self._floats(torch.stack([of_row[head, keys] for head in self._key_heads(heads)]))
        scores = torch.bmm(query, key.transpose(1, 2))
        if self.modification is not None:
            within = (slice(row, row + 1), heads, queries, keys)
            places = [torch.arange(one.start, one.stop, device=scores.device) for one in within]
            scores = self.modification.apply(scores, places)
        return self._masked(scores, row, heads, queries, keys)

    def unusable(self, row: int, heads: slice) -> Tensor:
        query, of_row = _row(self.query, row)[heads], _row(self.key, row)
        key_heads = self._key_heads(heads)
        keys = _nonfinite(of_row[key_heads[0] : key_heads[-1] + 1])
        return _nonfinite(query) + torch.stack([keys[head - key_heads[0]] for head in key_heads])

    def _floats(self, x: Tensor) -> Tensor:
        x = x if self.rounded is None else x.to(self.rounded)
        return x.to(working_precision(x.dtype))

    def _key_heads(self, heads: slice) -> list[int]:
        of_each = max(1, self.query.shape[1] // self.key.shape[1])
        return [head // of_each for head in range(heads.start, heads.stop)]

    def _masked(self, scores: Tensor, row: int, heads: slice, queries: slice, keys: slice) -> Tensor:
        if self.mask is not None:
            mask = self.mask.expand(self.shape)[row, heads, queries, keys]
            scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(self._floats(mask))
        if self.causal and keys.stop - 1 > queries.start:
            query, key = (torch.arange(one.start, one.stop, device=scores.device) for one in (queries, keys))
            scores = scores.masked_fill_(key > query.unsqueeze(1), -math.inf)
        return scores


class Logits(NamedTuple):
    """Scores that the program computes itself: the input of its softmax, shape ``(batch, heads, queries, keys)``."""

    measured: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, queries, keys = self.measured.shape
        return batch, heads, queries, keys

    @property
    def causal(self) -> bool:
        return False

    @property
    def floor(self) -> float:
        return _least(self.measured.dtype)

    def block(self, row: int, heads: slice, queries: slice, keys: slice) -> Tensor:
        part = self.measured[row, heads, queries, keys]
        return part.to(working_precision(part.dtype), copy=True)

    def unusable(self, row: int, heads: slice) -> Tensor:  # noqa: ARG002
        """Zeros: NaN and Inf among the scores show in the sums themselves."""
        return torch.zeros(len(range(heads.start, heads.stop)), dtype=torch.float64, device=self.measured.device)


def _row(x: Tensor, row: int) -> Tensor:
    return x[min(row, len(x) - 1)]


def _least(dtype: torch.dtype) -> float:
    """Half of the least number of a dtype. Masks add the least number, which a score may raise a little."""
    return torch.finfo(dtype).min / 2


def _nonfinite(x: Tensor) -> Tensor:
    """NaN for each part along the first dimension that has NaN or Inf, else 0. Makes no temporary of the size of ``x``."""
    least, greatest = x.amin((1, 2)), x.amax((1, 2))
    return (least - least).double() + (greatest - greatest).double()


def spread(scores: Source, heads: int = 1, rows: int = 1, sinks: int = 1, bound: float = math.inf) -> reading.Spread:
    """Sums over the queries of each head, for a sample of heads and rows of the batch; 0 for all.

    Online softmax, block by block, in float32 at least, summed in float64: memory does not grow with the square of the
    sequence. NaN or Inf in a query or key of a head makes its sums NaN.

    Args:
        sinks: The number of first keys that are attention sinks.
        bound: The greatest score beyond which a head counts as above it.

    Returns:
        Tensors with one element for each head.
    """
    of_batch, of_heads, queries, keys = scores.shape
    heads, rows = min(heads or of_heads, of_heads), min(rows or of_batch, of_batch)
    total = _HeadSums(heads, scores.measured.device)
    for chosen, at_once, width in _parts(heads, queries, keys, scores.measured.device):
        for row in range(rows):
            unusable = scores.unusable(row, chosen)
            for first in range(0, queries, at_once):
                some = slice(first, min(first + at_once, queries))
                _scan(scores, row, chosen, some, width, sinks).finish(total, chosen, scores.floor)
            total.spoil(chosen, unusable)
    return total.spread(bound)


def summed(found: reading.Spread, heads: int = 0) -> reading.Spread:
    """The sums of the first heads, as tensors of one element; 0 for all heads."""
    first = reading.Spread(*(one[: heads or None] for one in found))
    return reading.Spread(*(one.sum() for one in first))._replace(logit=first.logit.amax())


def heads_of(found: reading.Spread) -> list[reading.Spread]:
    """The sums of each head."""
    columns = [one.tolist() if one.is_cpu else one.unbind() for one in found]
    return [reading.Spread(*one) for one in zip(*columns, strict=True)]


def _parts(heads: int, queries: int, keys: int, device: torch.device) -> Iterator[tuple[slice, int, int]]:
    """Runs of heads, and how many queries and keys of them make up a block."""
    block, most = (BLOCK, KEYS) if device.type == "cpu" else (DEVICE_BLOCK, 4 * KEYS)
    width = max(1, min(keys, most))
    at_once = max(1, min(queries, block // width))
    step = max(1, block // (width * at_once))
    for first in range(0, heads, step):
        yield slice(first, min(first + step, heads)), at_once, width


def _scan(scores: Source, row: int, heads: slice, queries: slice, width: int, sinks: int) -> _OnlineSoftmax:
    """The softmax of some queries over all the keys that they see."""
    end = min(scores.shape[3], queries.stop) if scores.causal else scores.shape[3]
    running: _OnlineSoftmax | None = None
    for begin in range(0, end, width):
        part = scores.block(row, heads, queries, slice(begin, min(end, begin + width)))
        running = running or _OnlineSoftmax(part)
        running.add(part, max(0, min(sinks - begin, part.shape[2])))
    assert running is not None
    return running


class _HeadSums:
    """The sums of ``reading.Spread``, one for each head; float64."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.queries, self.entropy, self.greatest, self.sink_queries, self.sink = torch.zeros(
            (5, heads), dtype=torch.float64, device=device
        )
        self.logit = torch.full_like(self.sink, -math.inf)

    def spoil(self, heads: slice, unusable: Tensor) -> None:
        """Make the sums NaN where ``unusable`` is NaN."""
        for one in (self.entropy, self.greatest, self.sink, self.logit):
            one[heads] += unusable

    def spread(self, bound: float) -> reading.Spread:
        above, each = (self.logit > bound).double(), torch.ones_like(self.sink)
        return reading.Spread(self.queries, self.entropy, self.greatest, self.logit, self.sink_queries, self.sink, each, above)


class _OnlineSoftmax:
    """Running sums of some queries over the keys so far. Float64, shape ``(heads, queries)``.

    Attributes:
        first: The greatest score of a sink.
        others: The greatest score of another key.
        total: Σ e^(score - greatest).
        weighted: Σ (score - greatest) e^(score - greatest).
        sink: The part of ``total`` that belongs to sinks.
    """

    def __init__(self, like: Tensor) -> None:
        self.first = torch.full(like.shape[:2], -math.inf, dtype=torch.float64, device=like.device)
        self.others, self.total = self.first.clone(), torch.zeros_like(self.first)
        self.weighted, self.sink = torch.zeros_like(self.first), torch.zeros_like(self.first)

    @property
    def greatest(self) -> Tensor:
        return torch.maximum(self.first, self.others)

    def add(self, scores: Tensor, sinks: int) -> None:
        """Take in scores of shape ``(heads, queries, keys)``, which are overwritten.

        Args:
            sinks: How many of the first keys are sinks.
        """
        before = self.greatest
        if sinks:
            self.first = torch.maximum(self.first, scores[..., :sinks].amax(-1).double())
        if sinks < scores.shape[2]:
            self.others = torch.maximum(self.others, scores[..., sinks:].amax(-1).double())
        greatest = self.greatest
        base = torch.where(greatest == -math.inf, 0.0, greatest)
        below = scores.sub_(base.to(scores.dtype).unsqueeze(-1)).clamp_(min=OUT_OF_SIGHT)
        weights = below.exp()
        down = (before - base).clamp(min=OUT_OF_SIGHT)
        kept = down.exp()
        self.sink = kept * self.sink
        if sinks:
            self.sink += weights[..., :sinks].sum(-1).double()
        self.weighted = kept * (self.weighted + self.total * down) + below.mul_(weights).sum(-1).double()
        self.total = kept * self.total + weights.sum(-1).double()

    def finish(self, into: _HeadSums, heads: slice, floor: float) -> None:
        greatest = self.greatest
        sees = ~(greatest <= floor)  # NaN does
        total = torch.where(sees, self.total, 1.0)
        spoilt = torch.where(sees, greatest - greatest, 0.0)  # NaN where a score is NaN or Inf
        into.queries[heads] += sees.sum(-1)
        into.entropy[heads] += (torch.where(sees, total.log() - self.weighted / total, 0.0) + spoilt).sum(-1)
        into.greatest[heads] += (torch.where(sees, 1.0 / total, 0.0) + spoilt).sum(-1)
        into.logit[heads] = torch.maximum(into.logit[heads], torch.where(sees, greatest, -math.inf).amax(-1))
        hidden = (greatest + reading.MASKED).clamp(min=floor)
        sees_both = ~(self.first <= hidden) & ~(self.others <= hidden)
        into.sink_queries[heads] += sees_both.sum(-1)
        into.sink[heads] += (torch.where(sees_both, self.sink / total, 0.0) + spoilt).sum(-1)


# --- Attention in the arguments of a module, and in a call of a torch function.

SDPA: Final = torch.nn.functional.scaled_dot_product_attention
PRODUCTS: Final = frozenset(
    {
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__),
        *(torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_),
    }
)
SOFTMAXES: Final = frozenset({torch.softmax, Tensor.softmax, torch.nn.functional.softmax, torch.special.softmax})
ATTENDING: Final = frozenset(
    {
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "baddbmm_", "einsum", "tensordot"),
        *("softmax", "_softmax", "log_softmax", "sigmoid", "sigmoid_", "exp", "exp_", "multi_head_attention_forward"),
    }
)
"""Names of functions with which a program may compute an attention itself."""
LAYERS: Final = frozenset({"linear", "conv1d", "conv2d", "layer_norm", "rms_norm", "normalize"})
"""Names of functions that may make Q and K from other tensors."""

SDPA_ARGUMENTS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
Shapes = set[tuple[int, int, int]]
"""Matrices, queries and keys of products."""


def given_scores(args: tuple[Any, ...], kwargs: Mapping[str, Any], order: str) -> Scores | None:
    """Q and K among the arguments of a module, as for Megatron's core attention; None if they are not there.

    Raises:
        MisfitError: They are there, but cannot be read.
    """
    query, key = reading.queries_and_keys(args, kwargs, Tensor)
    if query is None or key is None or query.dim() != 4 or key.dim() != 4:
        return None
    certain, places = reading.says_causal(kwargs), reading.places_of(order)
    query, key = (_whole(one, (places[2],)).detach().permute(places) for one in (query, key))
    if query.shape[2] != key.shape[2]:
        raise reading.MisfitError(reading.OTHER_LENGTHS)
    return _checked(Scores(query, key, True, query.shape[-1] ** -0.5, certain=certain))


def called_scores(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], products: Shapes) -> Source | None:
    """The scores in a call of a torch function that computes attention; None for other calls.

    Args:
        products: The shapes of the products so far.

    Raises:
        MisfitError: The call computes attention, but cannot be read.
    """
    if func is SDPA:
        return _of_sdpa({**dict(zip(SDPA_ARGUMENTS, args, strict=False)), **kwargs})
    if func in SOFTMAXES:
        return _of_softmax(args, kwargs, products)
    if getattr(func, "__name__", "") == FLEX and isinstance(func, torch._ops.HigherOrderOperator):
        return _of_flex(*args)
    return None


def _of_sdpa(given: Mapping[str, Any]) -> Scores:
    query, key, mask, scale = (given.get(name) for name in ("query", "key", "attn_mask", "scale"))
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.dim() != 4 or key.dim() != 4:
        raise reading.MisfitError(reading.NO_SCORES)
    if mask is not None and type(mask) is not Tensor and type(mask) is not nn.Parameter:
        raise reading.MisfitError("its mask is of a kind that is not known")
    query, key = _whole(query, (2,)), _whole(key, (2,))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return _checked(Scores(query, key, bool(given.get("is_causal")), scale, mask, _autocast(query)))


def _of_softmax(args: tuple[Any, ...], kwargs: Mapping[str, Any], products: Shapes) -> Logits | None:
    scores = args[0] if args else kwargs.get("input")
    over = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(scores, Tensor) or scores.dim() != 4 or over not in (-1, 3) or _shape_of(scores) not in products:
        return None
    return Logits(_whole(scores, (2, 3)))


def _is_weight(factor: Tensor, product: Tensor) -> bool:
    """Whether a factor is a parameter or a part of one, or does not have the batch of the product."""
    if isinstance(factor, nn.Parameter) or isinstance(factor._base, nn.Parameter):
        return True
    return factor.dim() != product.dim() or len(factor) != len(product)


def _shape_of(x: Tensor) -> tuple[int, int, int]:
    return math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1]


def _of_flex(query: Tensor, key: Tensor, _value: Any, score: Any, block_mask: Any, scale: float, *more: Any) -> Scores:
    """The arguments of the operator that ``flex_attention`` calls."""
    if not hasattr(torch._C, "_EnableTorchFunction"):
        raise reading.MisfitError("this version of torch cannot evaluate its score_mod")
    _options, read_by_score, read_by_mask = (*more, (), ())[:3] if more else ({}, (), ())
    modification = Modification(score, block_mask[-1], tuple(read_by_score), tuple(read_by_mask))
    query, key = _whole(query, (2,)), _whole(key, (2,))
    return _checked(Scores(query, key, False, float(scale), None, _autocast(query), modification))


def _autocast(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast rounds the factors of an attention on the device of ``x``."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _checked(scores: Scores) -> Scores:
    query, key = scores.query, scores.key
    of_numbers = query.is_floating_point() and key.is_floating_point()
    if not of_numbers or not reading.go_together(tuple(query.shape), tuple(key.shape)):
        raise reading.MisfitError(reading.NO_SCORES)
    return scores


def _whole(x: Tensor, sequence: tuple[int, ...]) -> Tensor:
    """The local part of a tensor of an attention. Only heads and rows of the batch may be sharded over ranks."""
    local = None if x.is_nested else local_shard(x)
    if local is None or local.is_meta or not local.numel() or is_partial(x) or any(cuts(x, dim) for dim in sequence):
        raise reading.MisfitError(reading.NOT_WHOLE)
    return local


def cuts(x: Tensor, dim: int) -> bool:
    """Whether a tensor is sharded over ranks along a dimension."""
    layout = dtensor.layout_of(x)
    return layout is not None and any(getattr(one, "dim", None) == dim for one in layout[1])


def is_partial(x: Tensor) -> bool:
    """Whether a tensor holds terms of a sum over ranks."""
    layout = dtensor.layout_of(x)
    return layout is not None and any(one.is_partial() for one in layout[1])


# --- The search for attention calls while a module's forward runs.


BETWEEN_GRAPHS: Final = (
    "it is called between graphs of torch.compile: it is the compiled module itself, a graph breaks in it, or torch no longer "
    "compiles what calls it"
)


class AttentionSearch(TorchFunctionMode):
    """Finds the first torch call that computes attention. Forwards every call unchanged.

    After a softmax it searches on, because a second one shows that the first may be a part of the attention.

    Attributes:
        saw: Whether the search has ended.
        found: What ``measure`` computed, and a tensor with the shape, dtype and device of the measured one.
    """

    def __init__(self, measure: Callable[[Source], reading.Spread | None], on_misfit: Callable[[str], object]) -> None:
        self.saw = False
        self.found: tuple[reading.Spread, Tensor] | None = None
        self._products: Shapes = set()
        self._called: set[str] = set()
        self._measure = measure
        self._on_misfit = on_misfit

    @property
    def opaque(self) -> bool:
        """Whether no call so far is a part of an attention, or makes Q and K."""
        return not self._called

    @property
    def reason(self) -> str:
        """Why nothing was found."""
        return reading.NO_SOFTMAX if self._called & ATTENDING else reading.NO_SCORES

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # In code that is being compiled this is traced, and must have no effect.
        if torch.compiler.is_compiling() or self.saw:
            return func(*args, **(kwargs or {}))
        with unseen():  # by the user's modes, which are below this one
            self._look(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS and isinstance(result, Tensor):
            with unseen():
                self._note(result, args, kwargs or {})
        return result

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            name = getattr(func, "__name__", "").partition(".")[0]  # an overload's is `bmm.default`
            if name in ATTENDING or name in LAYERS:
                self._called.add(name)
            scores = called_scores(func, args, kwargs, self._products)
            if scores is not None:
                self._take(scores)
        except reading.MisfitError as misfit:
            self._end(str(misfit))
        except Exception as error:  # this runs amid the module's own operations
            self._end(f"the monitor failed to read a call in it: {error!r}")

    def _take(self, scores: Source) -> None:
        if self.found is not None:
            raise reading.MisfitError(reading.SEVERAL)
        numbers, x = self._measure(scores), scores.measured
        self.saw = numbers is None or not isinstance(scores, Logits)
        # One element, so that the scores are not kept in memory until the module returns.
        self.found = None if numbers is None else (numbers, torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape))

    def _end(self, misfit: str) -> None:
        self.saw, self.found = True, None
        self._on_misfit(misfit)

    def _note(self, product: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = (*args, *(value for name, value in kwargs.items() if name != "out"))
        factors = [one for one in given if isinstance(one, Tensor)][-2:]
        if product.dim() in (3, 4) and not any(_is_weight(one, product) for one in factors):
            self._products.add(_shape_of(product))

    def enter(self) -> None:
        """Search from now on, until ``leave``."""
        if between_graphs():
            self._end(BETWEEN_GRAPHS)
        else:
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


class ClosedSearch(AttentionSearch):
    """The search in a module whose calls cannot be observed, or must not be. It finds nothing."""

    @property
    def opaque(self) -> bool:
        """False, since what the module computes is unknown."""
        return False

    def enter(self) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""


class AttentionCall(NamedTuple):
    """A call that compiled code has made.

    Attributes:
        rounded: The dtype of autocast during the call; None without it.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rounded: torch.dtype | None


class ReplayedSearch(ClosedSearch):
    """The search in calls that compiled code has made.

    Args:
        calls: Those that may compute attention.
        named: The names of other calls that may be parts of one.
        hidden: Why some calls were not seen; empty if all were.
    """

    def __init__(
        self,
        calls: Sequence[AttentionCall],
        named: Iterable[str],
        hidden: str,
        *asked: Callable[..., Any],
    ) -> None:
        super().__init__(*asked)
        self._calls, self._hidden = calls, hidden
        self._called.update(named)

    @property
    def opaque(self) -> bool:
        """As of a search in eager code."""
        return not self._called

    def enter(self) -> None:
        """Look at all calls."""
        if self._hidden:
            self._end(self._hidden)
        for function, args, kwargs, rounded in self._calls:
            if self.saw:
                return
            if function in SOFTMAXES:
                self._products.add(_shape_of(args[0]))
            x = args[0] if args else kwargs["query"]
            with torch.autocast(x.device.type, rounded, enabled=rounded is not None):
                self._look(function, args, dict(kwargs))
