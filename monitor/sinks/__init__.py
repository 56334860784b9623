"""Formats, one module each, behind the protocol ``Sink``."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from monitor.formats import FORMATS
from monitor.sinks.files import CrashRecovery
from monitor.sinks.protocol import Sink, SinkContext

__all__ = ["CrashRecovery", "Sink", "SinkContext", "make_sink", "recovery_of"]


def recovery_of(name: str) -> CrashRecovery | None:
    """What puts the files of an earlier process in order; None if a format leaves nothing to put in order."""
    module = FORMATS[name].recovery
    return cast("CrashRecovery", import_module(module)) if module else None


def make_sink(format: str, context: SinkContext) -> Sink:  # noqa: A002 - the configuration's own word
    """A sink of this format, which has opened nothing yet.

    Raises:
        ValueError: if there is no such format.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} does not exist; the formats are {', '.join(FORMATS)}")
    module, _, made = FORMATS[format].sink.partition(":")
    return cast("Sink", getattr(import_module(module), made)(context))
