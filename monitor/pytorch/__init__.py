"""The monitor for PyTorch."""

from monitor.capture.errors import RunEnded
from monitor.pytorch.dump.debugger import PrecisionDebugger
from monitor.pytorch.dump.seeding import seed_all
from monitor.pytorch.trainer_mon import TrainerMon

__all__ = ["PrecisionDebugger", "RunEnded", "TrainerMon", "seed_all"]
