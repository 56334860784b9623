"""The inputs and outputs of a call as a tree of JSON whose leaves are tensors."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from monitor.recording.tensor_paths import children as parts_of
from monitor.stats.ops import derive
from monitor.stats.partials import Floats, Partials

# --- A tensor in ``dump.json``: its description, its statistics, and the file of its elements.

SHOWN: Final = {"Max": "max", "Min": "min", "Mean": "mean", "Norm": "norm"}
"""Names of statistics in the files, and their ops."""

NOTHING_MEASURED: Final = dict.fromkeys(SHOWN)


class KernelResult(Protocol):
    """A kernel's result for a tensor."""

    def row(self) -> Floats:
        """The partials, shape ``(len(COLUMNS),)``. Called on the writer's thread; may wait for a device."""


class HostRow:
    """The result of a kernel that has finished, in host memory."""

    __slots__ = ("_row",)

    def __init__(self, row: Any) -> None:
        self._row = row

    def row(self) -> Floats:
        found: Floats = self._row
        return found


class Copy(Protocol):
    """The elements of a tensor as they were when it was read.

    Attributes:
        nbytes: Bytes of host memory that the copy takes.
        dtype: The name of a type that numpy lacks; None for other types.
    """

    nbytes: int
    dtype: str | None

    def array(self) -> NDArray[Any]:
        """The elements on the host. Called on the writer's thread; may wait for a device."""


class TensorLeaf:
    """A tensor of a call.

    Attributes:
        described: ``type``, ``dtype`` and ``shape``, and in PyTorch ``requires_grad``.
        reading: None if the tensor has no readable elements.
        copy: None if the elements are not needed.
        file: The name of the file for the elements; None if they are not stored.
    """

    __slots__ = ("checksum", "copy", "described", "file", "reading", "statistics")

    def __init__(self, described: dict[str, Any], reading: KernelResult | None, copy: Copy | None, file: str | None) -> None:
        self.described = described
        self.reading = reading
        self.copy = copy
        self.file = file
        self.checksum: str | None = None
        self.statistics: dict[str, float | None] = NOTHING_MEASURED

    def as_json(self) -> dict[str, Any]:
        """The entry of the tensor in the files."""
        content: dict[str, Any] = {**self.described, **self.statistics}
        if "requires_grad" in content:
            content["requires_grad"] = content.pop("requires_grad")  # after the statistics, as in the original
        if self.checksum is not None:
            content["md5"] = self.checksum
        if self.file is not None:
            content["data_name"] = self.file
        return content


class GradientSlot:
    """The place of a gradient that may arrive later.

    Attributes:
        leaf: None until the gradient has arrived.
        name: The name of the gradient; its file is named after it.
    """

    __slots__ = ("leaf", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.leaf: TensorLeaf | None = None


def derive_all(leaves: Iterable[TensorLeaf]) -> None:
    """Compute the statistics of many leaves at once. Leaves of the same tensor share a reading."""
    read = [leaf for leaf in leaves if leaf.reading is not None]
    if not read:
        return
    readings = {id(leaf.reading): leaf.reading for leaf in read}
    partials = Partials.from_rows(np.array([reading.row() for reading in readings.values() if reading is not None]))
    columns = {shown: derive(op, partials) for shown, op in SHOWN.items()}
    places = {key: place for place, key in enumerate(readings)}
    for leaf in read:
        place = places[id(leaf.reading)]
        leaf.statistics = {shown: float(v[place]) if there[place] else None for shown, (v, there) in columns.items()}


def checksum(array: NDArray[Any]) -> str:
    """CRC-32 of the elements' bytes in C order, in hexadecimal."""
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data):08x}"


MAX_DEPTH: Final = 16
MOST_BYTES: Final = 255
"""Bytes of a file name, at most."""

OnTensor = Callable[[Any, str], Any]
"""Makes the leaf of a tensor from the tensor and its name."""


def file_name(name: str) -> str:
    """The file name of a tensor. A name that is too long is cut, and a checksum is added to keep it unique."""
    name = name.replace("/", "_")
    if len(name.encode()) + len(".npy") > MOST_BYTES:
        name = f"{name.encode()[: MOST_BYTES - 13].decode(errors='ignore')}.{zlib.crc32(name.encode()):08x}"
    return f"{name}.npy"


def results(value: Any) -> Sequence[Any]:
    """The outputs of a call: several if it returned a tuple or named tuple."""
    return value if isinstance(value, tuple) else (value,)


class Trees:
    """Builds trees.

    Args:
        tensor: The class of a tensor.
    """

    def __init__(self, tensor: type) -> None:
        self._tensor = tensor

    def of(self, value: Any, name: str, on_tensor: OnTensor, depth: int = 0) -> Any:
        """The tree of a value. A value without tensors is described by its type and value."""
        if isinstance(value, self._tensor):
            return on_tensor(value, name)
        children = None if depth >= MAX_DEPTH else parts_of(value)
        if children is None:
            return _plain(value)
        below = {key: self.of(child, f"{name}.{key}", on_tensor, depth + 1) for key, child in _unique_keys(children)}
        return list(below.values()) if isinstance(value, (tuple, list)) else below

    def all_of(self, values: Sequence[Any], name: str, on_tensor: OnTensor) -> list[Any]:
        """The trees of several values, numbered."""
        return [self.of(value, f"{name}.{i}", on_tensor) for i, value in enumerate(values)]

    def slots(self, value: Any, name: str, wanted: Callable[[Any, GradientSlot], bool], depth: int = 0) -> Any:
        """The tree of a value's gradients: a slot for each tensor that is ``wanted``, None for values without a gradient."""
        if isinstance(value, self._tensor):
            slot = GradientSlot(name)
            return slot if wanted(value, slot) else None
        children = None if depth >= MAX_DEPTH else parts_of(value)
        if children is None:
            return None
        below = {key: self.slots(child, f"{name}.{key}", wanted, depth + 1) for key, child in _unique_keys(children)}
        return (list(below.values()) if isinstance(value, (tuple, list)) else below) if _any(below.values()) else None


def filled(tree: Any) -> Any:
    """Replace slots by the leaves that arrived, or None."""
    if isinstance(tree, GradientSlot):
        return tree.leaf
    if isinstance(tree, list):
        return [filled(one) for one in tree]
    return {key: filled(one) for key, one in tree.items()} if isinstance(tree, dict) else tree


def leaves(tree: Any) -> Iterable[TensorLeaf]:
    """The tensors of a tree."""
    if isinstance(tree, TensorLeaf):
        yield tree
    elif isinstance(tree, (list, dict)):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(one)


def _any(trees: Iterable[Any]) -> bool:
    return any(tree is not None for tree in trees)


def _unique_keys(children: Iterable[tuple[Any, Any]]) -> Iterable[tuple[str, Any]]:
    """Keys as unique JSON texts: for ``1`` and ``"1"`` the later key is written with ``repr``."""
    known: set[str] = set()
    for key, child in children:
        candidates = itertools.chain((str(key), repr(key)), (f"{key!r}.{n}" for n in itertools.count(1)))
        known.add(spelled := next(one for one in candidates if one not in known))
        yield spelled, child


def _plain(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (bool, int, float, str)):
        return {"type": type(value).__name__, "value": _json_scalar(value)}
    if isinstance(value, slice):
        bounds = [one if one is None or isinstance(one, int) else str(one) for one in (value.start, value.stop, value.step)]
        return {"type": "slice", "value": bounds}
    kind = type(value)
    described = {"type": kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"}
    # Types and devices describe themselves with str(). The str() of other objects may be long and contain addresses.
    return {**described, "value": str(value)} if kind.__name__ in ("dtype", "device", "layout", "memory_format") else described


def _json_scalar(value: Any) -> Any:
    """The plain JSON value of an instance of a subclass, such as an enumeration of integers."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None
