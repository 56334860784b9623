"""Access to the memory of torch tensors of any layout, without copies where possible and unseen by the user's modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

PLAIN: Final = (Tensor, torch.nn.Parameter)
TRACED: Final = (torch._subclasses.FakeTensor, torch._subclasses.functional_tensor.FunctionalTensor)
"""Classes of tensors without elements, which tracers use."""
NARROW: Final = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32})


SCALAR: Final = torch.zeros((), dtype=torch.float64, device="cpu")
"""What a number of the host counts as, where a tensor is expected."""


@dataclass(frozen=True, slots=True)
class Readable:
    """The elements of a tensor.

    Attributes:
        dense: A strided tensor with the stored elements.
        implicit_zeros: The number of zeros that a sparse layout does not store.
        repeats: How often the tensor repeats each element of ``dense`` (expanded dimensions).
    """

    dense: Tensor
    implicit_zeros: int = 0
    repeats: int = 1


_data_address: Final[Callable[[Tensor], int] | None] = getattr(torch._C, "_data_address", None)
"""The address of a tensor's storage, without triggering a lazy copy. Older versions of torch lack this function."""


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is the most common host tensor: float32, contiguous, with elements in memory."""
    return plain_address(x) != 0


def plain_address(x: Tensor) -> int:
    """The address of the first element of a tensor that ``is_plain``; 0 for any other tensor."""
    if type(x) not in PLAIN or x.dtype is not torch.float32 or not x.is_cpu or x.layout is not torch.strided:
        return 0
    return address_of(x) if x.is_contiguous() and not x.is_nested else 0


def address_of(x: Tensor) -> int:
    """The address of the first element of a strided host tensor without gaps.

    0 if there are no elements, or if the memory does not hold them: freed or shrunk storage, torch's efficient zeros,
    functional tensors, tensors negated only by their flag. Every hook calls this, so it makes few checks.
    """
    length = x.nbytes
    if not length or x.is_neg():
        return 0
    start: Any = x.storage_offset() * x.itemsize
    base = x.data_ptr() - start if _data_address is None else _data_address(x)
    return base + start if base and x.untyped_storage().nbytes() >= start + length else 0


def start_of(x: Tensor) -> int:
    """The address of the first element of a strided tensor, or of its local part; 0 for others. Triggers no lazy copy."""
    local = local_shard(x)
    if local is None or local.layout is not torch.strided or local.is_nested or local.is_meta:
        return 0
    if _data_address is None:
        return local.data_ptr()
    return _data_address(local) + int(local.storage_offset()) * local.itemsize


def magnitudes_of(piece: Tensor) -> Tensor:
    """The magnitudes, shape ``(elements,)``, in float32 or float64."""
    if piece.is_complex():
        return torch.abs(piece.to(torch.complex64) if piece.dtype is torch.complex32 else piece).reshape(-1)
    return piece.to(working_precision(piece.dtype)).abs().reshape(-1)


def is_unbroken(x: Tensor) -> bool:
    """Whether a strided tensor's elements are stored without gaps, in any order of dimensions."""
    return x.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(x))


def has_memory(x: Tensor) -> bool:
    """Whether the elements are in memory. True for sparse tensors and other layouts, whose parts are checked later.

    Freed storage has no bytes, or fewer than the tensor needs; examples are FSDP's unsharded parameters and outputs that
    Megatron discards. torch's efficient zeros and functional tensors have no address. The address itself is not read, because
    that would trigger a lazy copy.
    """
    if x.layout is not torch.strided or x.numel() == 0:
        return True
    offset: Any = x.storage_offset()
    end = offset + 1 if x.is_nested else end_of(x.shape, x.stride(), offset)
    there = x.untyped_storage().nbytes() >= end * x.itemsize
    return there and not x._is_zerotensor() and not torch._is_functional_tensor(x)


def end_of(sizes: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """One past the storage index of the last element of a strided tensor with at least one element."""
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def readable(x: Tensor) -> Readable | None:
    """The elements of ``x``; None if it has none to read (meta and fake tensors, freed storage, wrappers without data)."""
    local = local_shard(x)
    if local is None or local.is_meta or not has_memory(local):
        return None
    if local.layout is not torch.strided or local.is_quantized or local.is_nested:
        source = _stored(local)
        return source if has_memory(source.dense) else None
    return _without_repeats(local)


def local_shard(x: Tensor) -> Tensor | None:
    """The tensor itself, a DTensor's local part, or an asynchronous collective's result; None for tensors without data."""
    if type(x) in PLAIN:
        return x
    local = getattr(x, "_local_tensor", None)
    if local is not None:
        return local_shard(local)
    if hasattr(x, "trigger_wait"):
        return _when_there(x)
    return None if _is_traced(x) or _is_wrapper(x) else x


def is_opaque(x: Tensor) -> bool:
    """Whether only the class of ``x`` knows where the elements are. No rows can be made of such tensors."""
    read = type(x) in PLAIN or hasattr(x, "_local_tensor") or hasattr(x, "trigger_wait")
    return not (read or _is_traced(x)) and _is_wrapper(x)


def _is_traced(x: Tensor) -> bool:
    return isinstance(x, TRACED) or bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def _is_wrapper(x: Tensor) -> bool:
    """Whether the elements are in other tensors: ``x`` has a shape and no memory. Below the ``__torch_dispatch__`` of its class
    torch would read from address 0.
    """
    if x.is_nested or hasattr(type(x), "__tensor_flatten__"):
        return not x.is_nested
    with torch._C.DisableTorchFunctionSubclass():
        if x.layout is not torch.strided or x.is_meta or x.numel() == 0 or x._is_zerotensor():
            return False
        try:
            address = x.untyped_storage().data_ptr() if _data_address is None else _data_address(x)
            return not address and x.untyped_storage().nbytes() != 0  # freed storage has no bytes
        except RuntimeError:  # the storage of a wrapper
            return True


def measured_shape(x: Tensor) -> tuple[int, ...]:
    """The shape of the elements of ``x`` on this rank. For a jagged tensor: that of all its rows. Its own shape has a symbol
    in place of their lengths, a new one for each tensor. A strided nested tensor has no shape, and is flat.
    """
    if x.is_nested:
        return _stored(x).dense.shape
    local = local_shard(x)
    return x.shape if local is None else local.shape


def _when_there(x: Any) -> Tensor | None:
    """The result of an ``AsyncCollectiveTensor``. The current stream waits for it, as it would at the first operation on it."""
    with torch.no_grad():
        arrived: Tensor = x.trigger_wait()
    return local_shard(arrived)


def _stored(x: Tensor) -> Readable:
    if x.is_quantized:
        return Readable(x.dequantize())
    if x.layout is torch.sparse_coo:
        # The values of an uncoalesced tensor are terms of sums; their norm is not the norm of the tensor.
        values = (x if x.is_coalesced() else x.coalesce())._values()
    elif x.layout is torch.jagged:
        return Readable(_rows_of(x))
    elif x.is_nested:
        return Readable(_buffer(x))
    elif x.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        values = x.values()
    else:
        return Readable(x.to_dense())
    return Readable(values, implicit_zeros=x.numel() - values.numel())


def _rows_of(jagged: Any) -> Tensor:
    """The rows of a jagged tensor, one after the other. With ``lengths`` its buffer has further elements between them.

    Reads attributes of the Python object: dispatch below Python would miss operations.
    """
    values: Tensor = jagged._values
    if jagged._lengths is None:
        return values
    lengths: Tensor = jagged._lengths.detach().to(values.device)
    skipped = jagged._offsets[:-1].to(values.device) - (lengths.cumsum(0) - lengths)
    rows = torch.repeat_interleave(skipped, lengths)
    return values.index_select(jagged._ragged_idx - 1, rows + torch.arange(len(rows), device=rows.device))


def _buffer(x: Tensor) -> Tensor:
    """The elements of a strided nested tensor, flat. The buffer of a part of another one has further elements."""
    buffer = x.values()
    return buffer if buffer.numel() == x.numel() else x.contiguous().values()


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
    """Views of at most ``limit`` elements that together contain each element of a strided tensor once."""
    size = x.numel()
    if size == 0:
        return ()
    flat = x.view(-1) if x.is_contiguous() else in_memory_order(x)
    if size <= limit:
        return (flat,)
    return torch.split(flat, limit) if flat.dim() == 1 else tuple(_cut(flat, limit))


def in_memory_order(x: Tensor) -> Tensor:
    """A view with dimensions in memory order and adjacent ones merged: a transposed tensor becomes flat."""
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
    """The precision in which a dtype is reduced: float32 for floats that fit, else float64, also for integers and bool."""
    narrow = dtype in NARROW or (dtype.is_floating_point and dtype.itemsize == 1)
    return torch.float32 if narrow else torch.float64


def words_in(dtype: torch.dtype) -> int:
    """The words of an element, for the check sums (``partials``)."""
    return max(1, dtype.itemsize // 4)


# --- Dispatcher keys and user modes that are bypassed while a tensor is read.

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
"""Autograd, autocast and the user's dispatch modes. With these keys excluded, reads are not recorded, cast or intercepted."""

_NOTHING: Final = nullcontext()

function_modes: Final[Any] = torch._C._len_torch_function_stack
"""Returns the number of active ``TorchFunctionMode`` objects of the user."""


def unseen() -> AbstractContextManager[object]:
    """A context whose calls are hidden from the user's ``TorchFunctionMode`` objects."""
    return torch._C.DisableTorchFunction() if function_modes() else _NOTHING


@contextmanager
def beneath() -> Iterator[None]:
    """A context whose operations are not recorded by autograd, cast by autocast, or seen by the user's modes."""
    with torch._C._ExcludeDispatchKeyGuard(BYPASSED_KEYS), unseen():
        yield


def capturing(device: torch.device) -> bool:
    """Whether launches on ``device`` are now captured into a graph, which replays them later without the monitor."""
    return device.type != "cpu" and asks_for_capture(device.type)()


@cache
def asks_for_capture(kind: str) -> Callable[[], bool]:
    """The function of a type of devices that answers ``capturing``. A backend without one does not capture."""
    return getattr(getattr(torch, kind, None), "is_current_stream_capturing", _no)


def _no() -> bool:
    return False
