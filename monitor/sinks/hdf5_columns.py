"""Columns of numbers, histograms and tables of text in an HDF5 file, read through h5py's lower interface.

A shard of few rows is nearly all columns, some twenty for each kind, and a job has thousands of shards: read through
``h5py.Dataset`` and its checks the columns of a kind take 8 ms however few rows there are, through what is used here 4.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pyarrow as pa
from h5py import h5d, h5g, h5l, h5o, h5s
from numpy.typing import NDArray


class Column:
    """A dataset of an entry a row, whose content is in this very file, and was written.

    Args:
        inner: The shape of an entry: nothing of a number. Entries that are no numbers may be left out, and are zeros then.

    Raises:
        KeyError: there is no such name in the group.
        TypeError: what has the name is no dataset, or is a link that leads elsewhere.
        ValueError: its shape is another, its content lies elsewhere, or it has more rows than were written.
    """

    def __init__(self, group: h5g.GroupID, name: str, *inner: int) -> None:
        self._dataset = _own(group, name, h5d.DatasetID, "Dataset")
        created, shape = self._dataset.get_create_plist(), self._dataset.shape
        layout = created.get_layout()
        if tuple(shape[1:]) != inner or not shape or layout == h5d.VIRTUAL or created.get_external_count():
            raise ValueError(f"{_path(group, name)} is not a plain column")
        self._length, self._inner = int(shape[0]), inner
        if not inner and layout == h5d.CHUNKED and self._dataset.get_num_chunks() * created.get_chunk()[0] < self._length:
            raise ValueError(f"{_path(group, name)} says that it has more rows than it has")

    def __len__(self) -> int:
        return self._length

    def read(self, first: int = 0, end: int | None = None) -> NDArray[Any]:
        """The rows from ``first`` to before ``end``."""
        count = (self._length if end is None else end) - first
        values = np.empty((count, *self._inner), dtype=self._dataset.dtype)
        if count == self._length:
            self._dataset.read(h5s.ALL, h5s.ALL, values)
        elif count:
            rows = self._dataset.get_space()
            rows.select_hyperslab((first, *(0 for _ in self._inner)), values.shape)
            self._dataset.read(h5s.create_simple(values.shape), rows, values)
        return values

    def texts(self) -> pa.StringArray:
        """All rows, as UTF-8."""
        if self._dataset.dtype.kind == "S" and self._length:  # of one length each, as we write it
            return pa.array(self.read(), type=pa.binary()).cast(pa.string())
        return pa.array(h5py.Dataset(self._dataset).asstr()[...].tolist(), type=pa.string())


def group_in(file: h5g.GroupID, name: str) -> h5g.GroupID:
    """The group of this name in this very file.

    Raises:
        KeyError: there is none.
        TypeError: what has the name is no group, or is a link that leads elsewhere.
    """
    return _own(file, name, h5g.GroupID, "Group")


def _own(group: h5g.GroupID, name: str, kind: type[Any], called: str) -> Any:
    encoded = name.encode()
    if not group.links.exists(encoded):
        raise KeyError(f"{_path(group)} has no {name}")
    hard = group.links.get_info(encoded).type == h5l.TYPE_HARD
    found = h5o.open(group, encoded) if hard else None
    if not isinstance(found, kind):
        raise TypeError(f"{_path(group)} has no {called} {name}")
    return found


def _path(group: h5g.GroupID, name: str = "") -> str:
    path: str = h5py.Group(group).name
    return f"{path}/{name}" if name else path
