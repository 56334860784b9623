"""Tensors of torch as a dump keeps them.

A tensor in host memory is reduced where it is caught, and copied if its elements are wanted. Of one on a device the kernel's
row and the elements are copied to pinned memory in the stream that computes, behind an event that the writer waits for.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.dump.values import Copy, Leaf, Reading
from monitor.stats.partials import COLUMNS, Floats
from monitor.stats.torch.dispatch import reduce_into
from monitor.stats.torch.host_kernel import HostKernel
from monitor.stats.torch.tensors import beneath, has_memory, is_plain, local_shard, unseen

_functorch: Final[Any] = torch._C._functorch

EPS: Final = 0.0
"""No element is counted as small."""

_OF_NUMPY: Final = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Reader:
    """Reads tensors, each whenever it is met: what writes past torch's count of versions (a collective, a kernel of somebody's
    own) would go unseen if one was taken to be as it was.
    """

    def __init__(self, *, checksums: bool) -> None:
        self._checksums = checksums
        self._kernel = HostKernel(EPS)

    def leaf(self, x: Tensor, file: str | None) -> Leaf:
        if _is_transformed(x):
            return Leaf(_described(x), None, None, None)
        with unseen():
            if file is None and not self._checksums and is_plain(x):
                return Leaf(_described(x), _HostRow(self._kernel.reduce(x)), None, None)  # most of them, on the shortest way
        with beneath():
            local = local_shard(x)
            if local is None or local.is_meta or not has_memory(local):
                return Leaf(_described(x), None, None, None)
            copy = _copied(local) if file is not None or self._checksums else None
            return Leaf(_described(x), self._read(local), copy, file)

    def _read(self, local: Tensor) -> Reading | None:
        if local.device.type == "cpu":
            row = self._kernel.reduce(local)
            return None if row is None else _HostRow(row)
        page = torch.zeros(1, len(COLUMNS), dtype=torch.float64, device=local.device)
        reduce_into(local, page, 0, None, EPS)
        return _DeviceRow(page)


def _is_transformed(x: Tensor) -> bool:
    """Whether ``torch.vmap`` or one of ``torch.func`` is at work: what is called then, ours too, is called of many tensors
    at once, or differentiated.
    """
    return _functorch.peek_interpreter_stack() is not None or _functorch.is_functorch_wrapped_tensor(x)


def _described(x: Tensor) -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": str(x.dtype), "shape": list(x.shape), "requires_grad": x.requires_grad}


class _HostRow:
    """What the host's kernel has found."""

    __slots__ = ("_row",)

    def __init__(self, row: Any) -> None:
        self._row = row

    def row(self) -> Floats:
        found: Floats = self._row
        return found


class _Arriving:
    """A tensor on its way from a device."""

    def __init__(self, x: Tensor) -> None:
        self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._host.copy_(x, non_blocking=True)
        self._arrived = torch.accelerator.current_stream(x.device).record_event()

    def there(self) -> Tensor:
        self._arrived.synchronize()
        return self._host


class _DeviceRow:
    """What the device's kernel will have found. It was found when asked for first."""

    def __init__(self, page: Tensor) -> None:
        self._page = _Arriving(page)

    def row(self) -> Floats:
        found: Floats = self._page.there().numpy()[0]
        return found


class _Copied:
    """A copy in host memory, or on its way there."""

    def __init__(self, x: Tensor) -> None:
        self.dtype = _lacking(x.dtype)
        self.nbytes = x.nbytes
        self._shape = tuple(x.shape)
        self._copy = x.clone(memory_format=torch.contiguous_format) if x.device.type == "cpu" else _Arriving(x)

    def array(self) -> NDArray[Any]:
        x = self._copy.there() if isinstance(self._copy, _Arriving) else self._copy
        if self.dtype is None:
            plain: NDArray[Any] = x.numpy()
            return plain
        size = x.element_size()
        bits: NDArray[Any] = x.reshape(-1).view(_BITS[size]).numpy().view(_UNSIGNED[size])
        return bits.reshape(self._shape)


def _copied(local: Tensor) -> Copy | None:
    """None for a layout that has no elements side by side, nested ones above all."""
    if local.layout is torch.jagged or local.is_nested:
        return None
    dense = local.dequantize() if local.is_quantized else local if local.layout is torch.strided else local.to_dense()
    return _Copied(dense.resolve_conj().resolve_neg())


def _lacking(dtype: torch.dtype) -> str | None:
    """The name of a type that numpy lacks."""
    name = str(dtype).removeprefix("torch.")
    return None if name in _OF_NUMPY else name
