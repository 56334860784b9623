"""Which framework a model and its optimizer belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from monitor.pytorch.frameworks.framework import Framework


def framework_of(chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> Framework:
    """The framework that keeps the gradients, weights and moments of a model.

    None is imported here: one that is in use has been.

    Raises:
        TypeError: The optimizer is none that can be observed.
        ValueError: The model is set up in a way that cannot be observed.
    """
    return Framework(chunks, optimizer, main_grad=main_grad)
