"""Reduces many tensors in one launch per dtype, whatever pages their rows are on.

A launch reads addresses, sizes and rows from a table in the device's memory. The table is sent only if it differs from the last
one for the same rows, from pinned memory and without waiting. torch's allocator reuses pinned memory only after the copy from
it is done. In the stream, the copy follows the launch that read the old table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.stats.torch.memory import persistent
from monitor.stats.torch.tensors import PLAIN, beneath, has_memory
from monitor.stats.triton.elements import FORMATS, READ, ElementFormat
from monitor.stats.triton.launch import EVEN, ROW_BYTES, FusedEngine, FusedKernel

MOST_TABLES: Final = 64
"""Most tables kept in memory. A model's lists are the same in each step."""

FIELDS: Final = 6
"""Columns of a table: address, elements, address of the row, parts, tiles of a part, sum of the parts of earlier tensors."""

Kind = tuple[int, torch.dtype, bool, bool]
"""A variant of the kernel: device, dtype, and whether all tensors begin, and end, so that whole groups can be read."""


@dataclass(slots=True)
class TensorGroup:
    """The tensors of one launch.

    Attributes:
        first: The first of the tensors.
        addresses: Addresses of their first elements.
        sizes: Numbers of elements.
        rows: Addresses of their rows.
        places: Their indices in the list.
    """

    first: Tensor
    addresses: list[int]
    sizes: list[int]
    rows: list[int]
    places: list[int]


@dataclass(slots=True)
class SentTable:
    """A table in the device's memory, and its content."""

    memory: Tensor
    addresses: list[int]
    sizes: list[int]
    programs: int


class FusedList:
    """Reduces lists of tensors of one device."""

    def __init__(self, kernel: FusedKernel, engine: FusedEngine) -> None:
        self._kernel = kernel
        self._engine = engine
        self._tables: OrderedDict[tuple[Kind, int, tuple[int, ...]], SentTable] = OrderedDict()

    def reduce_into(self, tensors: Sequence[Tensor], pages: Sequence[Tensor], rows: Sequence[int]) -> list[int]:
        """Write the partials of each tensor into ``page[row]``; tensors, pages and rows are aligned.

        Returns:
            Indices of the tensors that were not reduced and must be reduced one by one.
        """
        if self._engine.driver.capturing():  # each replay of the graph would read the table again
            return list(range(len(tensors)))
        groups, left = _gathered(tensors, pages, rows)
        for kind, group in groups.items():
            if not self._launch(kind, group):
                left.extend(group.places)
        return left

    def _launch(self, kind: Kind, group: TensorGroup) -> bool:
        device, dtype, aligned, even = kind
        format_ = FORMATS[dtype]
        launch = self._engine.launch("reduce_many", format_, device, ALIGNED=aligned, EVEN=even)
        if launch is None:
            return False
        stream = self._engine.driver.stream(device)
        table = self._table(kind, stream, group, format_)
        workspace = self._engine.workspace(group.first, stream, table.programs, len(group.rows))
        return self._engine.run(
            launch, group.first, table.programs, stream,
            table.memory.data_ptr(), len(group.rows), workspace.rows, workspace.counters, self._kernel.bounds[format_.work],
        )  # fmt: skip

    def _table(self, kind: Kind, stream: int, group: TensorGroup, format_: ElementFormat) -> SentTable:
        key = (kind, stream, tuple(group.rows))
        table = self._tables.get(key)
        if table is not None and table.addresses == group.addresses and table.sizes == group.sizes:
            self._tables.move_to_end(key)
            return table
        numbers, programs = contents(group, format_.lane(kind[2]), self._engine)
        with beneath():
            memory = _sent(numbers, group.first.device, None if table is None else table.memory)
        self._tables[key] = SentTable(memory, group.addresses, group.sizes, programs)
        if len(self._tables) > MOST_TABLES:
            self._tables.popitem(last=False)
        return self._tables[key]


def _gathered(
    tensors: Sequence[Tensor], pages: Sequence[Tensor], rows: Sequence[int]
) -> tuple[dict[Kind, TensorGroup], list[int]]:
    """Dense tensors grouped by launch, and the indices of the other tensors."""
    groups: dict[Kind, TensorGroup] = {}
    left: list[int] = []
    bases: dict[int, int] = {}
    for place, (x, page, row) in enumerate(zip(tensors, pages, rows, strict=True)):
        if not is_listed(x):
            left.append(place)
            continue
        address, n = x.data_ptr(), x.numel()
        kind = (x.get_device(), x.dtype, not address % READ, not n % EVEN)
        group = groups.get(kind)
        if group is None:
            group = groups[kind] = TensorGroup(x, [], [], [], [])
        base = bases.get(id(page))
        if base is None:
            base = bases[id(page)] = page.data_ptr()
        group.addresses.append(address)
        group.sizes.append(n)
        group.rows.append(base + row * ROW_BYTES)
        group.places.append(place)
    return groups, left


def is_listed(x: Tensor) -> bool:
    """Whether ``x`` can be in a list: a dense tensor of torch's own types, in memory, of a dtype that the kernel reads."""
    plain = type(x) in PLAIN and x.layout is torch.strided and x.dtype in FORMATS
    return plain and x.is_contiguous() and not x.is_neg() and not x.is_meta and has_memory(x)


def contents(group: TensorGroup, lane: int, engine: FusedEngine) -> tuple[NDArray[np.int64], int]:
    """The table, int64, and the number of programs. It has ``FIELDS`` columns, then the index of each program's tensor."""
    cuts = [engine.cuts.get((size, lane)) or engine.cut(size, lane) for size in group.sizes]
    parts = np.array([one.parts for one in cuts])
    before = np.cumsum(parts) - parts
    tiles, whose = [one.tiles for one in cuts], np.repeat(np.arange(len(parts)), parts)
    columns = [group.addresses, group.sizes, group.rows, parts, tiles, before, whose]
    return np.concatenate([np.asarray(column, dtype=np.int64) for column in columns]), int(parts.sum())


def _sent(numbers: NDArray[np.int64], device: torch.device, room: Tensor | None) -> Tensor:
    """``numbers`` in the device's memory, in ``room`` if they fit. Does not wait."""
    if device.type == "cpu":
        return persistent(device, lambda: torch.from_numpy(numbers))
    pinned = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
    pinned.numpy()[:] = numbers
    if room is None or len(room) < len(numbers):
        room = persistent(device, lambda: torch.empty(len(numbers), dtype=torch.int64, device=device))
    room[: len(numbers)].copy_(pinned, non_blocking=True)
    return room
