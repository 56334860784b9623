"""The output formats: how a sink of each is made, and what recovers its files after a crash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from monitor.sinks.protocol import Sink, SinkContext
from monitor.sinks.recovery import CrashRecovery

__all__ = ["FORMATS", "RECOVERIES", "Recovery", "Sink", "SinkContext", "make_sink"]


def _csv(context: SinkContext) -> Sink:
    from monitor.sinks.csv import CsvSink  # pyarrow is loaded only where it writes

    return CsvSink(context)


def _hdf5(context: SinkContext) -> Sink:
    from monitor.sinks.hdf5 import Hdf5Sink  # and h5py

    return Hdf5Sink(context)


def _tensorboard(context: SinkContext) -> Sink:
    from monitor.sinks.tensorboard import TensorBoardSink  # and protobuf

    return TensorBoardSink(context)


def _api(context: SinkContext) -> Sink:
    from monitor.sinks.memory import MemorySink

    return MemorySink(context)


def _csv_recovery() -> CrashRecovery:
    from monitor.sinks import csv_recovery

    return csv_recovery


def _hdf5_recovery() -> CrashRecovery:
    from monitor.sinks import hdf5_recovery

    return hdf5_recovery


FORMATS: Final[Mapping[str, Callable[[SinkContext], Sink]]] = MappingProxyType(
    {"csv": _csv, "hdf5": _hdf5, "tensorboard": _tensorboard, "api": _api}
)
"""Makes the sink of each format, by the format's name in the configuration."""

RECOVERIES: Final[Mapping[str, Callable[[], CrashRecovery]]] = MappingProxyType({"csv": _csv_recovery, "hdf5": _hdf5_recovery})
"""Recovers the files of an earlier process. The other formats need no recovery: they hide no files, and every visible step is
whole."""


def make_sink(format: str, context: SinkContext) -> Sink:  # noqa: A002 - the configuration's own word
    """A new sink of this format. It has opened no file yet.

    Raises:
        ValueError: if there is no such format.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} does not exist; the formats are {', '.join(FORMATS)}")
    return FORMATS[format](context)
