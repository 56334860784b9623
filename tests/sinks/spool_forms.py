"""The formats with one file for all kinds of a record, for the tests of what they share."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pyarrow as pa
import pytest
from sink_rows import Measured, Rank

from monitor.sinks import hdf5, parquet
from monitor.sinks.files import ALL_STEPS
from monitor.sinks.spool import SpooledSink
from monitor.stats.partials import COUNT, MAX, SMALLS, SUM, SUMSQ


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


W = {"grad_reduced": [Measured("w")]}
BOTH = {"actv": [Measured("l.output", micro_step=0)], "grad_reduced": [Measured("w")]}
ATTENTION = Measured("h.0.attn", micro_step=0, numbers={COUNT: 4, SUM: 6.0, SUMSQ: 3.0})
MATRIX = Measured("h.0.mlp.weight", numbers={COUNT: 20, SMALLS: 1, SUMSQ: 25.0, MAX: 2.0})
AGREEING = Measured("w", numbers={COUNT: 8, SUM: 6.0})
SMALL = [0.0, 2.0**-30, -0.75, 3.0, math.inf]
COUNTED = Measured("w", SMALL, magnitudes=True)
SIGNED = Measured("w", histogram=[0, 3] + [0] * 63 + [2])
"""A row of each sort: of a feature of attention, of a matrix, of an agreement of signs, with a histogram of either sort."""

FORMS = {"hdf5": Form(hdf5, hdf5.Hdf5Sink), "parquet": Form(parquet, parquet.ParquetSink)}


def write(sink: SpooledSink, rank: Rank, *steps: int, kinds: dict[str, list[Measured]] = W) -> None:
    """Write steps with the same rows."""
    for step in steps:
        sink.write(rank.step(step, kinds))


def read(path: Path) -> pa.Table:
    """The rows of a file."""
    return hdf5.read_hdf5(path) if path.suffix == ".h5" else parquet.rows_of(path, ALL_STEPS)
