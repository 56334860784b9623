"""``PrecisionDebugger`` for MindSpore."""

from __future__ import annotations

from typing import ClassVar

from monitor.dump import debugger
from monitor.dump.backend import DumpBackend
from monitor.mindspore.dump import backend


class PrecisionDebugger(debugger.PrecisionDebugger):
    __doc__ = debugger.PrecisionDebugger.__doc__

    _backend: ClassVar[DumpBackend] = backend
