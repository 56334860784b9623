"""What a framework brings to features: where the numbers are, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from monitor.capture.features.results import Norms, Routing, Similarity, Spread
from monitor.capture.parameter_series import NamedParameter
from monitor.placement import Placement


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
