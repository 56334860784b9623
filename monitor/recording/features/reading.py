"""The interface through which a framework computes features, and the sums that make up a feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import ceil, gcd, prod
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from monitor.recording.attached_model import NamedParameter
from monitor.series import Placement

# --- Argument names where features are searched, and reasons why a module has none.

T = TypeVar("T")

Q_NAMES: Final = ("query", "query_layer", "q")
K_NAMES: Final = ("key", "key_layer", "k")
TOKENS: Final = ("input", "hidden_states", "x")
MATRIX_NAMES: Final = ("weight", "wg")

CHANGED_THERE: Final = "it changes its arguments in place in compiled code"
SHARDED_THERE: Final = "its tensors in compiled code are sharded, or it returns none"
NO_SCORES: Final = "no Q and K were found"
NO_SOFTMAX: Final = "no softmax over the product of its Q and K was found"
NOT_CAUSAL: Final = "its Q and K are arguments, and its mask is not causal"
NOT_OPAQUE: Final = "its Q and K are arguments, and it computes with them in a way that is not known"
SEVERAL: Final = "it has several softmaxes over products, perhaps parts of one attention; name the module of one attention"
PART_OF_QUERIES: Final = "its scores are those of a part of its tokens"
OTHER_LENGTHS: Final = "Q and K have different lengths"
NOT_WHOLE: Final = "its Q and K are split over ranks along the sequence, are nested, or have no elements"
NOT_2D: Final = "it has no floating-point 2-D weight that this rank can read in forward"
NO_LOGITS: Final = "its logits were not found"
ONE_EXPERT: Final = "it has fewer than two experts"
NOT_CALLED: Final = "it was not called in training mode, or is compiled"
NO_OUTPUT: Final = "its output has no floating-point tensor with channels"
CAPTURED: Final = "it is called while a graph of the device is captured"
NO_ELEMENTS: Final = "its output has no elements, or they are not in memory"
CHANNELS_SPLIT: Final = "its output is nested, its channels are split over ranks, or its numbers are terms of a sum or absent"


PADDED: Final = "it pads the tokens of each expert to its capacity, so that its map does not show what it chose"
NO_CHOICE: Final = "it returns neither the indices of the chosen experts nor logits with a top_k"
ANOTHER_CHOICE: Final = "it returns one tensor, and may choose other experts than the greatest in it"
NOT_WHOLE_CHOICE: Final = "what it chose is split over ranks"
UNCLEAR_CHOICE: Final = "its result may be numbers of experts, or a map of them"
OTHER_MAP: Final = "its map does not have a number for each token and expert, experts last"
UNKNOWN_EXPERTS: Final = "it returns numbers of experts, and its number of experts is unknown"
PART_OF_CHOICE: Final = "it returns only a part of what it chose"

SEVERAL_CHOICES: Final = "it returns several integer tensors, and it is unknown which one holds the chosen experts"

CAPACITY_NAMES: Final = ("capacity", "capacity_factor", "expert_capacity", "moe_expert_capacity_factor")
"""A router with one of these, not None, refuses assignments beyond the capacity of an expert."""

PART_NAMES: Final = ("second_expert_policy",)
"""Attributes of routers that return a map of their first choice alone."""

SCORE_NAMES: Final = ("score_func", "scoring_func", "score_function")
"""With one of these, a ``bias`` may be added to the scores of experts, after the logits."""

CORRECTION_NAMES: Final = ("e_score_correction_bias", "expert_bias", "correction_bias")
"""With one of these, even if it is None, ``bias`` belongs to the logits."""


class MisfitError(Exception):
    """A module does not have the feature of its hook. The message gives the reason."""


class NotARouterError(MisfitError):
    """The result of a module does not show which experts were chosen."""


def queries_and_keys(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type[T]) -> tuple[T | None, T | None]:
    """Q and K among the arguments of a module: by name, else the first positional tensors."""
    found = first_named(kwargs, Q_NAMES, kind), first_named(kwargs, K_NAMES, kind)
    tensors = [value for value in args if isinstance(value, kind)]
    query, key = (named if named is not None else (tensors.pop(0) if tensors else None) for named in found)
    return query, key


def says_causal(kwargs: Mapping[str, Any]) -> bool:
    """Whether a core attention is called with the type of a causal mask, as Megatron's is; False if nothing is said.

    Raises:
        MisfitError: It is called with the type of another mask.
    """
    given = kwargs.get("attn_mask_type")
    name = getattr(given, "name", given)
    if not isinstance(name, str):
        return False
    if "causal" not in name:
        raise MisfitError(NOT_CAUSAL)
    return True


def first_named(kwargs: Mapping[str, Any], names: tuple[str, ...], kind: type[T]) -> T | None:
    """The first keyword argument of type ``kind`` that has one of the names."""
    return next((kwargs[name] for name in names if isinstance(kwargs.get(name), kind)), None)


def attribute_of(module: Any, name: str) -> Any:
    """An attribute of a module, or of its configuration; None without it."""
    value = getattr(module, name, None)
    return getattr(getattr(module, "config", None), name, None) if value is None else value


def number_of(module: Any, names: tuple[str, ...]) -> int | None:
    """The first attribute of a module, or of its configuration, that is an integer."""
    found = (attribute_of(module, name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def expert_indices(indices: Sequence[Any], top: int | None) -> Any:
    """The tensor that holds the chosen experts: of several integer tensors, the one whose last dimension is ``top``.

    Raises:
        NotARouterError: Not exactly one tensor fits.
    """
    fitting = [one for one in indices if top is not None and one.shape[-1] == top] if len(indices) > 1 else indices
    if len(fitting) != 1:
        raise NotARouterError(SEVERAL_CHOICES)
    return fitting[0]


def adds_to_scores(module: Any) -> bool:
    """Whether a router may add its ``bias`` to scores instead of logits."""
    return not has_correction(module) and any(getattr(module, name, None) is not None for name in SCORE_NAMES)


def has_correction(module: Any) -> bool:
    """Whether a router has another name than ``bias`` for what it adds to scores."""
    return any(hasattr(module, name) for name in CORRECTION_NAMES)


def rows_for(weight: Any, tokens_of: Callable[[int], Any]) -> int | None:
    """The number of experts by the weight of a router, with a row for each; None if tokens do not fit the weight.

    Args:
        tokens_of: Finds the tokens of a hidden size.
    """
    fits = weight is not None and len(weight.shape) == 2 and tokens_of(weight.shape[1]) is not None
    return int(weight.shape[0]) if fits else None


def places_of(order: str) -> tuple[int, ...]:
    """The dimensions of batch, heads, sequence and head size in Q and K.

    Args:
        order: ``sa_order``, such as ``s,b,h,d``.
    """
    return tuple(order.replace(",", "").index(letter) for letter in "bhsd")


def go_together(query: tuple[int, ...], key: tuple[int, ...]) -> bool:
    """Whether shapes (batch, heads, sequence, size) fit a Q and a K: the same size and batch, and heads in groups."""
    of_one_batch = query[0] == key[0] or 1 in (query[0], key[0])
    return query[3] == key[3] and of_one_batch and not query[1] % key[1]


def of_all_queries(given: tuple[int, ...], batch: int, queries: int) -> bool:
    """False if the scores of an attention leave out tokens of an argument of its module.

    Args:
        given: The shape of the argument. Its last dimension is the channels; the order of the others is unknown.
        batch: Rows of the batch of the scores.
    """
    others = list(given[:-1])
    if batch not in others:
        return True  # the module has reshaped its tokens, as into windows
    others.remove(batch)
    return queries in others or queries > max(others)


# --- Features as sums, so that calls and ranks can be added. Numbers stay on their device, as tensors with one element.

Number = Any
"""A number, or a tensor with one element."""


MASKED: Final = -9e3
"""A score this far below the greatest of its query belongs to a key that the query does not see: masks add -1e4 or less."""


OTHER_CHOICE_NAMES: Final = ("e_score_correction_bias", "expert_bias", "correction_bias", "num_group", "n_group", "topk_group")
"""A router with one of these does not choose the greatest logits."""

LEAST_TOLERANCE: Final = 1e-3
"""Relative difference of two products in float32 on a device that rounds their factors to TF32: of a router's logits and those
that are computed."""

MOST_TOLERANCE: Final = 0.1
"""The same of scores, which are computed from logits."""


class Spread(NamedTuple):
    """Sums over the queries of an attention, of one head or of several. Or arrays of these sums, with an element for each head.

    Attributes:
        queries: Number of queries, without those that see no key.
        entropy: Sum of the entropies of each query's attention weights, in nats.
        greatest: Sum of each query's largest attention weight.
        logit: The greatest score.
        sink_queries: Number of queries that see an attention sink (one of the first keys) and another key.
        sink: Sum of the weights of these queries on the sinks.
        heads: Number of heads.
        above: Number of heads whose greatest score is above the bound.
    """

    queries: Number
    entropy: Number
    greatest: Number
    logit: Number
    sink_queries: Number
    sink: Number
    heads: Number
    above: Number


class Norms(NamedTuple):
    """Norms of a matrix: the square of the Frobenius norm, and a lower estimate of the spectral norm.

    Attributes:
        matrices: 1 if the estimate is certain; 2 if not, and the row then has no spectral norm.
    """

    squares: Number
    spectral: Number
    matrices: Number


class Similarity(NamedTuple):
    """The number of ordered pairs of two different rows of a matrix, and the sum of their cosines."""

    pairs: int
    cosines: Number


class Routing(NamedTuple):
    """The number of tokens, and the sum of the entropies of their softmax over the experts, in nats."""

    tokens: Number
    entropy: Number


class Logits(NamedTuple):
    """The number of tokens, the sum of the squares of log Σ exp(logit) over the experts of each, and the greatest logit."""

    tokens: Number
    squares: Number
    greatest: Number


class RouterCall(NamedTuple):
    """The size of a router's call, which distinguishes maps of experts from numbers of experts. None if it is unknown.

    Attributes:
        tokens: Number of tokens.
        top: Number of experts that are chosen for a token.
        picks_greatest: Whether the router is known to choose the greatest of logits that it returns alone.
    """

    tokens: int | None = None
    experts: int | None = None
    top: int | None = None
    picks_greatest: bool = False

    def check_map(self, shapes: Sequence[tuple[int, ...]], integers: Sequence[tuple[int, ...]]) -> None:
        """Raise ``NotARouterError`` unless a result has one tensor of booleans, and it is a map with experts last.

        Args:
            shapes: The shapes of the tensors of booleans.
            integers: Those of the tensors of integers. A mask of these, or of padding, is no map.
        """
        shape = shapes[-1]
        experts = self.experts in (None, shape[-1])
        if len(shape) < 2 or not experts or self.tokens not in (None, prod(shape[:-1])):
            raise NotARouterError(OTHER_MAP)
        if len(shapes) > 1 or shape in integers or (integers and None in (self.experts, self.tokens)):
            raise NotARouterError(UNCLEAR_CHOICE)

    def is_map(self, shape: tuple[int, ...]) -> bool:
        """Whether integers of this shape are a map, with a 0 for experts that were not chosen, or the numbers of all experts.
        Otherwise they are numbers of experts, for each token as many.

        Raises:
            NotARouterError: They are neither, or may be both.
        """
        if len(shape) > 1 and shape[-1] == self.experts != self.top:
            if self.tokens is None:
                raise NotARouterError(UNCLEAR_CHOICE)
            if prod(shape[:-1]) == self.tokens:
                if self.top is None and self.experts == 2:  # 0 and 1, in any order, are also the numbers of both
                    raise NotARouterError(UNCLEAR_CHOICE)
                return True
        if not (self._are_of_tokens(shape) if self.top is None else self._are_of_top(shape, self.top)):
            raise NotARouterError(UNCLEAR_CHOICE)
        return False

    def _are_of_top(self, shape: tuple[int, ...], top: int) -> bool:
        """Whether integers of this shape are the numbers of ``top`` experts for each token."""
        if len(shape) > 1 and shape[-1] == top:
            return self.tokens in (None, prod(shape[:-1]))
        if len(shape) > 1 and top > 1:
            return False
        # A vector with an element for each expert may be the number of tokens of each.
        counts = shape == (self.experts,)
        return not counts and (top == 1 if self.tokens is None else prod(shape) == self.tokens * top)

    def _are_of_tokens(self, shape: tuple[int, ...]) -> bool:
        """The same for an unknown ``top``. Where experts choose tokens, integers have a row or column for each expert."""
        if self.tokens is None or prod(shape) == self.tokens:
            return self.experts not in shape
        return len(shape) > 1 and prod(shape[:-1]) == self.tokens and shape[-2] != self.experts


class Choices(NamedTuple):
    """What a router chose in a call.

    Attributes:
        counts: Assignments to each expert, shape ``(experts,)``, without those that a capacity refused.
        total: Their sum.
        dropped: Assignments that a capacity refused; None if the router does not show them.
        shown: Whether every refused assignment is one of ``dropped``. Otherwise 0 says nothing: a router may keep the number of
            an expert and give it the weight 0.
    """

    counts: Any
    total: Number
    dropped: Number | None
    shown: bool = True


class Activation(NamedTuple):
    """What a forward shows of a module's output, whose last dimension is the channels and whose others are the tokens.

    NaN or Inf in the output makes all sums and ratios NaN.

    Attributes:
        tokens: The number of tokens.
        norms: The sum of the Euclidean norms of the tokens.
        ratio: The largest magnitude over the median magnitude of sampled elements; -Inf if the median is 0.
        channel: The channel of the largest magnitude.
        channel_squared: Its square.
        rank: The effective rank of sampled tokens (``TOKENS_AT_MOST``): T² / Σ cos²(x_i, x_j) over all pairs of the T tokens
            that are not 0. -Inf if there are fewer than two of these, or one channel.
        seen: For each channel whether it was active (``QUIET``), and last, whether the output has NaN or Inf. An array of the
            framework with one dimension, on the device of the output.
    """

    tokens: int
    norms: Number
    ratio: Number
    channel: Number
    channel_squared: Number
    rank: Number
    seen: Any


ELEMENTS_AT_MOST: Final = 1 << 14
"""Elements of which quantiles of the magnitudes are taken."""

TOKENS_AT_MOST: Final = 64
"""Tokens of which the effective rank is taken."""

TYPICAL: Final = 0.9
"""The quantile of the magnitudes with which units are compared. A mean would be that of massive activations, and a median that
of dead units."""

QUIET: Final = 0.01
"""A unit is active in a forward if its magnitude exceeds this times the typical one in any token."""


def distance_of_elements(elements: int, channels: int) -> int:
    """The distance of sampled elements, which are at most ``ELEMENTS_AT_MOST``. It has no factor in common with the number of
    channels, so all channels are sampled alike.
    """
    distance = -(-elements // ELEMENTS_AT_MOST)
    while gcd(distance, channels) > 1:
        distance += 1
    return distance


def distance_of_tokens(tokens: int) -> int:
    """The distance of sampled tokens, which are at most ``TOKENS_AT_MOST``."""
    return -(-tokens // TOKENS_AT_MOST)


def rank_of_quantile(elements: int, quantile: float) -> int:
    """Which of the elements is the quantile, counted from 1 in ascending order: the lower one of two."""
    return max(1, ceil(elements * quantile))


class Search(Protocol):
    """A search for Q and K in the calls that a module makes.

    Attributes:
        saw: Whether the search has ended.
        found: What was computed from the scores, and a tensor with the shape, dtype and device of a row; None if nothing.
        opaque: Whether the calls so far may all be those of a module that passes its Q and K to an unknown kernel.
        reason: Why Q and K were not found, if they were not.
    """

    saw: bool
    found: tuple[Spread, Any] | None

    @property
    def opaque(self) -> bool: ...
    @property
    def reason(self) -> str: ...

    def enter(self) -> None:
        """Start the search, which lasts until ``leave``."""

    def leave(self) -> None:
        """End the search."""


class FeatureReading(Protocol):
    """Reads the tensors of features and computes their sums. Raises ``MisfitError`` if a tensor does not fit its feature."""

    def unseen(self) -> AbstractContextManager[object]:
        """A context for calls that the user's own hooks and modes must not observe."""

    def beneath(self) -> AbstractContextManager[object]:
        """A context for computations without autograd and autocast."""

    def is_floating_point(self, x: Any) -> bool:
        """Whether ``x`` is a tensor of floating-point numbers."""

    def embeds(self, module: Any) -> bool:
        """Whether the weight of a module is an embedding table."""

    def is_linear(self, module: Any) -> bool:
        """Whether a module returns exactly the product with its weight."""

    def unwrapped(self, module: Any) -> Any:
        """The module inside its wrappers, where weights are whole."""

    def weight_placement(self, framework: Any, rank: int, parameter: NamedParameter, seen: Any) -> Placement:
        """The placement of a weight as it is in forward (``seen``)."""

    def given_scores(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], order: str) -> Any:
        """Q and K, if they are arguments of the module; else None.

        Their ``measured`` is the tensor whose shape a row has. If there is a search, they also say whether their mask is
        ``certain``, and their ``version``, which changes with the numbers.
        """

    def searching(self, module: Any) -> Callable[[Callable[[Any], Spread | None], Callable[[str], object]], Search] | None:
        """Creates searches in calls of the module; None if the framework shows no calls.

        A search takes two callbacks: one computes sums from Q and K, the other receives the reason why they do not fit.
        """

    def spread(self, scores: Any, heads: int, rows: int, sinks: int, bound: float) -> Spread:
        """Sums over the queries of each head, for a sample of heads and rows of the batch (0: all), as arrays.

        Args:
            sinks: The number of first keys that are attention sinks.
            bound: The greatest score beyond which a head counts as above it.
        """

    def summed(self, found: Spread, heads: int) -> Spread:
        """The sums of the first heads; 0 for all."""

    def heads_of(self, found: Spread) -> Sequence[Spread]:
        """The sums of each head."""

    def matrix_of(self, module: Any) -> Any:
        """The attribute ``weight`` or ``wg`` of a module, unchanged; None if it has neither."""

    def local_matrix(self, weight: Any) -> Any:
        """The part of a weight that this rank holds now, possibly the whole weight."""

    def norms_of(self, matrix: Any) -> Norms: ...
    def similarity_of_rows(self, matrix: Any) -> Similarity: ...

    def tokens_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: int) -> Any:
        """The tokens that a router receives: its first tensor of the hidden size."""

    def bias_of(self, module: Any, experts: int) -> Any:
        """The whole bias of the logits; None if there is none."""

    def whole_rows(self, x: Any) -> Any:
        """The local part of a tensor, if its last dimension is not split; else None."""

    def dtype_of_routing(self, module: Any, tokens: Any, weight: Any) -> Any:
        """The dtype in which a router computes its logits."""

    def entropy_of(self, logits: Any) -> Routing: ...
    def entropy_from(self, tokens: Any, weight: Any, bias: Any, dtype: Any) -> Routing: ...
    def logit_sums_of(self, logits: Any) -> Logits: ...
    def logit_sums_from(self, tokens: Any, weight: Any, bias: Any, dtype: Any) -> Logits: ...

    def logits_from(self, tokens: Any, weight: Any, bias: Any, dtype: Any) -> Any:
        """The logits of a call, to be compared with its result; None if the framework compares none."""

    def confirmed(self, sums: Any, logits: Any, result: Any, unsure: bool) -> Any:
        """The sums of logits that were computed, with a count of 0 if the router returns other logits or scores;
        None if it cannot show them. Does not wait for a device.

        Args:
            unsure: Whether sums are missing unless the result confirms them.
        """

    def choices_of(self, module: Any, result: Any, call: RouterCall) -> Choices:
        """What a router chose, by its result. Does not wait for a device.

        Args:
            call: ``top`` is found here.
        """

    def count_tokens(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """The number of tokens that a router receives: of vectors in its first tensor of numbers; None if there is none."""

    def activation_of(self, x: Any) -> Activation: ...

    def last_active(self, before: Any, seen: Any, step: int) -> Any:
        """The last step in which each entry of ``seen`` was true, if this is true in ``step``, and before as ``before`` says.

        Args:
            before: An earlier result of this function; None for the first step.
        """

    def active_share(self, last: Any, units: int, step: int) -> Number:
        """The share of units that were active after ``step``; NaN if there was NaN or Inf since.

        Args:
            units: Their number. Asking an array for its shape may wait.
        """
