"""The file formats that ranks write, with everything that differs between them outside of their sinks: one entry a format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

Histogram = Literal["magnitudes", "signed"]
"""What a row may have a histogram of: magnitudes with the op ``magnitude_histogram``, or signed numbers."""


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        sink: ``module:class`` of its sink, which is imported when the first recording writes it: pyarrow, h5py and protobuf
            are loaded only where they are used.
        recovery: The module that completes the files of an earlier process, if a kill can leave unfinished ones or lose steps
            that waited in memory. Its functions are those of ``monitor.sinks.files.CrashRecovery``.
        files: A rank's files of a record of steps: one for each kind, one for all kinds, or none that grows with the record.
        bytes_per_row: With six ops and names of fifty characters, measured by ``bench/formats.py``.
        bytes_per_histogram: More bytes of a row with a histogram, measured with normally distributed numbers. What is not
            named is not written.
        steps_per_record: By default, where the configuration does not set ``step_count_per_record``.
        merged: Whether ``trainermon merge`` can read its rows back; the reader is in ``monitor/merge/tables.py``.
    """

    sink: str
    recovery: str | None = None
    files: Literal["kind", "record", "none"] = "none"
    bytes_per_row: float = 0.0
    bytes_per_histogram: Mapping[Histogram, float] = field(default_factory=dict)
    steps_per_record: int = 1
    merged: bool = False


FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        "csv": Format(
            sink="monitor.sinks.csv:CsvSink",
            recovery="monitor.sinks.csv_files",
            files="kind",
            bytes_per_row=110.0,
            bytes_per_histogram={"magnitudes": 220.0},
            merged=True,
        ),
        "hdf5": Format(
            sink="monitor.sinks.hdf5:Hdf5Sink",
            recovery="monitor.sinks.hdf5",
            files="record",
            bytes_per_row=35.0,
            bytes_per_histogram={"magnitudes": 45.0, "signed": 95.0},
            steps_per_record=100,  # a file a step is a burden on a shared file system
            merged=True,
        ),
        "parquet": Format(
            sink="monitor.sinks.parquet:ParquetSink",
            recovery="monitor.sinks.parquet",
            files="record",
            bytes_per_row=50.0,
            bytes_per_histogram={"magnitudes": 25.0, "signed": 65.0},
            steps_per_record=100,
            merged=True,
        ),
        "tensorboard": Format(
            sink="monitor.sinks.tensorboard:TensorBoardSink",
            bytes_per_row=500.0,
            bytes_per_histogram={"magnitudes": 630.0, "signed": 2200.0},
        ),
        "api": Format(sink="monitor.sinks.memory:MemorySink"),
    }
)
"""By the name that the configuration uses. Without a recovery, a written step is in a file, complete."""
