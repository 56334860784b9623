"""Where the numbers of a feature are looked for, and why a module has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

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
