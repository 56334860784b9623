"""What an HDF5 shard holds, read back as a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import h5py
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from monitor.series import NO_MICRO_STEP
from monitor.sinks.facts import SCHEMA_VERSION, Facts
from monitor.sinks.hdf5_image import TABLES
from monitor.sinks.measurements import SCHEMA
from monitor.sinks.shard_names import Steps

ALL_STEPS: Final = Steps(0, 2**63 - 1)

_FOREIGN: Final = (KeyError, TypeError, ValueError, OSError, RuntimeError, UnicodeDecodeError)
"""What a file that is not ours, or is damaged, makes h5py and the checks below raise."""


class NotAShardError(ValueError):
    """The file is not one of ours, or is damaged. The message says in what."""


def read_facts(file: h5py.File) -> Facts:
    """What the attributes say.

    Raises:
        NotAShardError: they are not those of a shard.
    """
    try:
        version = int(file.attrs["schema_version"])
        if version != SCHEMA_VERSION:
            raise NotAShardError(f"its schema version is {version}, and this version of the monitor reads {SCHEMA_VERSION}")
        ops = tuple(str(op) for op in file.attrs["ops"])
        marked = (tuple(np.asarray(file.attrs[name], dtype=np.int64).tolist()) for name in ("skipped", "incomplete"))
        return Facts(int(file.attrs["rank"]), float(file.attrs["eps"]), ops, *marked)
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_rows(file: h5py.File, kinds: Collection[str] | None = None, steps: Steps = ALL_STEPS) -> pa.Table:
    """The rows, kind by kind.

    Args:
        kinds: Those to read; None: all. One that is not there has no rows.

    Raises:
        NotAShardError: they are not those of a shard.
    """
    facts = read_facts(file)
    schema = SCHEMA.with_metadata(facts.only(steps).packed())
    try:
        tables = [pa.Table.from_arrays(_columns(kind, group, steps), schema=schema) for kind, group in _groups(file, kinds)]
        return pa.concat_tables(tables).unify_dictionaries() if tables else schema.empty_table()
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_steps(file: h5py.File) -> set[int]:
    """The steps of which there are rows.

    Raises:
        NotAShardError: the file is not a shard.
    """
    try:
        return {step for _, group in _groups(file, None) for step in np.unique(_dataset(group, "step")[...]).tolist()}
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def read_span(file: h5py.File) -> Steps | None:
    """The first and the last step of which there are rows; None if there are none.

    Raises:
        NotAShardError: the file is not a shard.
    """
    try:
        steps = [_dataset(group, "step") for _, group in _groups(file, None)]
        ends = [(int(step[0]), int(step[-1])) for step in steps if len(step)]
        return Steps(min(first for first, _ in ends), max(last for _, last in ends)) if ends else None
    except _FOREIGN as error:
        raise _not_a_shard(error) from error


def _groups(file: h5py.File, kinds: Collection[str] | None) -> Iterator[tuple[str, h5py.Group]]:
    for kind in file:
        if kinds is None or kind in kinds:
            yield kind, _own(file, kind, h5py.Group)


def _columns(kind: str, group: h5py.Group, steps: Steps) -> list[pa.Array]:
    rows = _rows_of(_dataset(group, "step")[...], steps)
    length = len(_dataset(group, "step"))
    return [_column(field, kind, group, rows, length) for field in SCHEMA]


def _rows_of(step: NDArray[np.int64], steps: Steps) -> slice:
    if (step[1:] < step[:-1]).any():
        raise ValueError("its steps are not in order")
    return slice(*np.searchsorted(step, [steps.first, steps.last + 1 if steps.last < ALL_STEPS.last else steps.last]).tolist())


def _column(field: pa.Field, kind: str, group: h5py.Group, rows: slice, length: int) -> pa.Array:
    if field.name == "kind":
        return _texts(np.array([kind]), np.zeros(rows.stop - rows.start, dtype=np.int64))
    name, table = TABLES.get(field.name, (field.name, None))
    dataset = _dataset(group, name)
    if len(dataset) != length:
        raise ValueError(f"{kind}/{name} has {len(dataset)} rows and not {length}")
    numbers = dataset[rows]
    if table is not None:
        return _texts(_dataset(group, table).asstr()[...], numbers)
    wanted = np.float64 if field.type == pa.float64() else np.int64
    return pa.array(numbers.astype(wanted, casting="safe"), mask=numbers == NO_MICRO_STEP if name == "micro_step" else None)


def _texts(texts: NDArray[Any], numbers: NDArray[np.int64]) -> pa.DictionaryArray:
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(texts):
        raise ValueError("a number stands for no text")
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), pa.array(texts.tolist(), type=pa.string()))


def _dataset(group: h5py.Group, name: str) -> h5py.Dataset:
    """One whose content is in this file and was written."""
    dataset = _own(group, name, h5py.Dataset)
    if len(dataset.shape) != 1 or dataset.is_virtual or dataset.external:
        raise ValueError(f"{dataset.name} is not a plain column")
    if dataset.chunks and dataset.id.get_num_chunks() * dataset.chunks[0] < len(dataset):
        raise ValueError(f"{dataset.name} says that it has more rows than it has")
    return dataset


def _own(group: h5py.Group, name: str, kind: type[Any]) -> Any:
    """What stands under ``name`` in this very file: no link leads out of it."""
    if name not in group:
        raise KeyError(f"{group.name} has no {name}")
    found = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
    if not isinstance(found, kind):
        raise TypeError(f"{group.name} has no {kind.__name__} {name}")
    return found


def _not_a_shard(error: Exception) -> NotAShardError:
    return error if isinstance(error, NotAShardError) else NotAShardError(str(error.args[0]) if error.args else repr(error))
