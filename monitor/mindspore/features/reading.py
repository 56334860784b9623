"""What MindSpore brings to features: see ``monitor.recording.features.reading``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mindspore import Tensor, mint, nn

from monitor.mindspore.features.attention import spread
from monitor.mindspore.features.matrices import norms_of, similarity_of_rows
from monitor.mindspore.features.routing import dtype_of_routing, entropy_from, entropy_of
from monitor.mindspore.features.sources import FLOATS, bias_of, given_scores, local_matrix, matrix_of, tokens_of, whole_rows
from monitor.recording.parameter_series import NamedParameter
from monitor.series import Placement

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


def unseen() -> AbstractContextManager[object]:
    """Nobody looks on."""
    return nullcontext()


def beneath() -> AbstractContextManager[object]:
    """Whatever is computed sees to that itself: on the host there is nothing to see to."""
    return nullcontext()


def is_floating_point(x: Any) -> bool:
    """Whether it is a tensor, and of floating-point numbers."""
    return isinstance(x, Tensor) and x.dtype in FLOATS


def embeds(cell: nn.Cell) -> bool:
    """Whether the weight of a cell is a table."""
    return isinstance(cell, nn.Embedding | nn.EmbeddingLookup | mint.nn.Embedding)


def is_linear(cell: nn.Cell) -> bool:
    """Whether what a cell returns is a product with its weight, and nothing else."""
    return isinstance(cell, mint.nn.Linear) or (isinstance(cell, nn.Dense) and cell.activation is None)


def unwrapped(cell: nn.Cell) -> nn.Cell:
    """Nothing wraps cells here."""
    return cell


def searching(cell: nn.Cell) -> None:
    """What a cell calls is not shown to anybody."""
    del cell


def weight_placement(framework: Any, rank: int, parameter: NamedParameter, seen: Any) -> Placement:
    """How a weight relates to what other ranks find: as it does between forwards."""
    del rank, seen
    found: Placement = framework.placement("param_origin", parameter)
    return found
