"""The formats with one file for all kinds of a record, for the tests of what they share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pyarrow as pa
import pytest

from monitor.sinks import hdf5, parquet
from monitor.sinks.files import ALL_STEPS
from monitor.sinks.spool import SpooledSink


class Form(NamedTuple):
    """A format."""

    module: ModuleType
    sink: type[SpooledSink]

    def file(self, steps: str) -> str:
        """The name of the file of these steps."""
        return f"metrics_{steps}{self.module.FORMAT.suffix}"

    def part(self, steps: str) -> str:
        return f".{self.file(steps)}.part"

    def limit(self, patch: pytest.MonkeyPatch, most_bytes: int) -> None:
        """Cut records whose parts are larger."""
        patch.setattr(self.module, "FORMAT", replace(self.module.FORMAT, most_bytes=most_bytes))


FORMS = {"hdf5": Form(hdf5, hdf5.Hdf5Sink), "parquet": Form(parquet, parquet.ParquetSink)}


def read(path: Path) -> pa.Table:
    """The rows of a file."""
    return hdf5.read_hdf5(path) if path.suffix == ".h5" else parquet.rows_of(path, ALL_STEPS)
