"""What ``set_monitor`` may be given, checked before anything is attached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import nn


def chunks_of(model: Any) -> Sequence[nn.Cell]:
    """The chunks of a virtual pipeline, or the one cell as a list of itself.

    Raises:
        TypeError: Something in it is no cell.
        ValueError: The list is empty.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    for chunk in chunks:
        if not isinstance(chunk, nn.Cell):
            raise TypeError(f"model is a {type(chunk).__name__}: expected a mindspore.nn.Cell, or a list of model chunks.")
    if not chunks:
        raise ValueError("model is an empty list: expected a mindspore.nn.Cell, or a list of model chunks.")
    return chunks
