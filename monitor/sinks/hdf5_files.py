"""Finds the files of the ``hdf5`` format in a directory, by name, and reads their steps and rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import h5py
import pyarrow as pa

from monitor.sinks.arrow import ShardMetadata
from monitor.sinks.files import StepSpan
from monitor.sinks.hdf5_read import NotAShardError, read_metadata, read_rows, read_span, read_steps
from monitor.sinks.step_spool import SpoolBlock

_SHARD_NAME: Final = re.compile(r"metrics_(\d+)-(\d+)(?:\.\d+)?\.h5")
_PART_NAME: Final = re.compile(r"\.metrics_(\d+)-(\d+)\.h5\.part")
_DRAFT_NAME: Final = re.compile(r"\.metrics_\d+-\d+(?:\.\d+)?\.h5(?:\.part)?\.draft")
_SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"


def shard_name(steps: StepSpan, copy: int = 1) -> str:
    return f"metrics_{steps.first}-{steps.last}{f'.{copy}' if copy > 1 else ''}.h5"


def part_name(shard: str) -> str:
    """The name of the hidden file that becomes ``shard``."""
    return f".{shard}.part"


def is_shard(path: Path) -> bool:
    """Whether the file is HDF5, and not the blocks of an unfinished shard."""
    with open(path, "rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


def write_hidden(path: Path, content: bytes) -> None:
    """Replace the file's content atomically. The file is unchanged if that fails."""
    draft = path.with_name(f".{path.name.removeprefix('.')}.draft")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


@dataclass(frozen=True, slots=True)
class Hdf5Shard:
    """A visible file of this format.

    Attributes:
        span: The first and the last step.
        size: In bytes.
    """

    path: Path
    facts: ShardMetadata
    span: StepSpan
    size: int

    @classmethod
    def read(cls, path: Path) -> Hdf5Shard | None:
        """The shard; None if the file is missing, not accessible, not of this format, or has no rows."""
        try:
            content = path.read_bytes()
            with _opened(content) as file:
                span = read_span(file)
                return cls(path, read_metadata(file), span, len(content)) if span else None
        except (FileNotFoundError, IsADirectoryError, PermissionError, NotAShardError):
            return None

    def rows(self, steps: StepSpan) -> pa.Table:
        """The rows of these steps, kind by kind."""
        with _opened(self.path.read_bytes()) as file:
            return read_rows(file, steps=steps)

    def steps(self) -> set[int]:
        """The steps that have rows in the file."""
        with _opened(self.path.read_bytes()) as file:
            return read_steps(file)

    def blocks(self, steps: StepSpan) -> list[SpoolBlock]:
        """The rows of these steps as blocks."""
        rows = self.rows(steps)
        return [SpoolBlock(batch, self.facts.only(steps)) for batch in rows.combine_chunks().to_batches()]


class ShardIndex:
    """The files of a directory, by the records whose steps they hold.

    Files named after a record are not stored: there may be very many, and their names follow from the record. The other files
    are listed once.
    """

    def __init__(self, directory: Path, steps_per_record: int) -> None:
        self._directory = directory
        self._steps_per_record = steps_per_record
        self._others: dict[Path, StepSpan] | None = None

    def add(self, path: Path) -> None:
        self._known().update(self._otherwise([path.name]))

    def of(self, record: StepSpan) -> list[Path]:
        """The files whose names state steps of this record only; first the file named after the record."""
        return self._existing(record, [path for path, steps in self._known().items() if record.holds(steps)])

    def shards_of(self, record: StepSpan, *, anywhere: bool = False) -> list[Hdf5Shard]:
        """The shards among the files ``of`` this record; with ``anywhere`` also those that hold steps of other records."""
        others = [path for path, steps in self._known().items() if steps.meets(record)]
        paths = self._existing(record, others) if anywhere else self.of(record)
        return [shard for path in paths if (shard := Hdf5Shard.read(path)) is not None]

    def _existing(self, record: StepSpan, others: list[Path]) -> list[Path]:
        return [path for path in (self._directory / shard_name(record), *others) if os.path.lexists(path)]

    def _known(self) -> dict[Path, StepSpan]:
        if self._others is None:
            self._others = dict(self._otherwise(_listed(self._directory)))
        return self._others

    def _otherwise(self, names: list[str]) -> Iterator[tuple[Path, StepSpan]]:
        """The files that are not named after a record."""
        for name in names:
            if match := _SHARD_NAME.fullmatch(name):
                steps = StepSpan(int(match[1]), int(match[2]))
                if name != shard_name(StepSpan.of_record(steps.first, self._steps_per_record)):
                    yield self._directory / name, steps


def shards_in(directory: Path) -> Iterator[tuple[Path, StepSpan]]:
    """The files that a reader sees, with the steps in their names."""
    return _matching(_SHARD_NAME, directory)


def parts_in(directory: Path) -> Iterator[tuple[Path, StepSpan]]:
    """The hidden unfinished files, with their records."""
    return _matching(_PART_NAME, directory)


def drafts_in(directory: Path) -> list[Path]:
    """The hidden files that were to replace other files."""
    return [directory / name for name in _listed(directory) if _DRAFT_NAME.fullmatch(name)]


def _matching(pattern: re.Pattern[str], directory: Path) -> Iterator[tuple[Path, StepSpan]]:
    for name in _listed(directory):
        if match := pattern.fullmatch(name):
            yield directory / name, StepSpan(int(match[1]), int(match[2]))


def _listed(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _opened(content: bytes) -> h5py.File:
    try:
        return h5py.File.in_memory(content)
    except (OSError, RuntimeError, ValueError) as error:
        raise NotAShardError(str(error)) from error
