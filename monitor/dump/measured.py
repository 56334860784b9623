"""A tensor as it stands in ``dump.json``: what it is, what was measured of it, where its elements are kept."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from monitor.stats.ops import derive
from monitor.stats.partials import Floats, Partials

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
