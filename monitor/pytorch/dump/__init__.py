"""The precision dump of PyTorch."""

from typing import ClassVar

from monitor.dump.backend import DumpBackend
from monitor.dump.debugger import Debugger
from monitor.pytorch.dump import backend

__all__ = ["PrecisionDebugger"]


class PrecisionDebugger(Debugger):
    __doc__ = Debugger.__doc__

    _backend: ClassVar[DumpBackend] = backend
