"""How sure a router is of its experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import mindspore as ms
from mindspore import Tensor, nn

from monitor.mindspore.features.attention import OUT_OF_SIGHT
from monitor.recording.features.reading import Routing
from monitor.stats.mindspore.arithmetic import Arithmetic, Array, computing

DTYPES: Final = {"fp32": ms.float32, "fp64": ms.float64}
"""As Megatron's and MindSpeed's configurations name them."""

CAST_TO: Final = {"FP16": ms.float16, "BF16": ms.bfloat16, "FP32": ms.float32}
"""As ``Cell.to_float`` leaves them."""


def entropy_of(logits: Tensor) -> Routing:
    """Of logits of any shape whose last dimension is the experts.

    Raises:
        EarlierFailure: Something that was called before has failed.
    """
    with computing() as on:
        total: Array = 0.0
        for block in _tokens(on, logits):
            total = total + on.sum(_entropies(on, on.floats(block)))
        return Routing(math.prod(logits.shape[:-1]), on.number(total))


def entropy_from(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: Any) -> Routing:
    """Of the logits ``tokens @ weight^T + bias``, formed as the router does: of numbers rounded to ``dtype``, some tokens at a
    time.

    Args:
        tokens: Last dimension the hidden size.
        weight: Shape ``(experts, hidden size)``.

    Raises:
        EarlierFailure: Something that was called before has failed.
    """
    with computing() as on:
        transposed = on.swapped(on.rounded(on.of(weight), dtype))
        added = None if bias is None else on.rounded(on.of(bias), dtype)
        total: Array = 0.0
        for block in _tokens(on, tokens):
            logits = on.matmul(on.rounded(block, dtype), transposed)
            logits = on.rounded(logits if added is None else logits + added, dtype)
            total = total + on.sum(_entropies(on, logits))
        return Routing(math.prod(tokens.shape[:-1]), on.number(total))


def dtype_of_routing(cell: nn.Cell, tokens: Tensor, weight: Tensor) -> Any:
    """The precision in which a router forms its logits: as its configuration or ``to_float`` says, or what it is given has."""
    said = DTYPES.get(str(getattr(getattr(cell, "config", None), "moe_router_dtype", None)))
    if said is not None:
        return said
    cast = CAST_TO.get(getattr(getattr(cell, "mixed_precision_type", None), "name", ""))
    if cast is not None:
        return cast
    given = {tokens.dtype, weight.dtype}
    return given.pop() if len(given) == 1 else (ms.float64 if ms.float64 in given else ms.float32)


def _tokens(on: Arithmetic, x: Tensor) -> Iterator[Array]:
    shape = math.prod(x.shape[:-1]), x.shape[-1]
    return on.rows(on.of(x).reshape(shape), shape)


def _entropies(on: Arithmetic, logits: Array) -> Array:
    """Shape (tokens, 1). An expert that a token cannot go to has a logit of -Inf and the share 0."""
    below = on.at_least(logits - on.amax(logits, -1), OUT_OF_SIGHT)
    weights = on.exp(below)
    total = on.sum(weights, -1)
    return on.log(total) - on.sum(below * weights, -1) / total
