"""The precision dump: what every module and API of a few steps was given and gave, as statistics or as tensors."""

from monitor.dump.config import DumpConfig
from monitor.dump.files import load_tensor

__all__ = ["DumpConfig", "load_tensor"]
