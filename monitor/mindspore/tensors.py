"""Properties of MindSpore tensors that are known without reading them."""

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
    """A context whose operations no graph records."""
    with _no_grad():
        yield


def layout_of(x: Any) -> None:
    """None: tensors of the dynamic graph have no layout over ranks."""
    del x


def placement_of(x: Any) -> Placement | None:
    """None: tensors of the dynamic graph have no layout over ranks."""
    del x
    return None


def activation_placement(x: Any) -> Placement:
    """Local: every rank writes its own activations."""
    del x
    return LOCAL


@cache
def dtype_name(dtype: Any) -> str:
    """The name in rows, such as ``mindspore.float32``."""
    return f"mindspore.{str(dtype).lower()}"


# --- The tensors in a cell's arguments and results.

TENSOR_PATHS: Final = TensorPaths(Tensor, (nn.Cell, typing.Type))

paths: TensorPaths = TENSOR_PATHS
