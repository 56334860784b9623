"""What a call was given and gave, as a tree of JSON in which each tensor is a leaf."""

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

# --- A tensor as it stands in ``dump.json``: what it is, what was measured of it, where its elements are kept.

SHOWN: Final = {"Max": "max", "Min": "min", "Mean": "mean", "Norm": "norm"}
"""Names in the files, and the ops behind them."""

NOTHING_MEASURED: Final = dict.fromkeys(SHOWN)


class Reading(Protocol):
    """What a kernel made of a tensor."""

    def row(self) -> Floats:
        """The partials, shape ``(len(COLUMNS),)``. Called on the writer's thread; may wait for a device."""


class Copy(Protocol):
    """The elements of a tensor as they were when it was caught.

    Attributes:
        nbytes: Of the host's memory that it takes.
        dtype: The name of a type that numpy lacks; None for others.
    """

    nbytes: int
    dtype: str | None

    def array(self) -> NDArray[Any]:
        """On the host. Called on the writer's thread; may wait for a device."""


class Leaf:
    """A tensor of a call.

    Attributes:
        described: ``type``, ``dtype`` and ``shape``, and in PyTorch ``requires_grad``.
        reading: None where the tensor has no elements that could be read.
        copy: None where none is wanted.
        file: The name of the file that the elements are kept in; None where they are not.
    """

    __slots__ = ("checksum", "copy", "described", "file", "reading", "statistics")

    def __init__(self, described: dict[str, Any], reading: Reading | None, copy: Copy | None, file: str | None) -> None:
        self.described = described
        self.reading = reading
        self.copy = copy
        self.file = file
        self.checksum: str | None = None
        self.statistics: dict[str, float | None] = NOTHING_MEASURED

    def told(self) -> dict[str, Any]:
        """As the files have it."""
        told: dict[str, Any] = {**self.described, **self.statistics}
        if "requires_grad" in told:
            told["requires_grad"] = told.pop("requires_grad")  # behind the statistics, where the original has it
        if self.checksum is not None:
            told["md5"] = self.checksum
        if self.file is not None:
            told["data_name"] = self.file
        return told


class Slot:
    """Where a gradient will stand, if it comes.

    Attributes:
        leaf: None until then.
        name: Of what it is; names its file.
    """

    __slots__ = ("leaf", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.leaf: Leaf | None = None


def derive_all(leaves: Iterable[Leaf]) -> None:
    """Fill in the statistics of many leaves at once: a reading is shared by those that are the same tensor."""
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
"""Of a file's name."""

OnTensor = Callable[[Any, str], Any]
"""What stands in the tree for a tensor: given the tensor and its name."""


def file_name(name: str) -> str:
    """The file of a tensor. A name that is too long for one is cut, and told from others by its checksum."""
    name = name.replace("/", "_")
    if len(name.encode()) + len(".npy") > MOST_BYTES:
        name = f"{name.encode()[: MOST_BYTES - 13].decode(errors='ignore')}.{zlib.crc32(name.encode()):08x}"
    return f"{name}.npy"


def results(value: Any) -> Sequence[Any]:
    """The outputs of a call: several where it returned a tuple, with names or without."""
    return value if isinstance(value, tuple) else (value,)


class Trees:
    """Builds trees.

    Args:
        tensor: The class of a tensor.
    """

    def __init__(self, tensor: type) -> None:
        self._tensor = tensor

    def of(self, value: Any, name: str, on_tensor: OnTensor, depth: int = 0) -> Any:
        """The tree of a value. What is neither a tensor nor holds any stands there with its type and value."""
        if isinstance(value, self._tensor):
            return on_tensor(value, name)
        children = None if depth >= MAX_DEPTH else parts_of(value)
        if children is None:
            return _plain(value)
        below = {key: self.of(child, f"{name}.{key}", on_tensor, depth + 1) for key, child in _spelled(children)}
        return list(below.values()) if isinstance(value, (tuple, list)) else below

    def all_of(self, values: Sequence[Any], name: str, on_tensor: OnTensor) -> list[Any]:
        """The trees of several, each with its number."""
        return [self.of(value, f"{name}.{i}", on_tensor) for i, value in enumerate(values)]

    def slots(self, value: Any, name: str, wanted: Callable[[Any, Slot], bool], depth: int = 0) -> Any:
        """The tree of the gradients of a value: a slot for each tensor that is ``wanted``, None for what has no gradient."""
        if isinstance(value, self._tensor):
            slot = Slot(name)
            return slot if wanted(value, slot) else None
        children = None if depth >= MAX_DEPTH else parts_of(value)
        if children is None:
            return None
        below = {key: self.slots(child, f"{name}.{key}", wanted, depth + 1) for key, child in _spelled(children)}
        return (list(below.values()) if isinstance(value, (tuple, list)) else below) if _any(below.values()) else None


def filled(tree: Any) -> Any:
    """A tree for the encoder: slots as the leaves that came, or None."""
    if isinstance(tree, Slot):
        return tree.leaf
    if isinstance(tree, list):
        return [filled(one) for one in tree]
    return {key: filled(one) for key, one in tree.items()} if isinstance(tree, dict) else tree


def leaves(tree: Any) -> Iterable[Leaf]:
    """The tensors of a tree."""
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, (list, dict)):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(one)


def _any(trees: Iterable[Any]) -> bool:
    return any(tree is not None for tree in trees)


def _spelled(children: Iterable[tuple[Any, Any]]) -> Iterable[tuple[str, Any]]:
    """Keys as JSON has them, each once: of ``1`` and ``"1"`` the later one is spelled as Python writes it."""
    known: set[str] = set()
    for key, child in children:
        candidates = itertools.chain((str(key), repr(key)), (f"{key!r}.{n}" for n in itertools.count(1)))
        known.add(spelled := next(one for one in candidates if one not in known))
        yield spelled, child


def _plain(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (bool, int, float, str)):
        return {"type": type(value).__name__, "value": _exact(value)}
    if isinstance(value, slice):
        bounds = [one if one is None or isinstance(one, int) else str(one) for one in (value.start, value.stop, value.step)]
        return {"type": "slice", "value": bounds}
    kind = type(value)
    told = {"type": kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"}
    # Types, devices and the like say what they are; what others say may be long, and have addresses in it.
    return {**told, "value": str(value)} if kind.__name__ in ("dtype", "device", "layout", "memory_format") else told


def _exact(value: Any) -> Any:
    """Of subclasses (an enumeration of integers) what JSON has of them."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None
