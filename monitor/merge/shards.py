"""The shards of a rank, of any format, read into columns of one form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import h5py
import pyarrow as pa

from monitor.merge.discovery import SetAside, leads_out
from monitor.sinks import hdf5_files, shard_names
from monitor.sinks.csv import read_csv
from monitor.sinks.hdf5_content import NotAShardError, read_facts, read_rows
from monitor.sinks.measurements import IDENTITY, PARTIALS, SUMS
from monitor.sinks.shard_names import Steps
from monitor.sinks.written import BEGINNING
from monitor.stats.ops import NUMERIC_OPS

COLUMNS: Final = pa.schema(
    [
        *((name, kind) for name, kind in IDENTITY.items() if name != "kind"),
        *((name, pa.float64() if name in SUMS else pa.int64()) for name in PARTIALS),
        *((op, pa.float64()) for op in NUMERIC_OPS if op not in PARTIALS),
    ]
)
"""A row as it was measured: its partials, or where only ops were kept those, and null in place of what is not known.

``min`` and ``max`` are partials in the one case, over the finite elements, and ops in the other.
"""

BYTES_A_ROW: Final = 100
"""Of CSV, about."""

FAR: Final = 2**62
"""Beyond any step."""

NO_STEPS: Final = "its name is not that of steps"

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
    steps: Steps
    rows: int

    @property
    def exact(self) -> bool:
        """Whether it holds partials."""
        return self.path.suffix == ".h5"

    def read(self, steps: Steps) -> pa.Table:
        """Its rows of these steps, in the columns ``COLUMNS``.

        Raises:
            ForeignError: it is torn, or not one of ours.
        """
        return _read_hdf5(self, steps) if self.exact else _read_csv(self, steps)


def shards_in(directory: Path, rank: int) -> tuple[list[Shard], list[SetAside]]:
    """The visible shards of a rank, and the files that look like ones and are not."""
    found: list[Shard] = []
    aside = [
        SetAside(str(path), "a kill left it unfinished: a run that goes on in its directory recovers it")
        for path in _parts(directory)
    ]
    for named in shard_names.shards_in(directory):
        if leads_out(named.path):
            aside.append(SetAside(str(named.path), "it leads to another directory"))
        elif not _possible(named.steps):
            aside.append(SetAside(str(named.path), NO_STEPS))
        elif _KIND.fullmatch(named.kind):
            found.append(Shard(named.path, named.kind, named.steps, named.path.stat().st_size // BYTES_A_ROW + 1))
    for path, steps in hdf5_files.shards_in(directory):
        try:
            found.extend(_kinds_of(path, steps, rank))
        except (ForeignError, NotAShardError, OSError) as error:
            aside.append(SetAside(str(path), _reason(error)))
    return found, aside


def _possible(steps: Steps) -> bool:
    return steps.first <= steps.last < FAR


def _parts(directory: Path) -> Iterator[Path]:
    yield from (named.path for named in shard_names.parts_in(directory))
    yield from (path for path, _ in hdf5_files.parts_in(directory))


def _kinds_of(path: Path, steps: Steps, rank: int) -> Iterator[Shard]:
    if leads_out(path):
        raise ForeignError("it leads to another directory")
    if not _possible(steps):
        raise ForeignError(NO_STEPS)
    with h5py.File(path, "r", locking=False) as file:
        if read_facts(file).rank != rank:
            raise ForeignError(f"it is of rank {read_facts(file).rank}")
        rows = {kind: _length(file, kind) for kind in file}
    for kind, length in rows.items():
        yield Shard(path, kind, steps, length)


def _length(file: h5py.File, kind: str) -> int:
    if not _KIND.fullmatch(kind):
        raise ForeignError(f"{kind!r} is not a kind")
    step = file.get(f"{kind}/step")
    if not isinstance(step, h5py.Dataset) or len(step.shape) != 1:
        raise ForeignError(f"{kind} has no steps")
    return int(step.shape[0])


def _read_hdf5(shard: Shard, steps: Steps) -> pa.Table:
    try:
        with h5py.File(shard.path, "r", locking=False) as file:
            rows = read_rows(file, [shard.kind], steps)
    except (NotAShardError, OSError) as error:
        raise ForeignError(_reason(error)) from error
    _check_steps(rows, shard)
    return _in_form({name: rows[name] for name in rows.column_names if name != "kind"}, len(rows))


def _read_csv(shard: Shard, steps: Steps) -> pa.Table:
    try:
        _check_ends(shard.path)
        rows = read_csv(shard.path)
    except (OSError, pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise ForeignError(_reason(error)) from error
    if not {"vpp_stage", "name", "step"} <= set(rows.column_names) or any(
        rows[name].null_count for name in ("vpp_stage", "step")
    ):
        raise ForeignError("a row lacks its chunk, its name or its step")
    _check_steps(rows, shard)
    step = rows["step"].to_numpy()
    rows = rows.filter((step >= steps.first) & (step <= steps.last))
    columns = {name: rows[name] for name in rows.column_names if name in COLUMNS.names}
    return _in_form(columns, len(rows))


def _in_form(columns: Mapping[str, pa.ChunkedArray], length: int) -> pa.Table:
    return pa.table(
        [_cast(columns[one.name], one.type) if one.name in columns else pa.nulls(length, one.type) for one in COLUMNS],
        schema=COLUMNS,
    )


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
