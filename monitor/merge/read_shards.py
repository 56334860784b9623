"""The shards of a rank, of any format, read into columns of one form."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import h5py
import pyarrow as pa

from monitor.merge.discovery import SetAside, leads_out
from monitor.merge.tables import Columns
from monitor.series import DIRECTION_KIND
from monitor.sinks import files, hdf5_files
from monitor.sinks.arrow import FILLED, HISTOGRAM, IDENTITY, parsed
from monitor.sinks.csv import read_csv
from monitor.sinks.csv_files import BEGINNING
from monitor.sinks.files import StepSpan
from monitor.sinks.hdf5_files import NotAShardError, read_kind, read_lengths, read_metadata
from monitor.stats.histograms import MAGNITUDES

_IDENTITY: Final = [(name, kind) for name, kind in IDENTITY.items() if name != "kind"]

_SAME_OF_A_SCALAR: Final = ("mean", "min", "max", "norm", "absmax")
"""Ops that of a share are the share itself."""

BYTES_A_ROW: Final = 100
"""Of CSV, about."""

FAR: Final = 2**62
"""Beyond any step."""

NO_STEPS: Final = "its name is not that of steps"

UNFINISHED: Final = "unfinished: the run was killed. A run with append_output into its directory recovers it"

_KIND: Final = re.compile(r"[a-z][a-z_]{0,63}")


class ForeignError(Exception):
    """The file is not one of ours, or is torn. The message says in what."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A file with rows of one kind.

    Attributes:
        steps: That it may hold.
        rows: How many it holds, of CSV about.
    """

    path: Path
    kind: str
    steps: StepSpan
    rows: int

    @property
    def exact(self) -> bool:
        """Whether it holds partials."""
        return self.path.suffix == ".h5"

    def read(self, steps: StepSpan, columns: Columns) -> pa.Table:
        """Its rows of these steps, with the columns of rows that are exact if it is, otherwise with those of rounded ones.

        Raises:
            ForeignError: it is torn, or not one of ours.
        """
        return _read_hdf5(self, steps, columns) if self.exact else _read_csv(self, steps, columns)


def shards_in(directory: Path, rank: int) -> tuple[list[Shard], list[SetAside]]:
    """The visible shards of a rank, and the files that look like ones and are not."""
    found, aside = csv_shards_in(directory)
    aside += [SetAside(str(path), UNFINISHED) for path, _ in hdf5_files.parts_in(directory)]
    for path, steps in hdf5_files.shards_in(directory):
        try:
            found.extend(_kinds_of(path, steps, rank))
        except (ForeignError, NotAShardError, OSError) as error:
            aside.append(SetAside(str(path), _reason(error)))
    return found, aside


def csv_shards_in(directory: Path, kinds: Collection[str] | None = None) -> tuple[list[Shard], list[SetAside]]:
    """Those of CSV alone.

    Args:
        kinds: Those to look for; None: all.
    """
    found: list[Shard] = []
    aside = [
        SetAside(str(named.path), UNFINISHED) for named in files.parts_in(directory) if kinds is None or named.kind in kinds
    ]
    for named in files.shards_in(directory):
        if not _KIND.fullmatch(named.kind) or (kinds is not None and named.kind not in kinds):
            continue
        if (reason := _refused(named.path)) is not None:
            aside.append(SetAside(str(named.path), reason))
        elif not _possible(named.steps):
            aside.append(SetAside(str(named.path), NO_STEPS))
        else:
            found.append(Shard(named.path, named.kind, named.steps, named.path.stat().st_size // BYTES_A_ROW + 1))
    return found, aside


def _possible(steps: StepSpan) -> bool:
    return steps.first <= steps.last < FAR


def _refused(path: Path) -> str | None:
    """Why a file is not to be opened, if it is not. To open a pipe would wait for somebody to write to it."""
    if leads_out(path):
        return "it leads to another directory"
    return None if path.is_file() else "it is not a file"


def _kinds_of(path: Path, steps: StepSpan, rank: int) -> Iterator[Shard]:
    if (reason := _refused(path)) is not None:
        raise ForeignError(reason)
    if not _possible(steps):
        raise ForeignError(NO_STEPS)
    with h5py.File(path, "r", locking=False) as file:
        if read_metadata(file).rank != rank:
            raise ForeignError(f"it is of rank {read_metadata(file).rank}")
        rows = read_lengths(file)
    for kind, length in rows.items():
        if not _KIND.fullmatch(kind):
            raise ForeignError(f"{kind!r} is not a kind")
        yield Shard(path, kind, steps, length)


def _read_hdf5(shard: Shard, steps: StepSpan, columns: Columns) -> pa.Table:
    try:
        with h5py.File(shard.path, "r", locking=False) as file:
            rows = read_kind(file, shard.kind, steps)
    except (NotAShardError, OSError) as error:
        raise ForeignError(_reason(error)) from error
    _check_steps(rows, shard)
    schema = columns.exact(_IDENTITY)
    if columns.histogram and HISTOGRAM not in rows.column_names:
        rows = rows.append_column(HISTOGRAM, pa.nulls(len(rows), FILLED))
    return rows.select(schema.names).cast(schema)


def csv_rows(shard: Shard) -> pa.Table:
    """All rows of a file of CSV, with all of its columns, as ``read_csv`` types them.

    Raises:
        ForeignError: it is torn, or not one of ours.
    """
    try:
        _check_ends(shard.path)
        rows = read_csv(shard.path)
        names = rows.column_names
    except (OSError, pa.ArrowInvalid, pa.ArrowKeyError, UnicodeDecodeError) as error:
        raise ForeignError(_reason(error)) from error
    if len(set(names)) < len(names):
        raise ForeignError("two of its columns have the same name")
    if not {"vpp_stage", "name", "step"} <= set(names) or any(rows[name].null_count for name in ("vpp_stage", "step")):
        raise ForeignError("a row lacks its chunk, its name or its step")
    _check_steps(rows, shard)
    return rows


def _read_csv(shard: Shard, steps: StepSpan, columns: Columns) -> pa.Table:
    rows = csv_rows(shard)
    step = rows["step"].to_numpy()
    inside = (step >= steps.first) & (step <= steps.last)
    rows = rows if inside.all() else rows.filter(inside)
    schema, found = columns.rounded(_IDENTITY), _found(rows, columns)
    known = [_cast(found[one.name], one.type) if one.name in found else pa.nulls(len(rows), one.type) for one in schema]
    return pa.table(known, schema=schema)


def _found(rows: pa.Table, columns: Columns) -> dict[str, pa.ChunkedArray]:
    """The columns of a file of CSV by the names that they have here."""
    found = {name: rows[name] for name in rows.column_names}
    if columns.kind == DIRECTION_KIND:
        share = next((op for op in _SAME_OF_A_SCALAR if op in found), None)
        return found if share is None else {**found, DIRECTION_KIND: found[share]}
    if columns.histogram and MAGNITUDES in found:
        try:
            found[HISTOGRAM] = pa.chunked_array([parsed(found[MAGNITUDES])])
        except (ValueError, pa.ArrowInvalid) as error:
            raise ForeignError(_reason(error)) from error
    return found


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_dictionary(kind) and not pa.types.is_dictionary(column.type):
        return column.dictionary_encode().cast(kind)
    return column.cast(kind)


def _check_ends(path: Path) -> None:
    with open(path, "rb") as file:
        if file.read(len(BEGINNING)) != BEGINNING:
            raise ForeignError("it does not begin like a shard")
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            raise ForeignError("it is cut off in the middle of a row")


def _check_steps(rows: pa.Table, shard: Shard) -> None:
    step = rows["step"].to_numpy()
    if len(step) and not shard.steps.first <= step.min() <= step.max() <= shard.steps.last:
        raise ForeignError(
            f"it holds steps {step.min()} to {step.max()}, and is called after {shard.steps.first} to {shard.steps.last}"
        )


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:500]
