"""What there is to read in a tensor of any layout: dense, real, strided pieces that no copy was made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

PLAIN: Final = (Tensor, torch.nn.Parameter)
NARROW: Final = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32})


@dataclass(frozen=True, slots=True)
class Readable:
    """A tensor's own elements.

    Attributes:
        dense: Strided tensor that holds the stored elements.
        implicit_zeros: Elements that a sparse layout leaves out.
        repeats: How often each element of ``dense`` stands in the tensor (expanded dimensions).
    """

    dense: Tensor
    implicit_zeros: int = 0
    repeats: int = 1


_data_address: Final[Callable[[Tensor], int] | None] = getattr(torch._C, "_data_address", None)
"""Where a tensor's storage begins, asked without making a copy that torch has put off. Older versions have none."""


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is what most tensors of most models are on the host: float32, contiguous, with elements in memory."""
    return plain_address(x) != 0


def plain_address(x: Tensor) -> int:
    """Where the elements of a tensor begin that ``is_plain``; 0 of any other."""
    if type(x) not in PLAIN or x.dtype is not torch.float32 or not x.is_cpu or x.layout is not torch.strided:
        return 0
    return address_of(x) if x.is_contiguous() else 0


def address_of(x: Tensor) -> int:
    """Where the elements begin of a strided tensor in host memory without gaps; 0 if that memory does not hold what the tensor
    says: freed or shrunk storage, torch's efficient zeros, functional tensors, what is negative only by its flag; and if there
    are no elements. Every hook asks this, so with few questions.
    """
    length = x.nbytes
    if not length or x.is_neg():
        return 0
    start: Any = x.storage_offset() * x.itemsize
    base = x.data_ptr() - start if _data_address is None else _data_address(x)
    return base + start if base and x.untyped_storage().nbytes() >= start + length else 0


def is_unbroken(x: Tensor) -> bool:
    """Whether a strided tensor's elements lie in memory one behind the other, in whatever order of dimensions."""
    return x.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(x))


def has_memory(x: Tensor) -> bool:
    """Whether the elements are in memory; of a sparse tensor and its like always, whose parts are then asked for.

    Storage that was freed (FSDP's unsharded parameters, outputs that Megatron discards) has no bytes, or fewer than the tensor
    says, and torch's efficient zeros and functional tensors have no address, whatever else is still true of the tensor. The
    address itself is not asked for: a copy that torch has put off would be made.
    """
    if x.layout is not torch.strided or x.numel() == 0:
        return True
    offset: Any = x.storage_offset()
    end = offset + 1 if x.is_nested else end_of(x.shape, x.stride(), offset)
    there = x.untyped_storage().nbytes() >= end * x.itemsize
    return there and not x._is_zerotensor() and not torch._is_functional_tensor(x)


def end_of(sizes: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """Behind the last of the elements in a storage that a strided tensor has, of which there is one at least."""
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def readable(x: Tensor) -> Readable | None:
    """The elements of ``x``; None where there are none to read (meta and fake tensors, freed storage, wrappers without any)."""
    local = local_shard(x)
    if local is None or local.is_meta or not has_memory(local):
        return None
    if local.layout is not torch.strided or local.is_quantized:
        source = _stored(local)
        return source if has_memory(source.dense) else None
    return _without_repeats(local)


def local_shard(x: Tensor) -> Tensor | None:
    """The tensor itself, of a DTensor its local part, of the result of a collective what it stands for; None for tensors that
    only pretend to have data.
    """
    if type(x) in PLAIN:
        return x
    local = getattr(x, "_local_tensor", None)
    if local is not None:
        return local_shard(local)
    if hasattr(x, "trigger_wait"):
        return _when_there(x)
    if isinstance(x, torch._subclasses.FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    wrapper = hasattr(type(x), "__tensor_flatten__") and not x.is_nested
    return None if wrapper else x


def _when_there(x: Any) -> Tensor | None:
    """What an ``AsyncCollectiveTensor`` stands for. The current stream waits for it, as the first operation on it would."""
    with torch.no_grad():
        arrived: Tensor = x.trigger_wait()
    return local_shard(arrived)


def _stored(x: Tensor) -> Readable:
    if x.is_quantized:
        return Readable(x.dequantize())
    if x.layout is torch.sparse_coo:
        # Values of an uncoalesced tensor are terms of sums. The norm of the terms is not the norm of the tensor.
        values = (x if x.is_coalesced() else x.coalesce())._values()
    elif x.layout is torch.jagged:
        buffer: Any = x  # whose attribute this is, and no operation that a dispatch below Python would miss
        return Readable(buffer._values)
    elif x.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        values = x.values()
    else:
        return Readable(x.to_dense())
    return Readable(values, implicit_zeros=x.numel() - values.numel())


def _without_repeats(x: Tensor) -> Readable:
    if x.is_contiguous():
        return Readable(x)
    repeats = 1
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
            repeats *= size
    return Readable(x, repeats=repeats)


def pieces(x: Tensor, limit: int) -> Sequence[Tensor]:
    """Views that together hold each element of a strided tensor once, of at most ``limit`` elements each."""
    size = x.numel()
    if size == 0:
        return ()
    flat = x.view(-1) if x.is_contiguous() else in_memory_order(x)
    if size <= limit:
        return (flat,)
    return torch.split(flat, limit) if flat.dim() == 1 else tuple(_cut(flat, limit))


def in_memory_order(x: Tensor) -> Tensor:
    """The same elements with dimensions in memory order, and adjacent ones merged: a transposed tensor becomes flat."""
    dims = sorted((d for d in range(x.dim()) if x.size(d) > 1), key=x.stride, reverse=True)
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in ((x.size(d), x.stride(d)) for d in dims):
        if strides and strides[-1] == size * stride:
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    return x.as_strided(sizes or [1], strides or [1])


def _cut(x: Tensor, limit: int) -> Iterator[Tensor]:
    below = x.numel() // x.size(0)
    if below > limit:
        for row in x.unbind(0):
            yield from _cut(row, limit) if row.dim() > 1 else torch.split(row, limit)
    else:
        yield from torch.split(x, max(1, limit // below))


@cache
def working_precision(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is reduced in: float32 for floats that fit, float64 for the rest (integers and bool among them)."""
    narrow = dtype in NARROW or (dtype.is_floating_point and dtype.itemsize == 1)
    return torch.float32 if narrow else torch.float64


# --- What reading a tensor passes by: keys of torch's dispatcher, and modes of the user's.

_K = torch._C.DispatchKey
_BYPASSED: Final = [
    "ADInplaceOrView", "AutogradOther", "AutogradCPU", "AutogradCUDA", "AutogradPrivateUse1", "AutogradMeta", "AutogradXPU",
    "AutogradMPS", "AutogradNestedTensor", "AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1", "AutocastXPU", "AutocastMPS",
    "Python", "PythonTLSSnapshot",
]  # fmt: skip


def _bypassed_keys() -> torch._C.DispatchKeySet:
    keys = torch._C.DispatchKeySet(_K.AutogradCPU)
    for name in _BYPASSED:
        if hasattr(_K, name):
            keys = keys | torch._C.DispatchKeySet(getattr(_K, name))
    return keys


BYPASSED_KEYS: Final = _bypassed_keys()
"""Autograd, autocast and the user's dispatch modes: reading a tensor records nothing, casts nothing and is seen by nobody."""

_NOTHING: Final = nullcontext()

function_modes: Final[Any] = torch._C._len_torch_function_stack
"""How many there are of the user's."""


def unseen() -> AbstractContextManager[object]:
    """What is called inside is not told to a ``TorchFunctionMode`` of the user's."""
    return torch._C.DisableTorchFunction() if function_modes() else _NOTHING


@contextmanager
def beneath() -> Iterator[None]:
    """What is computed inside is recorded by no graph, cast by no autocast, and told to no mode of the user's."""
    with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS), unseen():
        yield


# --- Whether the current stream is being captured: what is called then goes into a graph of the device, and runs when it
# does.


def capturing(device: torch.device) -> bool:
    """Whether what is launched on ``device`` now is not run, but captured to be run again and again without us."""
    return device.type != "cpu" and _question(device.type)()


@cache
def _question(kind: str) -> Callable[[], bool]:
    """What the backend of a kind of device answers; one that cannot be asked captures nothing."""
    return getattr(getattr(torch, kind, None), "is_current_stream_capturing", _no)


def _no() -> bool:
    return False
