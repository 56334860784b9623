"""What is to be known of tensors of MindSpore before they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from mindspore import Tensor, nn
from mindspore._c_expression import typing
from mindspore.common import _no_grad

from monitor.recording.tensor_paths import TensorPaths
from monitor.series import LOCAL, Placement


@contextmanager
def computing() -> Iterator[None]:
    """What is computed inside is recorded by no graph."""
    with _no_grad():
        yield


def layout_of(x: Any) -> None:
    """Tensors of the dynamic graph know nothing of other ranks."""
    del x


def placement_of(x: Any) -> Placement | None:
    """None: tensors of the dynamic graph know nothing of other ranks."""
    del x
    return None


def activation_placement(x: Any) -> Placement:
    """Every rank writes its own."""
    del x
    return LOCAL


@cache
def dtype_name(dtype: Any) -> str:
    """As rows have it: ``mindspore.float32``."""
    return f"mindspore.{str(dtype).lower()}"


# --- The tensors in a cell's arguments and results.

TENSOR_PATHS: Final = TensorPaths(Tensor, (nn.Cell, typing.Type))
