"""What a framework brings to features: where the numbers are, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from monitor.recording.parameter_series import NamedParameter
from monitor.series import Placement

# --- Where the numbers of a feature are looked for, and why a module has none.

T = TypeVar("T")

Q_NAMES: Final = ("query", "query_layer", "q")
K_NAMES: Final = ("key", "key_layer", "k")
TOKENS: Final = ("input", "hidden_states", "x")
MATRIX_NAMES: Final = ("weight", "wg")

NO_SCORES: Final = "no Q and K were found"
OTHER_LENGTHS: Final = "Q and K are of different lengths"
NOT_WHOLE: Final = "its Q and K are cut over ranks along the sequence, or hold no numbers"
NOT_2D: Final = "it has no floating-point 2-D weight that this rank can read in forward"
NO_LOGITS: Final = "its logits were not found"
ONE_EXPERT: Final = "it has fewer than two experts"
NOT_CALLED: Final = "it was not called, or is compiled"


class MisfitError(Exception):
    """A module is not what its hook is for. The message says why."""


def queries_and_keys(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type[T]) -> tuple[T | None, T | None]:
    """Q and K among what a module is called with: by their names, else the first tensors that have none."""
    found = first_named(kwargs, Q_NAMES, kind), first_named(kwargs, K_NAMES, kind)
    tensors = [value for value in args if isinstance(value, kind)]
    query, key = (named if named is not None else (tensors.pop(0) if tensors else None) for named in found)
    return query, key


def first_named(kwargs: Mapping[str, Any], names: tuple[str, ...], kind: type[T]) -> T | None:
    """The first tensor that goes by one of the names."""
    return next((kwargs[name] for name in names if isinstance(kwargs.get(name), kind)), None)


def places_of(order: str) -> tuple[int, ...]:
    """In which dimensions of Q and K batch, heads, sequence and size stand.

    Args:
        order: ``sa_order``, such as ``s,b,h,d``.
    """
    return tuple(order.replace(",", "").index(letter) for letter in "bhsd")


def go_together(query: tuple[int, ...], key: tuple[int, ...]) -> bool:
    """Whether shapes (batch, heads, sequence, size) are of a Q and a K: of one size and batch, heads in groups."""
    of_one_batch = query[0] == key[0] or 1 in (query[0], key[0])
    return query[3] == key[3] and of_one_batch and not query[1] % key[1]


# --- What features come to: sums, so that calls and ranks add up. Numbers of a device stay there, as tensors with one
# element.

Number = Any
"""A number, or a tensor with one element."""


class Spread(NamedTuple):
    """Of attention weights, sums over queries.

    Attributes:
        queries: How many there were; without those that see no key at all.
        entropy: Of the attention weights of each, in nats.
        greatest: The greatest attention weight of each.
    """

    queries: Number
    entropy: Number
    greatest: Number


class Norms(NamedTuple):
    """Of a matrix: the square of the Frobenius norm, and an estimate of the spectral norm from below.

    Attributes:
        matrices: 1 where the estimate is certain; 2 where it is not: the row then has no spectral norm.
    """

    squares: Number
    spectral: Number
    matrices: Number


class Similarity(NamedTuple):
    """Of the rows of a matrix, over ordered pairs of two different ones: how many there are, the sum of their cosines."""

    pairs: int
    cosines: Number


class Routing(NamedTuple):
    """Of some tokens: how many, and the sum of the entropies of the softmax over the experts, in nats."""

    tokens: int
    entropy: Number


class Search(Protocol):
    """A search for Q and K in what a module calls.

    Attributes:
        saw: Whether it has ended.
        reason: Why nothing was found, if nothing was.
    """

    saw: bool
    reason: str

    def enter(self) -> None:
        """Look from now on, until ``leave``."""

    def leave(self) -> None:
        """Look no longer."""


class Reading(Protocol):
    """Where a feature's numbers are, and what they come to. What cannot be read as what it should be is a ``MisfitError``."""

    def unseen(self) -> AbstractContextManager[object]:
        """What is called inside is not told to whoever of the user's looks on."""

    def beneath(self) -> AbstractContextManager[object]:
        """What is computed inside is recorded by no graph and cast by nobody."""

    def is_floating_point(self, x: Any) -> bool:
        """Whether it is a tensor, and of floating-point numbers."""

    def embeds(self, module: Any) -> bool:
        """Whether the weight of a module is a table."""

    def is_linear(self, module: Any) -> bool:
        """Whether what a module returns is a product with its weight, and nothing else."""

    def unwrapped(self, module: Any) -> Any:
        """The module within wrappers: that is where weights are whole."""

    def weight_placement(self, framework: Any, rank: int, parameter: NamedParameter, seen: Any) -> Placement:
        """How a weight as it is in forward (``seen``) relates to what other ranks find."""

    def given_scores(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], order: str) -> Any:
        """Q and K where a module is called with them; None if it is not."""

    def searching(self, module: Any) -> Callable[[Callable[[Any], object], Callable[[str], object]], Search] | None:
        """What makes a search in a call of the module, from whom to tell of Q and K and whom to tell that they do not fit; None
        where it cannot be looked into.
        """

    def spread(self, scores: Any, heads: int = 1, rows: int = 1) -> Spread: ...

    def matrix_of(self, module: Any) -> Any:
        """``weight`` or ``wg`` of a module, as it lies there; None if it has none."""

    def local_matrix(self, weight: Any) -> Any:
        """The part of a weight that this rank has now, which may be all of it."""

    def norms_of(self, matrix: Any) -> Norms: ...
    def similarity_of_rows(self, matrix: Any) -> Similarity: ...

    def tokens_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: int) -> Any:
        """What a router is to route: its first tensor of the hidden size."""

    def bias_of(self, module: Any, experts: int) -> Any:
        """What is added to logits, whole; None where there is none."""

    def whole_rows(self, x: Any) -> Any:
        """The local part of a tensor, if no row of its last dimension is cut; None otherwise."""

    def dtype_of_routing(self, module: Any, tokens: Any, weight: Any) -> Any:
        """In which a router computes its logits."""

    def entropy_of(self, logits: Any) -> Routing: ...
    def entropy_from(self, tokens: Any, weight: Any, bias: Any, dtype: Any) -> Routing: ...
