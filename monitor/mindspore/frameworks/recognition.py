"""Which framework a model and its optimizer belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import nn

from monitor.mindspore.frameworks.framework import Framework


def framework_of(chunks: Sequence[nn.Cell], optimizer: Any, *, main_grad: bool) -> Framework:
    """What keeps the gradients, weights and moments of a model.

    Raises:
        TypeError: The optimizer is none.
    """
    return Framework(chunks, optimizer, main_grad=main_grad)
